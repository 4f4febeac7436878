"""Whether a disk has room for a checkpoint: asked before a run begins, and before each is written."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from planner.errors import VramwiseError
from planner.units import MiB, format_bytes
from trainer.model import Policy
from trainer.parallel.saving import whole_bytes
from trainer.parallel.together import together

if TYPE_CHECKING:
    from trainer.preflight import Preflight

SMALL_FILES_BYTES = 16 * MiB
"""Tokenizer, configs and slack on top of the tensors."""


def check_room(folder: Path, needed: int) -> None:
    """Raise OSError where `folder`'s disk has no room for `needed` bytes and small files."""
    free = shutil.disk_usage(folder).free
    if free < needed + SMALL_FILES_BYTES:
        raise OSError(f"needs {format_bytes(needed)}, the disk has {format_bytes(free)} free")


def check_space(folder: Path, policy: Policy, training: Mapping[str, Any]) -> None:
    """Raise OSError where the disk has no room for one process's checkpoint."""
    check_room(folder, whole_bytes(policy) + _tensor_bytes(training))


def check_before(ready: "Preflight", output: Path) -> None:
    """Raise VramwiseError where the first checkpoint of a run would find no room; all ranks call it."""

    def look() -> None:
        try:
            if ready.ranks.first:
                check_room(output, planned_bytes(ready))
        except OSError as error:
            raise VramwiseError(
                f"train.output: no room for a checkpoint in {output}: it {error}",
                hint="free some space, or name another folder; nothing is trained yet",
            ) from None

    together(ready.ranks, look)


def planned_bytes(ready: "Preflight") -> int:
    """Return the size of a checkpoint: what is trained, and the optimizer's states as they are planned."""
    terms = (*ready.plan.phase("step").terms, *ready.plan.host_terms)
    states = sum(term.bytes for term in terms if term.name == "optimizer")
    return whole_bytes(ready.policy) + states * ready.ranks.shards


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0
