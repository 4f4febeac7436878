"""Optimizers that are exact in low precision and bounded in memory.

One class, `ElementwiseOptimizer`, does AdamW, Lion and SGD. Weights are stepped in bundles: a large
tensor in pieces, small ones of a kind together. A bundle of weights and state is widened to fp32, updated
by torch's foreach kernels, and written back: a step's scratch is at most 48 MiB however large the model is
(torch's foreach AdamW takes 2 bytes a parameter more), and a few launches do hundreds of adapters.

Where the exact weights live:
* fp32 weights: in the parameter.
* master_weights: an fp32 copy in the optimizer state; the bf16 or fp16 parameter is its rounding.
  Right for adapters: small, and they learn through changes far below bf16's 8 bits.
* bf16 without master: stochastic rounding. Rounding to nearest loses every change under 0.2-0.4 %
  of a weight, which at RL learning rates is almost all of them; rounding up with probability
  proportional to the remainder is right on average. No extra memory.

State is fp32, bf16 (stochastically rounded too: with beta2 = 0.999 a bf16 second moment would
otherwise stand still) or int8 in blocks of 256 with bitsandbytes' kernels (2.03 bytes a
parameter). `offload` keeps state in pinned host memory: beside a GPU it is streamed through, the next
bundle's coming and the last one's going on two side streams while one is stepped.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from planner.errors import UsageError
from planner.units import format_bytes
from trainer.bundles import Bundle, Copies, Part, Wide, ahead, kind
from trainer.host_store import CudaCopies
from trainer.moments import BLOCK, blocks, coded, meaning, nearest_codes, quantise, widen

CHUNK_ELEMENTS = 2**21
"""Elements of a bundle at most, 8 MiB in fp32: up to six of these is a step's scratch. A multiple of BLOCK.

