"""How fast a device multiplies, moves, attends and starts operations: each the best of a few repeats.

The same code measures a GPU and a CPU: `vramwise profile calibrate` keeps what it finds for later plans
(planner/speed/measured.py), and benchmarks/cpu_speed.py checks the speed model by it.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

NANO = 10**9
REPEATS = 5
GPU_SIDES = (4096, 8192)
CPU_SIDES = (768, 1536)
GPU_BYTES, CPU_BYTES = 1 << 30, 1 << 23
"""Of a copy; a CPU's as large as activations are, so that its caches take part as they do in a step."""
HEADS, HEAD_DIM = 16, 64
GPU_TOKENS, CPU_TOKENS = 4096, 512
SMALL_OPS = 256
"""Operations of one repeat: a small one's time is that of starting it."""
Clock = Callable[[], float]
Best = Callable[[Callable[[], Any]], float]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def speeds(
    device: torch.device, clock: Clock = time.perf_counter, repeats: int = REPEATS
) -> dict[str, int]:
    """Return the fields of a Calibration that are speeds of `device`; takes well under a minute.

    `clock`: of one CPU thread among others' work, time.process_time counts its own time alone.
    """
    best = partial(best_seconds, device=device, clock=clock, repeats=repeats)
    on_gpu = device.type != "cpu"
    dtypes = DTYPES if on_gpu else {"fp32": torch.float32}
    sides: tuple[int, ...] = GPU_SIDES if on_gpu else CPU_SIDES
    size = GPU_BYTES if on_gpu else CPU_BYTES
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(device)
        size = min(size, free // 4)
        sides = tuple(side for side in sides if 3 * 4 * side**2 < free) or sides[:1]
    found = {
        f"{name}_flops_per_s": max(matmul_rate(device, dtype, side, best) for side in sides)
        for name, dtype in dtypes.items()
    }
    fastest = max(dtypes, key=lambda name: found[f"{name}_flops_per_s"])
    host = torch.device("cpu")
    return found | {
        "attention_flops_per_s": attention_rate(
            device, DTYPES[fastest], GPU_TOKENS if on_gpu else CPU_TOKENS, best
        ),
        "launch_nanoseconds": launch_nanoseconds(device, best),
        "bandwidth_bytes_per_s": 2 * copy_rate(device, device, size, best),
        "host_to_device_bytes_per_s": copy_rate(host, device, size, best),
        "device_to_host_bytes_per_s": copy_rate(device, host, size, best),
    }


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int, best: Best) -> int:
    """Return FLOP/s of a square product."""
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return int(2 * side**3 / best(lambda: left @ right))


def attention_rate(device: torch.device, dtype: torch.dtype, tokens: int, best: Best) -> int:
    """Return FLOP/s of causal attention, forward and backward: 2 products and 5, half of the pairs."""
    shape = (1, HEADS, tokens, HEAD_DIM)
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.ones(shape, device=device, dtype=dtype)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    pairs = tokens * tokens // 2
    return int(7 * 2 * pairs * HEADS * HEAD_DIM / best(run))


def launch_nanoseconds(device: torch.device, best: Best) -> int:
    """Return the host's time for one small operation with its autograd node."""
    start = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        value = start
        for _ in range(SMALL_OPS):
            value = value + 1
        value.sum().backward()

    # forward and backward: two operations each
    return int(best(run) * NANO / (2 * SMALL_OPS))


def copy_rate(source: torch.device, target: torch.device, size: int, best: Best) -> int:
    """Return bytes/s of a copy, from and to pinned memory where a GPU is on the other side."""
    several = source.type != target.type

    def made(place: torch.device) -> torch.Tensor:
        pinned = several and place.type == "cpu"
        return torch.ones(size, dtype=torch.uint8, device=place, pin_memory=pinned)

    origin, copy = made(source), made(target)
    return int(size / best(lambda: copy.copy_(origin, non_blocking=several)))


def best_seconds(
    work: Callable[[], Any],
    device: torch.device,
    *,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the shortest of a few runs of `work`, one before them to warm up."""
    taken = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = clock()
        work()
        synchronize(device)
        taken.append(clock() - started)
    return min(taken[1:])


def synchronize(device: torch.device) -> None:
    """Wait for what was started on a GPU."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
