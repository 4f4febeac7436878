"""What vLLM takes outside torch on one GPU, from data/calibration/vllm.json."""

import json
from functools import cache
from typing import Any, NamedTuple

from planner.datafiles import data_dir
from planner.machines.machine import Machine


class Measured(NamedTuple):
    """An empirical size: bytes."""

    low: int
    typical: int
    high: int

    def times(self, count: float) -> "Measured":
        """Return the size of `count` such things."""
        return Measured(*(int(size * count) for size in self))


NOTHING = Measured(0, 0, 0)
LINKED_BYTES_PER_S = 300 * 10**9
"""NVLink of a data-centre board, from V100's 300 GB/s on."""


@cache
def _document() -> dict[str, Any]:
    text = (data_dir() / "calibration" / "vllm.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@cache
def constant(name: str) -> Measured:
    """Return one constant of data/calibration/vllm.json."""
    row = _document()["constants"][name]
    return Measured(row["low"], row["typical"], row["high"])


@cache
def spread(name: str) -> float:
    """Return the share within which nine logs in ten lie of a planned figure."""
    share: float = _document()["spreads"][name]["share"]
    return share


def kernels(machine: Machine) -> Measured:
    """Return what the process grows by outside torch while it loads and runs once."""
    capability = machine.gpu.compute_capability if machine.gpu else ""
    turing = capability.startswith("7")
    return constant("kernels_turing_bytes" if turing else "kernels_bytes")


def communicators(machine: Machine, ranks: int) -> Measured:
    """Return what NCCL and the custom all-reduce hold on one of `ranks` GPUs."""
    if ranks < 2:
        return NOTHING
    # consumer cards pair at most two by NVLink; data-centre boards link all
    linked = machine.gpu is not None and machine.gpu.nvlink_bytes_per_s >= LINKED_BYTES_PER_S
    return constant("communicators_nvlink_bytes" if linked else "communicators_pcie_bytes")


def graphs(*, piece: str, quantized: bool, pieces: int) -> Measured:
    """Return what `pieces` captured layers, or pieces of the constant `piece` names, hold."""
    if piece:
        return constant(piece).times(pieces)
    return constant("graph_quantized_bytes" if quantized else "graph_bytes").times(pieces)
