"""CUDA memory snapshots from inside a recorded program: when it runs out, and at its peak.

Standard library only, Python 3.9 or newer; see vramwise_child.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

MAX_DUMPS = 5
MAX_EVENTS = 200_000


def prepare(child: Any) -> None:
    """Watch for OOM, and keep an allocation history if snapshots of the peak are wanted."""
    cuda = child.torch.cuda
    if child.snapshot_when == "none":
        return
    if child.snapshot_when == "peak":
        # frames of Python only: C++ frames cost more than the allocation
        cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS
        )

    def out_of_memory(device: int, requested: int, total: int, free: int) -> None:
        child.journal.write(e="oom", device=device, requested=requested, total=total, free=free)
        _dump(child, "oom")

    child.torch._C._cuda_attach_out_of_memory_observer(out_of_memory)


def at_peak(child: Any) -> None:
    """Dump when the peak has grown by 2% since the last dump, at most MAX_DUMPS times."""
    peak = max((entry["peak"] for entry in child.book.peaks.values()), default=0)
    if child.dumps < MAX_DUMPS and peak > child.dumped_bytes * 1.02:
        child.dumps += 1
        child.dumped_bytes = peak
        _dump(child, "peak")


def _dump(child: Any, why: str) -> None:
    """Write the snapshot aside and move it into place: a reader never sees half a file."""
    name = f"snapshot-{why}-{os.getpid()}.pickle"
    path = os.path.join(child.folder, name)
    with open(path + ".part", "wb") as file:
        pickle.dump(child.torch.cuda.memory._snapshot(), file)
    os.replace(path + ".part", path)
    child.journal.write(e="snapshot", why=why, file=name)
