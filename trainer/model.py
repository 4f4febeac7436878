"""The policy: base weights in the asked dtype with LoRA, QLoRA or full training, in one place.

Shapes: B rows, T tokens, H hidden, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from planner.errors import MissingExtraError, UnsupportedError, UsageError
from planner.run.recipe import Attention, EngineKind, Method, Recipe
from trainer.adapters import add_adapters, factors, is_pissa
from trainer.devices import run_device
from trainer.neftune import EmbeddingNoise
from trainer.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from trainer.parallel.sharding import Sharded

R = TypeVar("R")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ATTENTION = {
    Attention.EAGER: "eager",
    Attention.SDPA: "sdpa",
    Attention.FLASH: "flash_attention_2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What turns hidden states into logits: softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The model that is trained and what belongs to it."""

    model: Any
    """A transformers causal language model, or PEFT's wrapper around one."""
    tokenizer: Any
    method: Method
    source: str
    """The folder or hub id that it was loaded from."""
    revision: str | None
    dtype: torch.dtype
    device: torch.device
    """A GPU with its index: torch.device("cuda") equals no tensor's device."""
    noise: EmbeddingNoise | None = None
    """NEFTune's, in training mode; None: embeddings as they are."""
    start: dict[str, Tensor] | None = None
    """What is trained, as it was when the run began: the reference; None: adapters off."""
    pissa: dict[str, Tensor] | None = None
    """The factors that PiSSA took out of the base, on the host."""
    sharded: "Sharded | None" = None
    """How the model is cut over ranks; None: all of it is here."""

    @property
    def base(self) -> Any:
        """Return the transformers model, adapters (if any) inside."""
        return self.model if self.method is Method.FULL else self.model.get_base_model()

    @property
    def head(self) -> Head:
        """Return the output head; read anew each time, for an optimizer may swap weights."""
        layer = self.base.get_output_embeddings()
        config = self.base.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return Head(
            weight=layer.weight,
            bias=getattr(layer, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
            logit_scale=float(scale),
        )

    def hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the last hidden states [B, T, H] of the backbone; the head does not run."""
        hidden: Tensor = self.backbone(input_ids, **inputs).last_hidden_state
        return hidden

    def backbone(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Return what the model without its head returns."""
        return self.base.base_model(input_ids=input_ids, use_cache=False, **inputs)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Be in training mode inside, where dropout drops; rollouts and scores are outside of it."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()
            if self.method is Method.QLORA:
                keep_differentiable(self.model)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train this policy together."""
        return ALONE if self.sharded is None else self.sharded.ranks

    def one_pass(self, work: Callable[[], R]) -> R:
        """Return `work()`, a forward and its backward; out of memory on one rank is so on all."""
        return work() if self.sharded is None else self.sharded.one_pass(work)

    def agreed(self, work: Callable[[], R]) -> R:
        """Return `work()`, which waits for no other rank; out of memory on one rank is so on all."""
        return work() if self.sharded is None else self.sharded.agreed(work)

    def whole(self, work: Callable[[], R], *, keep: bool = False) -> R:
        """Return `work()`, which may read any weight: on several ranks they are gathered for it.

        Without gradients what is outside the layers is cut again behind it, unless `keep`: until `settle`.
        """
        return work() if self.sharded is None else self.sharded.run(work, keep=keep)

    def settle(self) -> None:
        """End what `whole(..., keep=True)` kept."""
        if self.sharded is not None:
            self.sharded.settle()

    def stepped(self) -> list[tuple[str, Tensor]]:
        """Return what the optimizer steps: the trained parameters, or this rank's parts of them."""
        if self.sharded is None:
            return list(self.trainable())
        return [(shard.name, shard.local) for shard in self.sharded.shards]

    def take_gradients(self) -> None:
        """Give what is stepped its gradients; one process has them there already."""
        if self.sharded is not None:
            self.sharded.take_gradients()

    def clear_gradients(self) -> None:
        """Drop gradients that the optimizer cannot: those of parameters in parts."""
        if self.sharded is not None:
            self.sharded.clear_gradients()

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the named parameters that the optimizer steps."""
        return [item for item in self.model.named_parameters() if item[1].requires_grad]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Be the reference model inside: as the run began. Full training has none without a copy."""
        if self.method is Method.FULL:
            raise UnsupportedError(
                "recipe.beta: full training has no reference without a second copy",
                hint="set beta: 0, or train adapters (method: lora)",
            )
        if self.start is None:
            with self.model.disable_adapter():
                yield
            return
        trained = dict(self.stepped())
        if self.sharded is not None:
            # what ranks gather is the shards' own memory: values move, not tensors
            kept = {name: local.detach().clone() for name, local in trained.items()}
            with _holding(trained, self.start, kept):
                yield
            return
        now = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = self.start[name]
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = now[name]


@contextmanager
def _holding(
    trained: dict[str, Tensor], inside: dict[str, Tensor], outside: dict[str, Tensor]
) -> Iterator[None]:
    """Let `trained` have the values `inside`, and `outside` again afterwards."""
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(inside[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(outside[name])


def load_policy(
    source: str,
    *,
    recipe: Recipe,
    revision: str | None = None,
    device: str | None = None,
    seed: int = 0,
    lora_alpha: float | None = None,
    neftune_alpha: float | None = None,
    on_host: bool = False,
) -> Policy:
    """Return the policy of `recipe` over the base model at `source` (folder or hub id).

    `on_host`: the model stays in host memory, from where `shard_policy` fetches a unit at a time; a base that
    is quantised on the GPU does not.
    Weights have exactly the recipe's dtype (bf16 when it says none), never silently fp32.
    """
    place = run_device(device)
    dtype = DTYPES.get(recipe.dtype or "bf16")
    if dtype is None:
        raise UsageError(
            f"recipe.dtype: {recipe.dtype!r} cannot be trained", hint=f"one of {', '.join(DTYPES)}"
        )
    tokenizer = load_tokenizer(source, revision=revision)
    there = torch.device("cpu") if on_host and recipe.method is not Method.QLORA else place
    model = _load_base(source, recipe=recipe, revision=revision, dtype=dtype, device=there)
    if recipe.method is not Method.FULL:
        adapter_dtype = DTYPES[recipe.lora.dtype] if recipe.lora.dtype else dtype
        model = add_adapters(
            model, recipe.lora, dtype=adapter_dtype, device=there, seed=seed, alpha=lora_alpha
        )
    # `Policy.training` is where dropout drops: what samples and scores is the model without it
    model.eval()
    if recipe.method is Method.QLORA:
        keep_differentiable(model)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        method=recipe.method,
        source=source,
        revision=revision,
        dtype=dtype,
        device=place,
        noise=EmbeddingNoise(model, neftune_alpha) if neftune_alpha else None,
        start=_start(model) if keeps_start(recipe) else None,
        pissa=factors(model) if is_pissa(model) else None,
    )


def keeps_start(recipe: Recipe) -> bool:
    """Say whether the reference is the policy as the run found it, kept beside it.

    Without its adapters it is another model where an adapter was there already, where biases are
    trained, and where PiSSA took its start out of the base.
    """
    lora = recipe.lora
    other = lora.start_from is not None or lora.bias != "none" or lora.init.startswith("pissa")
    return bool(recipe.beta) and recipe.method is not Method.FULL and other


def _start(model: Any) -> dict[str, Tensor]:
    """Return a copy of everything that is trained."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_tokenizer(source: str, *, revision: str | None = None) -> Any:
    """Return the tokenizer at `source`, with a padding token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model: no tokenizer at {source!r} ({str(error).splitlines()[0][:160]})",
            hint="a folder with config.json, tokenizer and safetensors, or a hub id",
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_base(
    source: str, *, recipe: Recipe, revision: str | None, dtype: torch.dtype, device: torch.device
) -> Any:
    from transformers import AutoModelForCausalLM

    attention = ATTENTION[recipe.attention or Attention.SDPA]
    if recipe.engine.kind is EngineKind.VLLM_SHARED:
        return _empty_base(
            source, recipe=recipe, revision=revision, dtype=dtype, attention=attention
        )
    options: dict[str, Any] = {"dtype": dtype, "revision": revision}
    options["attn_implementation"] = attention
    if recipe.method is Method.QLORA:
        options["quantization_config"] = _nf4(recipe, dtype)
    if device.type != "cpu" or recipe.method is Method.QLORA:
        options["device_map"] = {"": str(device)}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"model: cannot load {source!r} ({str(error).splitlines()[0][:200]})",
            hint="a folder with config.json and safetensors, or a hub id",
        ) from None
    if recipe.method is Method.FULL and getattr(model, "hf_quantizer", None) is not None:
        # files in four bits: what their codes mean is what can be trained, or merged into
        model = model.dequantize(dtype)
        # transformers 5.19 would undo the reading of codes when such a model is saved, and cannot
        model._weight_conversions = []
    model.requires_grad_(recipe.method is Method.FULL)
    return model


def _empty_base(
    source: str, *, recipe: Recipe, revision: str | None, dtype: torch.dtype, attention: str
) -> Any:
    """Return the base on the meta device: vllm-shared gives it vLLM's weights, never a copy."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"model: cannot build {source!r} ({str(error).splitlines()[0][:200]})",
            hint="a folder with config.json and safetensors, or a hub id",
        ) from None
    with contextlib.suppress(OSError):  # a model without one has the defaults
        model.generation_config = GenerationConfig.from_pretrained(
            source, revision=revision or "main"
        )
    model.requires_grad_(recipe.method is Method.FULL)
    return model


def _nf4(recipe: Recipe, dtype: torch.dtype) -> Any:
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError:
        raise MissingExtraError("recipe.method qlora", "train") from None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=recipe.quantization or "nf4",
        bnb_4bit_use_double_quant=recipe.double_quant is not False,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_differentiable(model: Any) -> None:
    """Put 4-bit linears in training mode, where they have no dropout anyway.

    On a CPU with AVX512-BF16 an eval-mode bitsandbytes 0.50 linear repacks itself for a kernel that has
    no backward: gradients would silently stop there.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True


def eos_ids(policy: Policy) -> tuple[int, ...]:
    """Return every token that ends a completion: the model's own and the tokenizer's."""
    own = policy.base.generation_config.eos_token_id
    ids = set(own if isinstance(own, list | tuple) else [own]) | {policy.tokenizer.eos_token_id}
    return tuple(sorted(index for index in ids if index is not None))
