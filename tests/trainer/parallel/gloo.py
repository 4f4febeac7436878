"""Runs a function on several gloo ranks of this machine, as torchrun would start them."""

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
import torch.multiprocessing as mp

from trainer.parallel.ranks import Ranks, join, leave

PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "transformers",
    "peft",
    "trainer.sft",
    "trainer.grpo",
]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `work(ranks, *arguments)` returns on each of `size` new processes."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        PRELOADED
    )  # imported once, by the process that all ranks fork from
    answers: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, answers, work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        received = dict(answers.get(timeout=600) for _ in processes)
    finally:  # a rank that still waits for another would outlive the tests
        for process in processes:
            process.join(timeout=20)
            process.kill()
    failed = [value for ok, value in received.values() if not ok]
    assert not failed, failed[0]
    return [pickle.loads(received[rank][1]) for rank in range(size)]


def _rank(
    rank: int,
    size: int,
    port: int,
    answers: Any,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks: Ranks = join()
    try:
        # pickled here: a tensor sent as it is lives in shared memory that ends with its process
        answers.put((rank, (True, pickle.dumps(work(ranks, *arguments)))))
    except BaseException:
        answers.put((rank, (False, traceback.format_exc())))
    leave()