Half as many where states are streamed: those of three bundles are on the device then.
"""
MIN_INT8_ELEMENTS = 4096
"""Smaller tensors keep fp32 state, as in bitsandbytes: norms and biases are sensitive."""


class Rule(StrEnum):
    """The update."""

    ADAMW = "adamw"
    LION = "lion"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"

    @property
    def num_states(self) -> int:
        """State tensors a parameter has, without the master."""
        return {"adamw": 2, "lion": 1, "sgd": 0, "sgd-momentum": 1}[self.value]


class StateFormat(StrEnum):
    """dtype of the moments."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """Everything but the parameters and the rule's learning rate schedule."""

    rule: Rule = Rule.ADAMW
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    """Lion uses (0.9, 0.99) customarily; sgd-momentum takes its momentum from the first."""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; not applied to tensors of one dimension (norms, biases)."""
    master_weights: bool = False
    state_format: StateFormat = StateFormat.FP32
    offload: bool = False
    seed: int = 0
    """Of the stochastic rounding."""


class ElementwiseOptimizer(torch.optim.Optimizer):
    """AdamW, Lion or SGD, chunk by chunk; see the module's docstring.

    `grad_factor` multiplies every gradient in fp32 inside the step: 1 / loss scale times the clip
    coefficient goes there, instead of rounding low-precision gradients once more in place.
    """

    def __init__(self, params: Iterable[Any], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.grad_factor = 1.0
        super().__init__(params, {"lr": settings.lr, "weight_decay": settings.weight_decay})
        self._generators: dict[torch.device, torch.Generator] = {}
        self.copies: Copies | None = None
        """How offloaded states come and go; None where they lie on the parameters' device."""
        for parameter in self._parameters():
            half = parameter.dtype in (torch.bfloat16, torch.float16)
            if parameter.dtype == torch.float16 and not settings.master_weights:
                raise UsageError(
                    "optimizer: fp16 weights need master_weights (fp16 has too little range to "
                    "add small updates in place)",
                    hint="set recipe.master_weights: true, or dtype: bf16",
                )
            if not half and parameter.dtype != torch.float32:
                raise UsageError(f"optimizer: cannot train {parameter.dtype} weights", hint="fp32")
            if not parameter.is_contiguous():
                raise UsageError("optimizer: a trained weight is not contiguous in memory")

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for bundle in ahead(self._all_bundles()):
                self._step_bundle(bundle)
        finally:
            if self.copies is not None:
                self.copies.finish()
        return loss

    def _all_bundles(self) -> Iterator[Bundle]:
        """Yield what is stepped together, group by group, each with its group's learning rate and decay."""
        for group in self.param_groups:
            yield from self._bundles(group)

    def _bundles(self, group: dict[str, Any]) -> Iterator[Bundle]:
        """Cut a group's tensors, in their order, into bundles of at most CHUNK_ELEMENTS of one kind.

        A tensor may begin in one bundle and end in the next.
        """
        parts: list[Part] = []
        kinds: tuple[object, ...] = ()
        room = self._longest(group)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(self.new_state(parameter))
            state["step"] += 1
            weights, grad = parameter.view(-1), parameter.grad.reshape(-1)
            start, own = 0, kind(state, weights, grad)
            while start < len(weights):
                if parts and (room == 0 or own != kinds):
                    yield Bundle(parts, group, self.copies)
                    parts, room = [], self._longest(group)
                kinds = own
                chunk = slice(start, min(start + room, len(weights)))
                parts.append(Part(state, weights, grad, chunk))
                room -= chunk.stop - chunk.start
                start = chunk.stop
        if parts:
            yield Bundle(parts, group, self.copies)

    def _longest(self, group: dict[str, Any]) -> int:
        if self.settings.offload and self.copies is None and group["params"][0].is_cuda:
            self.copies = CudaCopies(group["params"][0].device)
        return CHUNK_ELEMENTS if self.copies is None else CHUNK_ELEMENTS // 2

    def _step_bundle(self, bundle: Bundle) -> None:
        key = "master" if bundle.has("master") else None
        exact = bundle.in_fp32(key)
        grads = self._gradients(bundle)
        self._update(bundle, exact, grads)
        self._store(bundle, key, exact)
        if key is not None:
            bundle.put(None, exact.parts)

    def _gradients(self, bundle: Bundle) -> list[Tensor]:
        """Return the bundle's gradients times the factor, in fp32, as new tensors."""
        grads = [part.of(part.grad) for part in bundle.parts]
        if grads[0].dtype == torch.float32:
            return list(torch._foreach_mul(grads, self.grad_factor))
        wide = bundle.copied(grads)
        wide.whole.mul_(self.grad_factor)
        return wide.parts

    def new_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state before its first step."""
        settings = self.settings
        device = torch.device("cpu") if settings.offload else parameter.device
        pin = settings.offload and parameter.is_cuda
        state: dict[str, Any] = {"step": 0}
        if settings.master_weights and parameter.dtype != torch.float32:
            master = _zeros(parameter.numel(), torch.float32, device, pin=pin)
            state["master"] = master.copy_(parameter.detach().view(-1))
        int8 = settings.state_format is StateFormat.INT8 and parameter.numel() >= MIN_INT8_ELEMENTS
        dtype = torch.float32
        if int8:
            dtype = torch.uint8
        elif settings.state_format is StateFormat.BF16:
            dtype = torch.bfloat16
        for number in range(1, settings.rule.num_states + 1):
            moment = _zeros(parameter.numel(), dtype, device, pin=pin)
            if int8:
                # scale 0: whatever the codes are, they mean 0.0
                blocks = -(-parameter.numel() // BLOCK)
                state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=device)
            state[f"moment{number}"] = moment
        return state

    def _update(self, bundle: Bundle, exact: Wide, grads: list[Tensor]) -> None:
        """Update `exact` in place, and the bundle's moments."""
        numbers = range(1, self.settings.rule.num_states + 1)
        moments = [self._moment(bundle, number) for number in numbers]
        parts = [moment.parts for moment in moments]
        step, rule = bundle.parts[0].state["step"], _RULES[self.settings.rule]
        rule(self.settings, exact.parts, grads, parts, step, bundle.group)
        for number, moment in zip(numbers, moments, strict=True):
            if not bundle.has(f"absmax{number}"):
                self._store(bundle, f"moment{number}", moment)
                continue
            codes, scales = coded(moment.whole, number)
            bundle.put(f"moment{number}", codes.split(bundle.sizes))
            sizes = [-(-size // BLOCK) for size in bundle.sizes]
            bundle.put(f"absmax{number}", scales.split(sizes))

    def _moment(self, bundle: Bundle, number: int) -> Wide:
        """Return one moment of a bundle in fp32 on its device: views of the state where possible."""
        if not bundle.has(f"absmax{number}"):
            return bundle.in_fp32(f"moment{number}")
        codes, scales = bundle.joined(f"moment{number}"), bundle.joined(f"absmax{number}")
        return Wide(meaning(codes, scales, number), bundle.sizes)

    def _store(self, bundle: Bundle, key: str | None, exact: Wide) -> None:
        """Write fp32 values back: exactly, or rounded stochastically to bf16."""
        kept = bundle.parts[0].weights if key is None else bundle.parts[0].state[key]
        if kept.dtype == torch.bfloat16:
            exact = Wide(_rounded(exact.whole, self._generator(exact.whole.device)), bundle.sizes)
        bundle.put_back(key, exact)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device=device).manual_seed(self.settings.seed)
            self._generators[device] = generator
        return self._generators[device]

    @torch.no_grad()
    def moment(self, parameter: Tensor, number: int) -> Tensor:
        """Return what the codes of an 8-bit moment mean, in fp32."""
        whole = slice(0, parameter.numel())
        return widen(self.state[parameter], number, whole, parameter.device)

    @torch.no_grad()
    def set_moment(
        self, parameter: Tensor, number: int, values: Tensor, *, keep_scales: bool
    ) -> None:
        """Make an 8-bit moment mean `values`; `keep_scales`: by the codes that meant it with the scales it has.

        Scales that are found anew can be others: of the signed codes none means minus the scale.
        """
        state = self.state[parameter]
        for start in range(0, parameter.numel(), CHUNK_ELEMENTS):
            chunk = slice(start, min(start + CHUNK_ELEMENTS, parameter.numel()))
            part = values[chunk].to(parameter.device)
            if not keep_scales:
                quantise(state, number, chunk, part)
                continue
            scales = state[f"absmax{number}"][blocks(chunk)].to(part.device)
            codes = nearest_codes(part, scales, signed=number == 1)
            state[f"moment{number}"][chunk].copy_(codes)

    def rounding_state(self, device: torch.device) -> Tensor:
        """Return the random state of stochastic rounding on `device`."""
        return self._generator(device).get_state()

    def set_rounding_state(self, device: torch.device, state: Tensor) -> None:
        """Go on rounding where `state` was taken."""
        self._generator(device).set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict plus the rounding's random state, by device."""
        document = super().state_dict()
        document["generators"] = {
            str(device): generator.get_state() for device, generator in self._generators.items()
        }
        return document

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict returned: the next step is bit for bit the one it would have been.

        torch's own version casts state to the parameter's dtype: a bf16 master would be the end of
        exactness. Raises UsageError if the parameters differ in number.
        """
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = self._parameters()
        if len(saved) != len(parameters):
            raise UsageError(
                f"optimizer state: for {len(saved)} parameters, the model trains {len(parameters)}",
                hint="resume with the recipe that the checkpoint was made with",
            )
        for group, old in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in old.items() if key != "params"})
        self.state.clear()
        for index, parameter in zip(saved, parameters, strict=True):
            if index in state_dict["state"]:
                template = self.new_state(parameter)
                self.state[parameter] = _restored(template, state_dict["state"][index])
        self._generators.clear()
        here = {parameter.device.type: parameter.device for parameter in parameters}
        for name, random_state in state_dict.get("generators", {}).items():
            # saved as cuda:1, resumed where the only GPU is cuda:0
            device = here.get(torch.device(name).type)
            if device is not None:
                self._generator(device).set_state(random_state.cpu())


def _restored(template: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return `template` filled with saved values; UsageError if they are another optimizer's."""
    same = template.keys() == saved.keys() and all(
        not isinstance(value, Tensor)
        or (value.shape == saved[key].shape and value.dtype == saved[key].dtype)
        for key, value in template.items()
    )
    if not same:
        raise UsageError(
            "optimizer state: made by another optimizer or for other weights",
            hint="resume with the recipe that the checkpoint was made with",
        )
    return {
        key: value.copy_(saved[key]) if isinstance(value, Tensor) else saved[key]
        for key, value in template.items()
    }


def saved_values(saved: dict[str, Any], key: str, number: int) -> Tensor:
    """Return one tensor of a parameter's saved state as numbers, whatever its format."""
    if saved[key].dtype != torch.uint8:
        return saved[key]  # type: ignore[no-any-return]
    return widen(saved, number, slice(0, saved[key].numel()), torch.device("cpu"))


def copy_stochastic_(target: Tensor, source: Tensor, *, generator: torch.Generator) -> None:
    """Round fp32 `source` into bf16 `target` at random, right on average."""
    target.copy_(_rounded(source, generator))


def _rounded(source: Tensor, generator: torch.Generator) -> Tensor:
    """Return fp32 `source` rounded at random to what bf16 can hold.

    bf16 is the upper half of fp32's bits: adding a uniform 16-bit number to the lower half carries
    into the upper with probability remainder / 2^16. Infinities stay (their lower half is 0).
    """
    noise = torch.randint(
        0, 2**16, source.shape, dtype=torch.int32, device=source.device, generator=generator
    )
    return noise.add_(source.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32)


def _adamw(
    settings: OptimizerSettings,
    exact: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    step: int,
    group: dict[str, Any],
) -> None:
    beta1, beta2 = settings.betas
    mean, square = moments
    torch._foreach_lerp_(mean, grads, 1 - beta1)
    torch._foreach_mul_(square, beta2)
    torch._foreach_addcmul_(square, grads, grads, value=1 - beta2)
    torch._foreach_mul_(exact, 1 - group["lr"] * group["weight_decay"])
    denominator = torch._foreach_sqrt(square)
    torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominator, settings.eps)
    torch._foreach_addcdiv_(exact, mean, denominator, value=-group["lr"] / (1 - beta1**step))


