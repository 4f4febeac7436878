"""Ranks that may die: their processes are the test's to kill, and nobody waits for answers."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from planner.verbs.edge import at_the_edge
from tests.trainer.parallel.gloo import PRELOADED, free_port
from trainer.parallel.worker import joined

STORES: list[Any] = []


def start(
    size: int, work: Callable[..., Any], *arguments: Any, folder: Path, **environment: str
) -> list[Any]:
    """Start `work(ranks, *arguments)` on `size` ranks, joined as a command's are; return their processes.

    What each prints to stderr is in `folder`/rank-N.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    # as torchrun's agent does: the store outlives the ranks
    STORES.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    processes = []
    for rank in range(size):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        } | environment
        target = (place, folder / f"rank-{rank}", work, arguments)
        processes.append(context.Process(target=_rank, args=target))
    for process in processes:
        process.start()
    return processes


def ended(processes: list[Any], *, limit_s: float = 240.0) -> list[int]:
    """Return the exit codes; a process that is still there after `limit_s` is killed and has None."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    return codes


def kill(process: Any) -> None:
    """Kill a rank as a kernel out of memory does."""
    os.kill(process.pid, signal.SIGKILL)


def said(folder: Path, size: int) -> list[str]:
    """Return what each rank printed."""
    return [(folder / f"rank-{rank}").read_text(encoding="utf-8") for rank in range(size)]


def _rank(place: dict[str, str], output: Path, work: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= place
    with output.open("w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 2)

        def run() -> None:
            with joined(Path("run.yaml")) as ranks:
                work(ranks, *arguments)

        code = at_the_edge(run, as_json=False, help_line="")
    os._exit(code)
