"""Moments of an optimizer in 8 bits: codes and a scale for every 256, by bitsandbytes' kernels.

A parameter's state is a dict: `moment1`, `moment2` are its moments; `absmax1`, `absmax2` the scales of those in
8 bits, by which one can be told from the other formats.
"""

from typing import Any

import torch
from torch import Tensor

from planner.errors import MissingExtraError

BLOCK = 256
"""Elements that share one scale (bitsandbytes' block)."""


def widen(state: dict[str, Any], number: int, chunk: slice, device: torch.device) -> Tensor:
    """Return one moment of a chunk in fp32: a view if it is kept so, on `device`."""
    stored = state[f"moment{number}"][chunk].to(device)
    if f"absmax{number}" not in state:
        return stored.float()
    return meaning(stored, state[f"absmax{number}"][blocks(chunk)].to(device), number)


def quantise(state: dict[str, Any], number: int, chunk: slice, moment: Tensor) -> None:
    """Write fp32 values back as int8 codes and scales; the first moment is signed."""
    codes, scales = coded(moment, number)
    state[f"moment{number}"][chunk].copy_(codes)
    state[f"absmax{number}"][blocks(chunk)].copy_(scales)


def meaning(codes: Tensor, scales: Tensor, number: int) -> Tensor:
    """Return in fp32 what the codes [n] of moment `number` mean with scales [n / BLOCK]."""
    table = _int8_map(number == 1, codes.device)
    return _bitsandbytes().dequantize_blockwise(codes, absmax=scales, code=table, blocksize=BLOCK)


def coded(moment: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the codes [n] of fp32 values [n] of moment `number`, and their scales [n / BLOCK]."""
    table = _int8_map(number == 1, moment.device)
    codes, made = _bitsandbytes().quantize_blockwise(moment, code=table, blocksize=BLOCK)
    return codes, made.absmax


def nearest_codes(values: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the codes [n] whose meaning times their block's scale is nearest to `values`."""
    meanings, order = _int8_map(signed, values.device).sort()
    scale = scales.repeat_interleave(BLOCK)[: values.numel()]
    share = torch.where(scale > 0, values / scale.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return order[torch.bucketize(share, (meanings[1:] + meanings[:-1]) / 2)].to(torch.uint8)


def blocks(chunk: slice) -> slice:
    return slice(chunk.start // BLOCK, -(-chunk.stop // BLOCK))


_MAPS: dict[tuple[bool, torch.device], Tensor] = {}


def _int8_map(signed: bool, device: torch.device) -> Tensor:
    key = (signed, device)
    if key not in _MAPS:
        _MAPS[key] = _bitsandbytes().create_dynamic_map(signed=signed).to(device)
    return _MAPS[key]


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError:
        raise MissingExtraError("an 8-bit optimizer", "train") from None
    return bitsandbytes.functional