def _lion(
    settings: OptimizerSettings,
    exact: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    step: int,
    group: dict[str, Any],
) -> None:
    beta1, beta2 = settings.betas
    (mean,) = moments
    torch._foreach_mul_(exact, 1 - group["lr"] * group["weight_decay"])
    signs = torch._foreach_lerp(mean, grads, 1 - beta1)
    torch._foreach_sign_(signs)
    torch._foreach_add_(exact, signs, alpha=-group["lr"])
    torch._foreach_lerp_(mean, grads, 1 - beta2)


def _sgd(
    settings: OptimizerSettings,
    exact: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    step: int,
    group: dict[str, Any],
) -> None:
    torch._foreach_mul_(exact, 1 - group["lr"] * group["weight_decay"])
    if moments:
        (grown,) = moments
        torch._foreach_mul_(grown, settings.betas[0])
        torch._foreach_add_(grown, grads)
        grads = grown
    torch._foreach_add_(exact, grads, alpha=-group["lr"])


class _Pinning:
    """Whether the system still pins memory; it is asked no more once it has refused."""

    refused = False


def _zeros(numel: int, dtype: torch.dtype, device: torch.device, *, pin: bool) -> Tensor:
    """Return zeros, in pinned host memory where wanted and granted; said once where it is not."""
    if pin and not _Pinning.refused:
        try:
            return torch.zeros(numel, dtype=dtype, device=device, pin_memory=True)
        except RuntimeError as error:  # CUDA's, or this torch has nothing to pin for
            _Pinning.refused = True
            first = str(error).partition("\n")[0]
            size = format_bytes(numel * dtype.itemsize)
            print(
                f"optimizer offload: {size} of host memory could not be pinned ({first}); steps are "
                "slower, results the same",
                file=sys.stderr,
            )
    return torch.zeros(numel, dtype=dtype, device=device)


_RULES = {Rule.ADAMW: _adamw, Rule.LION: _lion, Rule.SGD: _sgd, Rule.SGD_MOMENTUM: _sgd}
