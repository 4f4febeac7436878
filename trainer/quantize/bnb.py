"""NF4 as bitsandbytes stores it: packed codes, absmax quantised again, and the state that says so.

Read in bitsandbytes 0.50 functional.py (quantize_4bit, QuantState.as_dict) and backends/cpu/ops.py, and in
transformers 5.19 quantizers/quantizer_bnb_4bit.py.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from bitsandbytes.functional import (
    QuantState,
    dequantize_4bit,
    dequantize_blockwise,
    get_4bit_type,
    quantize_blockwise,
)
from torch import Tensor

from planner.quant.methods import BLOCKSIZES
from planner.quant.schemes import NF4_BLOCK, NF4_NESTED_BLOCK, Scheme, bnb_4bit
from trainer.quantize.codes import Book, fed_back, searched_scales, values
from trainer.quantize.formats import BLOCKS, Factored, Tensors


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
        absmax=codes, code=book().levels.clone(), quant_type="nf4", offset=offset, state2=second
    )
    read = dequantize_blockwise(codes, second) + offset
    return state, read.view(scales.shape).to(scales.device)


def packed(codes: Tensor, state: QuantState, dtype: torch.dtype) -> Tensors:
    """Return the tensors of one weight [O, I] by the end of their names; `dtype` is what readers compute in."""
    state.shape, state.dtype = codes.shape, dtype
    state.blocksize = codes.numel() // state.absmax.numel()
    flat = codes.cpu().flatten()
    pairs = (flat[0::2] << 4) | flat[1::2]
    return {"weight": pairs.unsqueeze(1)} | {
        f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()
    }


class BitsAndBytes:
    """What transformers and PEFT train: NF4 with nested absmax, block sizes mixed by tensor."""

    name = "bnb"
    blocks = BLOCKS
    readers = "transformers, PEFT and vramwise train"
    fused: tuple[tuple[str, ...], ...] = ()

    def store(
        self,
        weight: Tensor,
        block: int,
        *,
        moments: Tensor,
        factored: Factored,
        dtype: torch.dtype,
    ) -> tuple[Tensors, Tensor]:
        """Search scales, quantise them, and feed errors back against the scales as read."""
        scales = searched_scales(weight, moments.diagonal(), book(), block)
        state, read = nested(scales)
        codes = fed_back(weight, read, book(), factored)
        return packed(codes, state, dtype), values(codes, read, book()).to(dtype)

    def read_back(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return what bitsandbytes' own functions make of it."""
        parts = {name.removeprefix("weight."): stored[name] for name in stored if name != "weight"}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        return dequantize_4bit(stored["weight"], state).to(dtype)

    def scheme(self, block: int) -> Scheme:
        """NF4 with double quantisation."""
        return bnb_4bit("nf4", nested=True, block=block)

    def config(
        self, blocks: Mapping[str, int], left: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Any]:
        """Whole names in the skip list: "model.layers.1" would mean layers 10 to 19 as well.

        transformers reads each tensor's block size off its own state and has no field for it; the planner
        reads no weights, so other sizes than 64 are listed for it.
        """
        other: dict[str, list[str]] = {}
        for name, block in blocks.items():
            if block != NF4_BLOCK:
                other.setdefault(str(block), []).append(name)
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(left),
            **({BLOCKSIZES: other} if other else {}),
        }
