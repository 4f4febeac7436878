"""Every linear's four-bit candidates and what each would cost: one forward and one backward, layer by layer.

The harm of an error dW is the token Fisher's, in nats a token: mean_t (d_t . dW x_t)^2 / 2, with x the linear's
inputs and d the gradient at its outputs of -log p(y), y drawn from the model itself. It is measured with the
codes that are written, so better codes have less of it.

Shapes: R rows of T tokens, N = R * T, H hidden, O outputs, I inputs.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from planner.errors import UsageError
from trainer.quantize.codes import factor
from trainer.quantize.formats import BLOCKS, Format
from trainer.quantize.streamed import Streamed, Weights

TOKENS_AT_ONCE = 2048
"""Of a layer's forward and backward: bounds what its activations take."""
SEPARATOR = "|"
Done = Callable[[int, str], None]
"""Told after each part how many are done, and which."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store a linear."""

    format: str
    block: int
    bytes: int
    """Of all its tensors."""
    harm: float
    """Nats a token."""
    digest: str
    """SHA-256 of the weight that a reader makes of it."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of a decoder layer, with its candidates."""

    name: str
    rows: int
    columns: int
    candidates: tuple[Candidate, ...]


def digest(weight: Tensor) -> str:
    """Return the SHA-256 of a weight's bytes."""
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Measurement:
    """The candidates of a whole model in a folder of its own, a file a layer: an interrupted one goes on."""

    def __init__(
        self,
        model: Streamed,
        folder: Path,
        *,
        rows: Tensor,
        held: Tensor,
        formats: Sequence[Format],
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """`rows` [R, T] are measured on, `held` [R', T] kept for the check; `dtype` is the readers'."""
        self.model, self.folder, self.formats, self.dtype = model, folder, tuple(formats), dtype
        self._rows, self._held, self._seed = rows, held, seed
        self._given = model.inputs(rows.shape[1])

    @property
    def parts(self) -> int:
        """How many times `done` is told."""
        return 2 * len(self.model.layers) + 1

    def run(self, done: Done) -> list[Linear]:
        """Measure what is not measured yet, and return every linear, in the model's order."""
        count = len(self.model.layers)
        first = next((index for index in range(count) if self._layer_file(index).exists()), count)
        if first == count:
            self._forward(done)
            self._top(done)
        for index in reversed(range(first)):
            self._backward(index)
            done(2 * count + 1 - index, f"layer {index} of {count} measured")
        return [linear for index in range(count) for linear in self._linears(index)]

    def stored(self, linear: str, candidate: Candidate) -> dict[str, Tensor]:
        """Return the tensors of a candidate by the end of their names."""
        layer = next(
            index
            for index, name in enumerate(self.model.layer_names)
            if linear.startswith(f"{name}.")
        )
        prefix = SEPARATOR.join((linear, candidate.format, str(candidate.block), ""))
        with safe_open(str(self._layer_file(layer)), framework="pt") as file:
            return {
                name.removeprefix(prefix): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
                if name.startswith(prefix)
            }

    def divergence(self, changed: Callable[[int | None], Weights]) -> Tensor:
        """Return the KL in nats a token, for each held row [R'], of the model with other weights from the model.

        `changed` gives the weights of a layer, or of what is outside the layers (None), by full name.
        """
        outside = changed(None)
        hidden = self.model.embedded(self._held, outside)
        for index in range(len(self.model.layers)):
            with torch.no_grad(), self.model.loaded(index, changed(index)) as layer:
                hidden = torch.cat(
                    [layer(part, **self._given[index]) for part in self._split(hidden)]
                )
        before = self._read_hidden(len(self.model.layers))[len(self._rows) :]
        found = []
        for own, other in zip(before, hidden, strict=True):
            with torch.no_grad():
                with self.model.with_head():
                    reference = self.model.logits(own).log_softmax(-1)
                with self.model.with_head(outside):
                    logs = self.model.logits(other).log_softmax(-1)
            found.append((reference.exp() * (reference - logs)).sum(-1).mean())
        return torch.stack(found)

    def _forward(self, done: Done) -> None:
        """Keep the inputs of every layer on disk."""
        count = len(self.model.layers)
        start = next((i for i in reversed(range(count + 1)) if self._hidden_file(i).exists()), None)
        if start is None:
            everything = torch.cat((self._rows, self._held))
            self._keep_hidden(0, self.model.embedded(everything))
            start = 0
        for index in range(start, count):
            hidden = self._read_hidden(index)
            with torch.no_grad(), self.model.loaded(index) as layer:
                hidden = torch.cat(
                    [layer(part, **self._given[index]) for part in self._split(hidden)]
                )
            self._keep_hidden(index + 1, hidden)
            done(index + 1, f"layer {index} of {count} run")

    def _top(self, done: Done) -> None:
        """Keep the gradient at the last layer's output, for labels drawn from the model."""
        count = len(self.model.layers)
        if self._gradient_file(count).exists():
            return
        hidden, gradients = self._read_hidden(count)[: len(self._rows)], []
        generator = torch.Generator().manual_seed(self._seed)
        with self.model.with_head():
            for row in hidden:
                row.requires_grad_()
                logs = self.model.logits(row).log_softmax(-1)
                labels = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator)
                loss = -logs.gather(1, labels.to(logs.device)).sum()
                (gradient,) = torch.autograd.grad(loss, row)
                gradients.append(gradient)
        self._save(self._gradient_file(count), {"gradient": torch.stack(gradients)})
        done(count + 1, "labels drawn")

    def _backward(self, index: int) -> None:
        """Make the candidates of one layer and keep them, with the gradient at its input."""
        hidden = self._read_hidden(index)[: len(self._rows)]
        above = self._read(self._gradient_file(index + 1))["gradient"].to(self.model.device)
        linears = self.model.linears(index)
        taken = _Taken(linears)
        with self.model.loaded(index) as layer:
            below = []
            with taken:
                for part, gradient in zip(self._split(hidden), self._split(above), strict=True):
                    part.requires_grad_()
                    (own,) = torch.autograd.grad(layer(part, **self._given[index]), part, gradient)
                    below.append(own)
            tensors: dict[str, Tensor] = {}
            found = []
            for names in taken.sharing():
                inputs = taken.inputs(names[0])
                moments = inputs.t() @ inputs / len(inputs)
                factored = factor(moments)
                for name in names:
                    weight, outputs = linears[name].weight.detach(), taken.gradients(name)
                    made: list[Candidate] = []
                    for form in self.formats:
                        for block in fitting(weight.shape[1], form.blocks):
                            stored, chosen = form.store(
                                weight,
                                block,
                                moments=moments,
                                factored=factored,
                                dtype=self.dtype,
                            )
                            made.append(
                                Candidate(
                                    form.name,
                                    block,
                                    sum(tensor.nbytes for tensor in stored.values()),
                                    token_fisher(chosen.float() - weight, inputs, outputs),
                                    digest(chosen.cpu()),
                                )
                            )
                            prefix = SEPARATOR.join((name, form.name, str(block), ""))
                            tensors |= {prefix + end: value for end, value in stored.items()}
                    rows, columns = weight.shape
                    found.append(Linear(name, rows, columns, tuple(made)))
        self._save(self._gradient_file(index), {"gradient": torch.cat(below)})
        order = {name: number for number, name in enumerate(linears)}
        found.sort(key=lambda each: order[each.name])
        note = json.dumps([asdict(linear) for linear in found])
        self._save(self._layer_file(index), tensors, {"linears": note})
        self._gradient_file(index + 1).unlink()
        self._hidden_file(index).unlink()

    def _linears(self, index: int) -> list[Linear]:
        with safe_open(str(self._layer_file(index)), framework="pt") as file:
            note = json.loads(file.metadata()["linears"])
        return [
            Linear(**{**each, "candidates": tuple(Candidate(**own) for own in each["candidates"])})
            for each in note
        ]

    def _split(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield rows [R, T, H] a few at a time, on the device."""
        rows = max(1, TOKENS_AT_ONCE // hidden.shape[1])
        return (part.to(self.model.device) for part in hidden.split(rows))

    def _hidden_file(self, index: int) -> Path:
        return self.folder / f"hidden-{index:04}.safetensors"

    def _gradient_file(self, index: int) -> Path:
        return self.folder / f"gradient-{index:04}.safetensors"

    def _layer_file(self, index: int) -> Path:
        return self.folder / f"layer-{index:04}.safetensors"

    def _keep_hidden(self, index: int, hidden: Tensor) -> None:
        self._save(self._hidden_file(index), {"hidden": hidden})

    def _read_hidden(self, index: int) -> Tensor:
        return self._read(self._hidden_file(index))["hidden"]

    def _read(self, path: Path) -> dict[str, Tensor]:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def _save(
        self, path: Path, tensors: Mapping[str, Tensor], note: dict[str, str] | None = None
    ) -> None:
        """Write a file whole or not at all: what is there is trusted by the next run."""
        partial = path.with_suffix(".part")
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial, note
        )
        partial.rename(path)


def token_fisher(error: Tensor, inputs: Tensor, outputs: Tensor) -> float:
    """Return the harm of a weight's error [O, I], for inputs [N, I] and gradients at outputs [N, O]."""
    return float(((inputs @ error.t()) * outputs).sum(1).square().mean()) / 2


def fitting(columns: int, blocks: Sequence[int] = BLOCKS) -> tuple[int, ...]:
    """Return the block sizes that divide a weight's inner size."""
    return tuple(block for block in blocks if columns % block == 0)


def check_sizes(linears: Mapping[str, nn.Linear]) -> None:
    """Raise UsageError for the first linear that no block divides."""
    for name, module in linears.items():
        if not fitting(module.in_features):
            raise UsageError(
                f"model: {name} has {module.in_features:,} inputs, which no block of "
                f"{' or '.join(map(str, sorted(BLOCKS)))} weights divides"
            )


class _Taken:
    """`with taken:` keeps the inputs [n, I] of linears, and the gradients [n, O] at their outputs."""

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        self._linears = linears
        self._inputs: dict[str, list[Tensor]] = {name: [] for name in linears}
        self._gradients: dict[str, list[Tensor]] = {name: [] for name in linears}
        self._handles: list[Any] = []

    def __enter__(self) -> "_Taken":
        for name, module in self._linears.items():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._inputs[name].append(inputs[0].detach())
            output.register_hook(lambda gradient: self._gradients[name].append(gradient))

        return hook

    def sharing(self) -> list[list[str]]:
        """Return the linears in groups that were given the same inputs."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, parts in self._inputs.items():
            groups.setdefault(tuple(part.data_ptr() for part in parts), []).append(name)
        return list(groups.values())

    def inputs(self, name: str) -> Tensor:
        """Return all inputs [N, I] of a linear."""
        return torch.cat([part.flatten(0, -2) for part in self._inputs[name]])

    def gradients(self, name: str) -> Tensor:
        """Return all gradients [N, O] at its outputs."""
        return torch.cat([part.flatten(0, -2) for part in self._gradients[name]])
