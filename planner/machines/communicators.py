"""What one rank's NCCL communicator holds outside torch's pool, from data/calibration/training.json."""

import json
from functools import cache
from typing import Any

from planner.datafiles import data_dir
from planner.machines.machine import Machine
from planner.machines.vllm_overheads import LINKED_BYTES_PER_S, NOTHING, Measured


@cache
def _constants() -> dict[str, Any]:
    text = (data_dir() / "calibration" / "training.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["constants"]
    return found


def communicator(machine: Machine, ranks: int) -> Measured:
    """Return the bytes of one communicator of `ranks`: by its channels, so by links, not by size."""
    if ranks < 2:
        return NOTHING
    gpu = machine.gpu  # one that only --vram describes may be of any kind: the larger
    linked = gpu is None or gpu.nvlink_bytes_per_s >= LINKED_BYTES_PER_S
    several = "communicator_bytes" if ranks > 2 else "communicator_pair_bytes"
    row = _constants()[several if linked else "communicator_pcie_bytes"]
    return Measured(row["low"], row["typical"], row["high"])
