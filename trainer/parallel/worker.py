"""One rank of a run: joins the others, sees that all would train the same, trains, and ends with them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from planner.errors import UsageError, VramwiseError
from trainer.parallel.ranks import ALONE, Ranks, join, leave
from trainer.parallel.watch import watched


@contextlib.contextmanager
def joined(run_file: Path, *, as_json: bool = False) -> Iterator[Ranks]:
    """Yield this process's ranks, as torchrun's environment says; alone without one.

    What ends one rank ends all, and one of them raises it; the others exit in silence, with its code.
    """
    if world_size() == 1:
        yield ALONE
        return
    ranks = _join()
    again = f"go on with: vramwise train {run_file} --nproc {ranks.size} --resume"
    with watched(ranks, hint=again, as_json=as_json):
        yield ranks
    leave()  # not after an error: a group that has lost a rank may wait for it


def world_size() -> int:
    """Return the number of ranks that torchrun started. Raises UsageError for an environment that is not its."""
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
    except ValueError:
        raise UsageError(
            f"WORLD_SIZE: {os.environ.get('WORLD_SIZE')!r} is no number of ranks",
            hint="start the ranks with torchrun, or unset it",
        ) from None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE is {size}, but {missing[0]} is not set",
            hint="start the ranks with torchrun, which sets all of them, or unset WORLD_SIZE",
        )
    if size > 1 and torch.cuda.is_available() and local >= torch.cuda.device_count():
        raise UsageError(
            f"LOCAL_RANK: {local}, but this machine has {torch.cuda.device_count()} GPUs",
            hint="start one rank for each GPU",
        )
    return size


def _join() -> Ranks:
    try:
        return join()
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        first = " ".join(str(error).split())
        if "EADDRINUSE" in first or "address already in use" in first.lower():
            raise VramwiseError(
                f"MASTER_PORT: {place} is in use by another program",
                hint="another port: torchrun --master-port PORT, or --standalone",
            ) from None
        raise VramwiseError(
            f"the ranks did not find each other at {place}: {first[:200]}",
            hint="is the address that of the first node, and the port open between the nodes?",
        ) from None
