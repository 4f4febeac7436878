"""The few numbers of the speed model that no sheet states: data/calibration/speed.json.

Each depends on a class of hardware, a kernel, a shape or a named switch, never on a source; the file
names the rows it was read from (`python -m planner.accuracy.speed_fit` writes it).
"""

import json
from functools import cache
from typing import Any, NamedTuple

from planner.datafiles import data_dir


class Parameters(NamedTuple):
    """Shares of what the hardware could do, and times of software."""

    product: float
    """Large products: of the best matmul measured on the card."""
    attention: float
    """Flash and SDPA kernels: of the best matmul measured."""
    attention_tflops: float
    """And at most that many TFLOPS: kernels of Ampere's instructions do not reach Hopper's or Blackwell's."""
    bandwidth: float
    """Pointwise kernels of training: of the memory's bandwidth."""
    unpack: float
    """Elements that a dequantising kernel makes for every fp32 FLOP the card's cores could do; what it reads and
    writes comes on top."""
    unpack_integer: float
    """The same of packed integers (GPTQ, AWQ), which need no table."""
    launch_s: float
    """Host time of one eager operation with its autograd node."""
    unit_s: float
    """Waiting for one unit's weights to be gathered (FSDP, ZeRO-3), beside their bytes."""
    decode_bandwidth: float
    """Weights and cache read by an engine's kernels: of the memory's bandwidth."""
    engine_step_s: float
    """vLLM's own time for one step with graphs."""
    sequence_s: float
    """And for every running sequence."""
    kernel_s: float
    """A replayed kernel's own time on the device, beside what it moves: its start, its last blocks."""
    generate_launch_s: float
    """Host time of one eager operation without a graph (transformers, vLLM's eager mode)."""
    reduce_s: float
    """One sum over an engine's tensor-parallel ranks, beside its bytes."""
    engine_product: float
    """Prefill and decode products of an engine: of the best matmul measured."""


@cache
def parameters() -> Parameters:
    """Return the shipped parameters."""
    constants = document()["parameters"]
    return Parameters(**{name: constants[name]["value"] for name in Parameters._fields})


@cache
def document() -> dict[str, Any]:
    """Return data/calibration/speed.json."""
    text = (data_dir() / "calibration" / "speed.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
