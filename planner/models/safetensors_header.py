"""Reads a safetensors header: tensor names, dtypes and shapes, never the weights."""

import json
from math import prod
from pathlib import Path
from typing import Any

from planner.errors import UsageError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""
_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8", "F64": "fp32"}


def folder_header(folder: Path) -> dict[str, Any] | None:
    """Return the header of the first safetensors file in `folder`, or None if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    return read_header(files[0]) if files else None


def read_header(file: Path) -> dict[str, Any]:
    """Return {tensor name: {dtype, shape, data_offsets}}; raises UsageError if it is not one."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size):
            raise UsageError(f"{file}: is not a safetensors file (header of {length} bytes)")
        try:
            header = json.loads(stream.read(length).decode("utf-8"))
        except (ValueError, RecursionError):
            raise UsageError(f"{file}: its safetensors header is not valid JSON") from None
    if not isinstance(header, dict):
        raise UsageError(f"{file}: its safetensors header is not an object")
    header.pop("__metadata__", None)
    return header


def checkpoint_dtype(header: dict[str, Any]) -> str:
    """Return the dtype that holds most elements, as planner names it ("bf16")."""
    amounts: dict[str, int] = {}
    for tensor in header.values():
        try:
            dtype, elements = str(tensor["dtype"]), prod(tensor["shape"])
        except (KeyError, TypeError):
            raise UsageError("safetensors header: an entry has no dtype and shape") from None
        amounts[dtype] = amounts.get(dtype, 0) + elements
    return most_common_dtype(amounts)


def most_common_dtype(amounts: dict[str, int]) -> str:
    """Return planner's name of the float dtype with most elements; "fp32" if there is none."""
    floats = {_DTYPES[dtype]: count for dtype, count in amounts.items() if dtype in _DTYPES}
    return max(floats, key=lambda name: floats[name]) if floats else "fp32"
