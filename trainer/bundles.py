"""Pieces of parameters that an optimizer steps together, and their states: on the device, or streamed from the host.

Shapes: a bundle has n pieces of s_1 .. s_n elements; what is made of it for a while is flat, [s_1 + .. + s_n].
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.moments import BLOCK, blocks


class Copies(Protocol):
    """Moves states between a device and the host beside what is computed (trainer.host_store.CudaCopies)."""

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Start copying host tensors into device ones; return an event that is set once all are there."""
        ...

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Start copying device tensors into host ones, after what has been computed so far; return an event."""
        ...

    def wait(self, event: Any) -> None:
        """Make what is computed from here on come after the event."""
        ...

    def finish(self) -> None:
        """Return when every copy is done: the host may read."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one parameter: weights and gradient whole and flat, and which of their elements."""

    state: dict[str, Any]
    weights: Tensor
    grad: Tensor
    chunk: slice

    def of(self, values: Tensor) -> Tensor:
        """Return the piece's of a whole parameter's flat values."""
        whole = self.chunk.stop - self.chunk.start == len(values)
        return values if whole else values[self.chunk]


def kind(state: dict[str, Any], weights: Tensor, grad: Tensor) -> tuple[object, ...]:
    """Return what must be the same of all parameters in a bundle."""
    # codes have scales by blocks that begin with their tensor: only whole blocks can be joined
    alone = id(state) if "absmax1" in state and len(weights) % BLOCK else 0
    return (weights.dtype, weights.device, grad.dtype, state["step"], *state, alone)


class Wide:
    """fp32 values of a bundle: `parts`, one a piece, and where they are new ones `whole`, all of them in a row."""

    def __init__(self, whole: Tensor, sizes: list[int]) -> None:
        self.whole = whole
        self.parts = list(whole.split(sizes))

    @classmethod
    def of_views(cls, parts: list[Tensor]) -> "Wide":
        """Stand for values where they are kept: there is no `whole`."""
        wide = cls.__new__(cls)
        wide.parts = parts
        return wide


class Bundle:
    """Pieces of parameters that are stepped together.

    With `copies` their states are elsewhere: `bring` starts their way here, `put` their way back, and what
    has left is held until `settle`.
    """

    def __init__(self, parts: list[Part], group: dict[str, Any], copies: Copies | None) -> None:
        self.parts = parts
        self.group = group
        """Their learning rate and weight decay."""
        self.sizes = [part.chunk.stop - part.chunk.start for part in parts]
        self.device = parts[0].weights.device
        self._copies = copies
        self._here: dict[str, Tensor] = {}
        """States that are on their way or have come, in a row."""
        self._arrival: Any = None
        self._leaving: list[tuple[Sequence[Tensor], Any]] = []

    def has(self, key: str) -> bool:
        """Return whether the parameters' states have `key`."""
        return key in self.parts[0].state

    def kept(self, key: str | None) -> list[Tensor]:
        """Return the pieces of one state, or (None) of the weights, where they are kept."""
        if key is None:
            return [part.of(part.weights) for part in self.parts]
        if key.startswith("absmax"):
            return [part.state[key][blocks(part.chunk)] for part in self.parts]
        return [part.of(part.state[key]) for part in self.parts]

    def bring(self) -> None:
        """Start bringing all states, where they are elsewhere."""
        if self._copies is None:
            return
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for key, value in self.parts[0].state.items():
            if isinstance(value, Tensor):
                kept = self.kept(key)
                sizes = [len(each) for each in kept]
                self._here[key] = torch.empty(sum(sizes), dtype=value.dtype, device=self.device)
                sources += kept
                targets += self._here[key].split(sizes)
        self._arrival = self._copies.bring(sources, targets)

    def joined(self, key: str) -> Tensor:
        """Return one state in a row on the bundle's device."""
        if self._copies is not None:
            self._copies.wait(self._arrival)
            return self._here[key]
        kept = self.kept(key)
        return (kept[0] if len(kept) == 1 else torch.cat(kept)).to(self.device)

    def in_fp32(self, key: str | None) -> Wide:
        """Return one state, or (None) the weights, in fp32 on the bundle's device: views where they are so."""
        if key is not None and self._copies is not None:
            return Wide(self.joined(key).float(), self.sizes)
        kept = self.kept(key)
        if kept[0].dtype == torch.float32 and kept[0].device == self.device:
            return Wide.of_views(kept)
        return self.copied(kept)

    def copied(self, values: list[Tensor]) -> Wide:
        """Return values of the pieces as new ones in fp32."""
        whole = torch.empty(sum(self.sizes), dtype=torch.float32, device=self.device)
        wide = Wide(whole, self.sizes)
        torch._foreach_copy_(wide.parts, values)
        return wide

    def put(self, key: str | None, values: Sequence[Tensor]) -> None:
        """Write new values of one state, or (None) of the weights, to where they are kept."""
        kept = self.kept(key)
        if key is None or self._copies is None:
            torch._foreach_copy_(kept, list(values))
            return
        values = [value.to(place.dtype) for value, place in zip(values, kept, strict=True)]
        self._leaving.append((values, self._copies.send(values, kept)))

    def put_back(self, key: str | None, wide: Wide) -> None:
        """Write values of `in_fp32(key)`, changed in place; views of what is kept are there already."""
        kept = self.parts[0].weights if key is None else self.parts[0].state[key]
        here = (kept.dtype, kept.device) == (wide.parts[0].dtype, wide.parts[0].device)
        if not here or (key is not None and self._copies is not None):
            self.put(key, wide.parts)

    def settle(self) -> None:
        """Let go of what has left, once what is computed from here on comes after that."""
        for _, event in self._leaving:
            assert self._copies is not None
            self._copies.wait(event)
        self._leaving.clear()


def ahead(bundles: Iterable[Bundle]) -> Iterator[Bundle]:
    """Yield bundles in order, the states of the next one on their way while one is stepped."""
    before: Bundle | None = None
    last: Bundle | None = None
    for bundle in bundles:
        bundle.bring()
        if before is not None:
            yield before
            if last is not None:
                last.settle()
            last = before
        before = bundle
    if before is not None:
        yield before
