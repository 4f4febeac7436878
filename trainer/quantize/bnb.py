"""NF4 as bitsandbytes stores it: packed codes, absmax quantised again, and the state that says so.

Read in bitsandbytes 0.50 functional.py (quantize_4bit, QuantState.as_dict) and backends/cpu/ops.py.
"""

from functools import cache

import torch
from bitsandbytes.functional import (
    QuantState,
    dequantize_4bit,
    dequantize_blockwise,
    get_4bit_type,
    quantize_blockwise,
)
from torch import Tensor

from planner.quant.schemes import NF4_NESTED_BLOCK
from trainer.quantize.codes import Book

Tensors = dict[str, Tensor]
STATE = "quant_state.bitsandbytes__nf4"
"""The tensor that holds block sizes, shape and dtype, as JSON."""


@cache
def book() -> Book:
    """Return NF4's levels, 1 the largest."""
    return Book(get_4bit_type("nf4", device="cpu"), 1.0)


def nested(scales: Tensor) -> tuple[QuantState, Tensor]:
    """Return absmax [O, I / B] quantised a second time, and what is read back of it (fp32)."""
    flat = scales.float().cpu().flatten()
    offset = flat.mean()
    codes, second = quantize_blockwise(flat - offset, blocksize=NF4_NESTED_BLOCK)
    state = QuantState(
        absmax=codes, code=book().levels, quant_type="nf4", offset=offset, state2=second
    )
    read = dequantize_blockwise(codes, second) + offset
    return state, read.view(scales.shape).to(scales.device)


def tensors(codes: Tensor, state: QuantState, dtype: torch.dtype) -> Tensors:
    """Return the tensors of one weight [O, I] by the end of their names; `dtype` is what readers compute in."""
    state.shape, state.dtype = codes.shape, dtype
    state.blocksize = codes.numel() // state.absmax.numel()
    flat = codes.cpu().flatten()
    packed = (flat[0::2] << 4) | flat[1::2]
    return {"weight": packed.unsqueeze(1)} | {
        f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()
    }


def read_back(stored: Tensors) -> Tensor:
    """Return the weight [O, I] that bitsandbytes makes of the tensors of one module."""
    parts = {
        name.removeprefix("weight."): value for name, value in stored.items() if name != "weight"
    }
    state = QuantState.from_dict(parts, device=torch.device("cpu"))
    return dequantize_4bit(stored["weight"], state)
