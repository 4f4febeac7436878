"""The few numbers of the speed model that no sheet states: data/calibration/speed.json.

Each depends on a class of hardware, a kernel, a shape or a named switch, never on a source; the file
names the rows it was read from (`python -m planner.accuracy.speed_fit` writes it).
"""

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from planner.datafiles import data_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Shares of what the hardware could do, and times of software."""

    product: float
    """Large products: of the best matmul measured on the card."""
    sheet: float
    """The best matmul of a card on which none was measured, of its sheet's peak."""
    attention: float
    """Flash and SDPA kernels: of the best matmul measured."""
    bandwidth: float
    """Pointwise kernels of training: of the memory's bandwidth."""
    unpack: float
    """Kernels that dequantise packed weights for a product: of the memory's bandwidth."""
    launch_s: float
    """Host time of one eager operation with its autograd node."""
    exposed: float
    """Traffic between GPUs that no computation hides: of its time at the links' measured speed."""
    link: float
    """What collectives and copies reach of a link's one-way bandwidth."""
    decode_bandwidth: float
    """Weights and cache read by an engine's kernels: of the memory's bandwidth."""
    decode_packed: float
    """The same of packed 4- and 8-bit weights, of that."""
    engine_step_s: float
    """An engine's own time for one step, with graphs."""
    sequence_s: float
    """And for every running sequence."""
    generate_launch_s: float
    """Host time of one eager operation without a graph (transformers, vLLM's eager mode)."""
    reduce_s: float
    """One sum over an engine's tensor-parallel ranks of one token's hidden state."""
    engine_product: float
    """Prefill and decode products of an engine: of the best matmul measured."""


@cache
def parameters() -> Parameters:
    """Return the shipped parameters."""
    constants = document()["parameters"]
    return Parameters(**{each.name: constants[each.name]["value"] for each in fields(Parameters)})


@cache
def document() -> dict[str, Any]:
    """Return data/calibration/speed.json."""
    text = (data_dir() / "calibration" / "speed.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
