"""Per-layer non-reentrant checkpointing of a decoder, with or without host offload.

Non-reentrant checkpointing keeps the graph of the first forward; the recompute only fills in saved
values. So a layer's input may come to the recompute as a fresh tensor from wherever it was kept
(`Ticket.take`), with no hook on every saved tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.errors import UnsupportedError, UsageError
from planner.recipe import Checkpointing
from trainer.host_store import HostStore, Ticket

LAYER_LISTS = ("layers", "h", "blocks")


class CheckpointedLayers:
    """Decoder layers whose forward is checkpointed; `remove()` undoes it."""

    def __init__(self, layers: Sequence[nn.Module], store: HostStore | None) -> None:
        self.layers = tuple(layers)
        self.store = store
        self._originals: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.recomputed = 0
        """Layer recomputations so far."""

    def _wrap(self, index: int, layer: nn.Module) -> None:
        original = layer.forward
        self._originals.append((layer, original))

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Generation and scoring: nothing is saved, so nothing is gained.
            if not torch.is_grad_enabled():
                return original(hidden_states, *args, **kwargs)
            return self._run(index, original, hidden_states, args, kwargs)

        layer.forward = forward  # type: ignore[method-assign]

    def _run(
        self,
        index: int,
        original: Callable[..., Any],
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if kwargs.get("use_cache"):
            raise UnsupportedError(
                "a checkpointed layer cannot fill a KV cache: the recompute would add to it again",
                hint="call the model with use_cache=False when gradients are on",
            )
        if self.store is None:
            ticket = Ticket(None, hidden_states, None)
        else:
            ticket = self.store.put(index, hidden_states)
        first: list[Tensor] = [hidden_states]
        # No tensor but an empty one goes through checkpoint: it says which device's random state
        # to keep. Everything else must not be held by its closure.
        place = hidden_states.detach().new_empty(0)
        del hidden_states

        def run(_place: Tensor) -> Any:
            if first:
                return original(first.pop(), *args, **kwargs)
            self.recomputed += 1
            return original(ticket.take(), *args, **kwargs)

        return checkpoint(run, place, use_reentrant=False)

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for layer, original in self._originals:
            layer.forward = original  # type: ignore[method-assign]
        self._originals.clear()


def checkpoint_layers(
    layers: Sequence[nn.Module],
    *,
    mode: Checkpointing,
    every: int = 1,
    keep_last: int = 1,
    store: HostStore | None = None,
) -> CheckpointedLayers:
    """Checkpoint decoder layers in place: layer(hidden_states [B, T, H], ...) -> anything.

    none: leave them alone. full: every layer. every-k: layers 0, k, 2k ...; the others save what
    they need. offload: every layer, inputs in host memory except those of the `keep_last` last
    layers (plain checkpointing on a CPU, where there is nowhere to go). `store` replaces the
    default HostStore. Raises UsageError for sizes that don't fit together.
    """
    if every < 1:
        raise UsageError(f"checkpoint_every: {every} is not allowed", hint="allowed: 1 or above")
    if keep_last < 0:
        raise UsageError(f"offload_keep_layers: {keep_last} is not allowed", hint="0 or above")
    step = every if mode is Checkpointing.EVERY_K else 1
    if mode is Checkpointing.OFFLOAD and store is None:
        store = HostStore(len(layers), keep_last=keep_last)
    wrapped = CheckpointedLayers(layers, store if mode is Checkpointing.OFFLOAD else None)
    if mode is not Checkpointing.NONE:
        for index, layer in enumerate(layers):
            if index % step == 0:
                wrapped._wrap(index, layer)
    return wrapped


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
