"""An MLP in token tiles: its 8 * I bytes of intermediates per token exist for one tile only.

In a SwiGLU MLP of width I the backward needs gate, up, silu and their product: 4 tensors of 2 * I
bytes per token in bf16, 28 H of the 34.5 H bytes that a recomputed layer holds at I = 3.5 H. The
MLP works on each token alone, so it can run tile by tile, every tile checkpointed: the forward
runs once more, and the peak is one tile's. The result is the same up to the order of sums in the
weight gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.errors import UsageError

MLP_NAMES = ("mlp", "feed_forward", "ffn")


def tiled_forward(forward: Callable[[Tensor], Tensor], x: Tensor, tile_tokens: int) -> Tensor:
    """Return forward(x) for a token-wise forward; x [..., H], tiles of `tile_tokens` rows.

    With gradients off, or for no more tokens than one tile, it is a plain call.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled() or rows.shape[0] <= tile_tokens:
        return forward(x)
    tiles = [
        # a leading 1: modules may expect [B, T, H]
        checkpoint(forward, tile.unsqueeze(0), use_reentrant=False).squeeze(0)
        for tile in rows.split(tile_tokens)
    ]
    return torch.cat(tiles).reshape(*x.shape[:-1], -1)


def tile_mlps(model: nn.Module, *, tile_tokens: int) -> int:
    """Make every dense MLP of `model` run in token tiles, in place; return how many there are.

    Routed experts are left alone: their outputs depend on more than the token, and they tile
    themselves. Raises UsageError for tile_tokens below 1 or a model without an MLP that is known.
    """
    if tile_tokens < 1:
        raise UsageError(f"tile_tokens: {tile_tokens} is not allowed", hint="allowed: 1 or above")
    count = 0
    for name, module in model.named_modules():
        is_mlp = name.rsplit(".", 1)[-1] in MLP_NAMES
        if is_mlp and not hasattr(module, "experts"):
            module.forward = _tiled(module.forward, tile_tokens)  # type: ignore[method-assign]
            count += 1
    if not count:
        raise UsageError(
            f"tiled_mlp: {type(model).__name__} has no module named {', '.join(MLP_NAMES)}",
            hint="leave recipe.tiled_mlp out",
        )
    return count


def _tiled(forward: Callable[..., Any], tile_tokens: int) -> Callable[[Tensor], Tensor]:
    def tiled(hidden_states: Tensor) -> Tensor:
        return tiled_forward(forward, hidden_states, tile_tokens)

    return tiled
