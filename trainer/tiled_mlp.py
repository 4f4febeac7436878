"""An MLP in token tiles: its 8 * I bytes of intermediates per token exist for one tile only.

In a SwiGLU MLP of width I the backward needs gate, up, silu and their product: 4 tensors of 2 * I
bytes per token in bf16, 28 H of the 34.5 H bytes that a recomputed layer holds at I = 3.5 H. The
MLP works on each token alone, so forward and backward go tile by tile; the backward runs a tile's
forward again. Inside a checkpointed layer that costs nothing: the input is saved before the MLP
runs, nothing after it saves more, so the layer's own recompute stops there and the MLP runs twice
in all, as it does without tiles. (Where a norm follows the MLP, it runs a third time.) The result
is the same up to the order of sums in the weight gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import UsageError
from trainer.checkpointing import RandomState, decoder_layers

MLP_NAMES = ("mlp", "feed_forward", "ffn")
NORM_NAMES = ("norm", "ln_1", "ln_2", "ln_f")
Forward = Callable[[Tensor], Tensor]


def tiled_forward(
    forward: Forward,
    x: Tensor,
    tile_tokens: int,
    *,
    trained: tuple[Tensor, ...] = (),
    random: bool = False,
) -> Tensor:
    """Return forward(x) for a token-wise forward; x [..., H], tiles of `tile_tokens` rows.

    `trained` are the parameters inside `forward` that get gradients. For no more tokens than one
    tile it is a plain call. A tile's second
    forward draws the random numbers of its first, so dropout drops the same.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= tile_tokens:
        return forward(x)
    if torch.is_grad_enabled() and (rows.requires_grad or trained):
        kept = _Keep.apply(rows, *trained)  # type: ignore[no-untyped-call]
        result = _Tiles.apply(kept, kept.grad_fn, forward, tile_tokens, random, *trained)  # type: ignore[no-untyped-call]
    else:
        result = _in_tiles(forward, rows, tile_tokens)
    return result.reshape(*x.shape[:-1], -1)


def _in_tiles(forward: Forward, rows: Tensor, tile_tokens: int) -> Tensor:
    """Return forward(rows) [M, H']; one tile's intermediates at a time."""
    result: Tensor | None = None
    for start in range(0, rows.shape[0], tile_tokens):
        tile = slice(start, start + tile_tokens)
        # a leading 1: modules may expect [B, T, H]
        output = forward(rows[tile].unsqueeze(0)).squeeze(0)
        if result is None:
            result = output.new_empty(rows.shape[0], output.shape[-1])
        result[tile] = output
    assert result is not None
    return result


class _Keep(torch.autograd.Function):
    """Saves the input before the MLP runs; `_Tiles` reads it in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *_trained: Tensor) -> Tensor:
        """Return `rows`."""
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Pass the gradient on."""
        return grads[0], *[None] * (len(ctx.needs_input_grad) - 1)


class _Tiles(torch.autograd.Function):
    """Forward without a graph; the backward makes one tile's graph at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        keeper: Any,
        forward: Forward,
        tile_tokens: int,
        random: bool,
        *trained: Tensor,
    ) -> Tensor:
        """Return forward(rows); remember where its input will be."""
        ctx.keeper, ctx.call, ctx.tile_tokens, ctx.trained = keeper, forward, tile_tokens, trained
        device = rows.device.type
        ctx.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        ctx.states = []

        def noted(tile: Tensor) -> Tensor:
            ctx.states.append(RandomState(tile))
            return forward(tile)

        return _in_tiles(noted if random else forward, rows, tile_tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of the trained parameters."""
        (rows,) = ctx.keeper.saved_tensors
        trained: tuple[Tensor, ...] = ctx.trained
        grad_rows = torch.empty_like(rows)
        sums: list[Tensor] = []
        enabled, dtype = ctx.autocast
        for number, start in enumerate(range(0, rows.shape[0], ctx.tile_tokens)):
            tile = slice(start, start + ctx.tile_tokens)
            again = ctx.states[number].restored() if ctx.states else nullcontext()
            with again, torch.enable_grad(), torch.autocast(rows.device.type, dtype, enabled):
                leaf = rows[tile].detach().requires_grad_()
                output = ctx.call(leaf.unsqueeze(0)).squeeze(0)
            found = torch.autograd.grad(
                output, (leaf, *trained), grads[0][tile], materialize_grads=True
            )
            del output, leaf
            grad_rows[tile] = found[0]
            if sums:
                for total, part in zip(sums, found[1:], strict=True):
                    total.add_(part)
                del total, part  # the last one would stay beside the next tile's
            else:
                sums = list(found[1:])
            del found
        return grad_rows, None, None, None, None, *sums


def tile_layers(model: nn.Module, *, tile_tokens: int, must: bool = True) -> None:
    """Tile what works on each token alone in a transformers model: MLPs and norms, in place.

    `must`: raise UsageError where there is no MLP to tile.
    """
    if must or dense_mlps(model):
        tile_mlps(model, tile_tokens=tile_tokens)
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    tile_norms([*decoder_layers(model), decoder], tile_tokens=tile_tokens)


def tile_mlps(model: nn.Module, *, tile_tokens: int) -> int:
    """Make every dense MLP of `model` run in token tiles, in place; return how many there are.

    Routed experts are left alone: their outputs depend on more than the token, and they tile
    themselves. Raises UsageError for tile_tokens below 1 or a model without an MLP that is known.
    """
    if tile_tokens < 1:
        raise UsageError(f"tile_tokens: {tile_tokens} is not allowed", hint="allowed: 1 or above")
    found = dense_mlps(model)
    for module in found:
        module.forward = _tiled(module, module.forward, tile_tokens)  # type: ignore[method-assign]
    if not found:
        raise UsageError(
            f"tiled_mlp: {type(model).__name__} has no module named {', '.join(MLP_NAMES)}",
            hint="leave recipe.tiled_mlp out",
        )
    return len(found)


def dense_mlps(model: nn.Module) -> list[nn.Module]:
    """Return the MLPs that can be tiled."""
    return [
        module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in MLP_NAMES and not hasattr(module, "experts")
    ]


def tile_norms(parents: Sequence[nn.Module], *, tile_tokens: int) -> int:
    """Make the norms right under `parents` (decoder layers, the decoder) run in token tiles.

    A norm works in fp32: its backward holds 5 tensors of 4 * H bytes per token, and what it saves is
    another one. In tiles it saves its input, and runs a second time. Returns how many there are.
    """
    found = [
        module
        for parent in parents
        for name, module in parent.named_children()
        if name.endswith(NORM_NAMES)
    ]
    for module in found:
        module.forward = _tiled(module, module.forward, tile_tokens)  # type: ignore[method-assign]
    return len(found)


def _tiled(module: nn.Module, forward: Callable[..., Tensor], tile_tokens: int) -> Forward:
    def tiled(hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        if others or named:  # more than one input may not be token-wise
            return forward(hidden_states, *others, **named)
        trained = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
        random = module.training and any(_drops(part) for part in module.modules())
        return tiled_forward(forward, hidden_states, tile_tokens, trained=trained, random=random)

    return tiled


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
