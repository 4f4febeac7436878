"""Keys and values of a rollout in one place: a token is written where it stays, rows that ended make room.

transformers' DynamicLayer makes a longer copy of a layer's keys, then of its values, for every token. Shapes: B rows,
H key heads, T tokens so far, R tokens that there is room for, D a head's width (values may have another).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """A full-attention layer's cache: buffers [B, H, R, D] of which keys and values [B, H, T, D] are views."""

    keys: Any  # tensors, once there are any
    values: Any

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, H, t, D] behind the others; return all of them."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [self._buffer(each, len(each)) for each in new]
            self._show(len(key_states), 0)
        start = self.keys.shape[-2]
        self._show(len(key_states), start + key_states.shape[-2])
        self.keys[:, :, start:].copy_(key_states)
        self.values[:, :, start:].copy_(value_states)
        return self.keys, self.values

    def _buffer(self, like: Tensor, rows: int) -> Tensor:
        return like.new_empty(rows, like.shape[1], self._room, like.shape[3])

    def _show(self, rows: int, tokens: int) -> None:
        self.keys, self.values = (buffer[:rows, :, :tokens] for buffer in self._buffers)

    def spread(self, indices: Tensor, room: int) -> None:
        """Make row i what row indices[i] is, with room for `room` tokens: prompts become their groups' rows."""
        kept = (self.keys, self.values)
        self._room, self._buffers = room, []
        for each in kept:
            self._buffers.append(self._buffer(each, len(indices)))
            rows = self._buffers[-1][:, :, : each.shape[-2]]
            torch.index_select(each, 0, indices, out=rows)
        self._show(len(indices), kept[0].shape[-2])

    def keep(self, sources: Sequence[int]) -> None:
        """Make row i what row sources[i] is; those that move come from behind all rows that are left."""
        for to, source in enumerate(sources):
            if to != source:
                self.keys[to].copy_(self.keys[source])
                self.values[to].copy_(self.values[source])
        self._show(len(sources), self.keys.shape[-2])

    def fill(self, tokens: int) -> None:
        """Hold `tokens` tokens: zeros behind those that are there."""
        start = self.keys.shape[-2]
        self._show(len(self.keys), tokens)
        self.keys[:, :, start:].zero_()
        self.values[:, :, start:].zero_()


def roomy(cache: Any, room: int) -> Any:
    """Return the transformers cache with its full-attention layers in one place each; others stay as they are."""
    # windows, states and indexers have layers of their own, which copy what they keep
    cache.layers = [
        RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def spread(cache: Any, indices: Tensor, room: int) -> None:
    """Make row i of every layer what row indices[i] was, with room for `room` tokens."""
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.spread(indices, room)
        else:
            layer.batch_select_indices(indices)


def keep(cache: Any, running: Sequence[int], device: torch.device) -> list[int]:
    """Leave the `running` rows (ascending) alone in every layer; return which row each place has now.

    Rows stay where they are as far as the rows left reach; those behind take the places of ended ones.
    """
    count = len(running)
    behind = [row for row in running if row >= count]
    here = set(running)
    places = [row if row in here else behind.pop() for row in range(count)]
    indices = torch.tensor(places, device=device)
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.keep(places)
        else:
            layer.batch_select_indices(indices)
    return places


def fill(cache: Any, tokens: int) -> None:
    """Hold `tokens` tokens in every layer, zeros behind those that are there: a rehearsal's."""
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.fill(tokens)
            continue
        more = tokens - layer.keys.shape[-2]
        layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, 0, more))
        layer.values = torch.nn.functional.pad(layer.values, (0, 0, 0, more))
