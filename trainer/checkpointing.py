"""Per-layer non-reentrant checkpointing of a decoder, with or without host offload.

Non-reentrant checkpointing keeps the graph of the first forward; the recompute only fills in saved
values. So a layer's input may come to the recompute as a fresh tensor from wherever it was kept:
the device, the host (`trainer.host_store`), or, with every-k, from running the layers before it
again. That keeps hooks away from all other saved tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from planner.errors import UnsupportedError, UsageError
from planner.run.recipe import Checkpointing
from trainer.host_store import HostStore, Ticket
from trainer.say import Say, silent

LAYER_LISTS = ("layers", "h", "blocks")
Forward = Callable[[Tensor], Any]
"""A layer with its other arguments bound."""


class _Source(Protocol):
    def take(self) -> Tensor: ...


class CheckpointedLayers:
    """Decoder layers whose forward is checkpointed; `remove()` undoes it."""

    def __init__(self, layers: Sequence[nn.Module], *, every: int, store: HostStore | None) -> None:
        self.layers = tuple(layers)
        self.store = store
        self.recomputed = 0
        """Layer recomputations so far."""
        self.rerun = 0
        """Of every-k: layers run once more, without gradients, to get at a later one's input."""
        self._every = every
        self._segment: _Segment | None = None
        # what other code has put in place of a layer's own forward (accelerate's hooks do)
        self._before = [layer.__dict__.get("forward") for layer in self.layers]
        for index, layer in enumerate(self.layers):
            layer.forward = self._wrapped(index, layer.forward)  # type: ignore[method-assign]

    def _wrapped(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Generation and scoring: nothing is saved, so nothing is gained.
            if not torch.is_grad_enabled():
                return original(hidden_states, *args, **kwargs)
            if kwargs.get("use_cache"):
                raise UnsupportedError(
                    "a checkpointed layer can't fill a KV cache: the recompute would add to it again",
                    hint="call the model with use_cache=False when gradients are on",
                )
            bound: Forward = lambda hidden: original(hidden, *args, **kwargs)  # noqa: E731
            source = self._source(index, bound, hidden_states)
            # No reference may stay behind in this frame or in checkpoint's closure.
            first = [hidden_states]
            del hidden_states
            return self._run(bound, source, first)

        return forward

    def _source(self, index: int, bound: Forward, hidden_states: Tensor) -> _Source:
        """Return where the recompute of layer `index` gets its input from."""
        if self.store is not None:
            return self.store.put(index, hidden_states)
        kept = Ticket(None, hidden_states, None)
        if self._every == 1:
            return kept
        if index % self._every == 0 or self._segment is None:
            self._segment = _Segment(self, kept)
        return self._segment.join(bound, hidden_states)

    def _run(self, bound: Forward, source: _Source, first: list[Tensor]) -> Any:
        # An empty tensor goes through checkpoint: it says which device's random state to keep.
        place = first[0].detach().new_empty(0)

        def run(_place: Tensor) -> Any:
            if first:
                return bound(first.pop())
            self.recomputed += 1
            return bound(source.take())

        return checkpoint(run, place, use_reentrant=False)

    def remove(self) -> None:
        """Give the layers their own forward back, and the host its memory."""
        for layer, before in zip(self.layers, self._before, strict=True):
            layer.__dict__.pop("forward", None)
            if before is not None:
                layer.forward = before  # type: ignore[method-assign]
        if self.store is not None:
            self.store.close()
        self._segment = None


class _Segment:
    """k layers of one forward pass that keep the first one's input alone.

    The backward reaches the last layer first: the others then run once more without gradients, and
    leave each layer's input. So L / k inputs are kept, k - 1 more while a segment is at work, and
    one layer's activations as ever.
    """

    def __init__(self, owner: CheckpointedLayers, start: Ticket) -> None:
        self._owner = owner
        self._start = start
        self._layers: list[tuple[Forward, RandomState]] = []
        self._inputs: dict[int, Tensor] = {}

    def join(self, bound: Forward, hidden_states: Tensor) -> "_SegmentInput":
        """Add the next layer, about to run; return the source of its input."""
        self._layers.append((bound, RandomState(hidden_states)))
        return _SegmentInput(self, len(self._layers) - 1, hidden_states.requires_grad)

    def input_of(self, number: int) -> Tensor:
        """Return the input of the segment's layer `number`."""
        if number == 0:
            return self._start.take()
        if number not in self._inputs:
            hidden = self._start.take().detach()
            for place, (bound, random_state) in enumerate(self._layers[:number], start=1):
                with torch.no_grad(), random_state.restored():
                    output = bound(hidden)
                hidden = output[0] if isinstance(output, tuple) else output
                self._inputs[place] = hidden
                self._owner.rerun += 1
        return self._inputs.pop(number)


class _SegmentInput:
    """The input of one layer of a segment."""

    def __init__(self, segment: _Segment, number: int, requires_grad: bool) -> None:
        self._segment = segment
        self._number = number
        self._requires_grad = requires_grad

    def take(self) -> Tensor:
        """Return it, made again if need be."""
        tensor = self._segment.input_of(self._number)
        return tensor if self._number == 0 else tensor.requires_grad_(self._requires_grad)


class RandomState:
    """The generators' state before a layer ran, so that its dropout repeats."""

    def __init__(self, hidden_states: Tensor) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(hidden_states)
        self._device_type = hidden_states.device.type

    @contextmanager
    def restored(self) -> Any:
        """Be in that state inside."""
        on_device = {"device_type": self._device_type} if self._devices else {}
        with torch.random.fork_rng(devices=self._devices, **on_device):
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._device_type)
            yield


def checkpoint_layers(
    layers: Sequence[nn.Module],
    *,
    mode: Checkpointing,
    every: int = 1,
    keep_last: int = 1,
    store: HostStore | None = None,
    say: Say = silent,
) -> CheckpointedLayers:
    """Checkpoint decoder layers in place: layer(hidden_states [B, T, H], ...) -> anything.

    none: leave them alone. full: every layer keeps its input. every-k: layers 0, k, 2k ... keep
    theirs, the inputs between are made again (one more forward). offload: every layer, inputs in
    host memory except those of the `keep_last` last layers (plain checkpointing on a CPU, where
    there is nowhere to go). `store` replaces the default HostStore; `say` is told when host memory
    cannot be pinned. Raises UsageError for sizes that are out of range.
    """
    if every < 1:
        raise UsageError(f"checkpoint_every: {every} is not allowed", hint="allowed: 1 or above")
    if keep_last < 0:
        raise UsageError(f"offload_keep_layers: {keep_last} is not allowed", hint="0 or above")
    if mode is Checkpointing.NONE:
        layers = ()
    if mode is Checkpointing.OFFLOAD:
        store = store or HostStore(len(layers), keep_last=keep_last, say=say)
    step = every if mode is Checkpointing.EVERY_K else 1
    return CheckpointedLayers(
        layers, every=step, store=store if mode is Checkpointing.OFFLOAD else None
    )


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return a transformers model's decoder layers, through PEFT's wrapper too.

    The longest list named layers, h or blocks inside its decoder: vision towers stay outside.
    Raises UnsupportedError if there is none.
    """
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    lists: list[Sequence[nn.Module]] = [
        tuple(module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] in LAYER_LISTS
    ]
    if not lists:
        raise UnsupportedError(
            f"{type(model).__name__}: no list of decoder layers ({', '.join(LAYER_LISTS)}) found",
            hint="set recipe.checkpointing: none",
        )
    return max(lists, key=lambda layers: len(layers))
