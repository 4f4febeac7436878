"""Symmetric four-bit integers as compressed-tensors packs them, for vLLM: W4A16 with a scale a group.

Read in compressed-tensors 0.17 compressors/pack_quantized and vLLM 0.32 schemes/compressed_tensors_wNa16.py.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from planner.quant.schemes import Scheme, integer
from trainer.quantize.codes import Book, fed_back, searched_scales, values
from trainer.quantize.formats import BLOCKS, Factored, Tensors

LAYOUT = "pack-quantized"
CODES_IN_A_WORD = 8


@cache
def book() -> Book:
    """Return the integers of four bits."""
    return Book(torch.arange(-8.0, 8.0), 7.0)


class CompressedTensors:
    """What vLLM serves: q, k and v are one matrix there, and so are gate and up."""

    name = "compressed-tensors"
    blocks = BLOCKS
    readers = "vLLM"
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

    def store(
        self,
        weight: Tensor,
        block: int,
        *,
        moments: Tensor,
        factored: Factored,
        dtype: torch.dtype,
    ) -> tuple[Tensors, Tensor]:
        """Search scales, round them to `dtype` as they are stored, and feed errors back against those."""
        scales = searched_scales(weight, moments.diagonal(), book(), block).to(dtype)
        codes = fed_back(weight, scales.float(), book(), factored)
        words = codes.view(len(codes), -1, CODES_IN_A_WORD).to(torch.int32).cpu()
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        tensors = {
            "weight_packed": (words << shifts).sum(-1, dtype=torch.int32),
            "weight_scale": scales.cpu(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, values(codes, scales.float(), book()).to(dtype)

    def read_back(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Unpack and multiply in the scale's own dtype, as the library's decompress does."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (stored["weight_packed"].unsqueeze(-1) >> shifts) & 15
        scales = stored["weight_scale"]
        whole = (codes.flatten(1) - 8).to(scales.dtype)
        groups = whole.view(*scales.shape, -1) * scales.unsqueeze(-1)
        return groups.view(*stored["weight_shape"].tolist()).to(dtype)

    def scheme(self, block: int) -> Scheme:
        """Symmetric integers: no zero points."""
        return integer("compressed-int4", 4, block, zeros=False)

    def config(
        self, blocks: Mapping[str, int], left: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Any]:
        """The first group is every linear that no other one names."""
        groups = {}
        for number, block in enumerate(BLOCKS):
            named = [name for name, own in blocks.items() if own == block]
            if named:
                groups[f"group_{number}"] = {
                    "targets": ["Linear"] if number == 0 else named,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": block,
                    },
                    "input_activations": None,
                    "output_activations": None,
                }
        return {
            "quant_method": "compressed-tensors",
            "format": LAYOUT,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(left),
        }
