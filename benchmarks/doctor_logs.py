"""How fast and in how much memory `explain` reads a log of 300 MB, by what the log is full of.

    python -m benchmarks.doctor_logs [--mb 300] [--kind ray ...] [--json]

Each log is streamed to a process of its own, which says the CPU seconds it took and the most memory
it held. The error stands at the end, behind what a run prints at every step.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"
    " of which 1.06 GiB is free. Of the allocated memory 76.92 GiB is allocated by PyTorch, and 606.13 MiB is reserved"
    " by PyTorch but unallocated.\n"
)
CHUNK_LINES = 2000
Line = Callable[[int, random.Random], str]


def _dense(step: int, rng: random.Random) -> str:
    """Return a line of which every one matches a rule."""
    return (
        f"[INFO] [utils.py:782:see_memory_usage] MA {rng.uniform(20, 22):.2f} GB         Max_MA 22.20 GB         CA 25.30 GB         Max_CA 26 GB \n",
        f"[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue) step {step}\n",
        f"[rank{step % 8}]: RuntimeError: communicator was aborted on rank {step % 8}, exit code 1, cache blocks {step}\n",
        f"caught CUDA out of memory, skipping batch {step}\n",
    )[step % 4]


KINDS: dict[str, Line] = {
    "trainer": lambda step, rng: (
        f"{{'loss': {rng.uniform(1, 3):.4f}, 'grad_norm': 0.3, 'learning_rate': 1e-05, 'epoch': {step / 1e4:.2f}, 'mem': 41.2}}\n"
    ),
    "vllm": lambda step, rng: (
        f"(EngineCore_DP0 pid=2234) INFO 10-25 13:{step // 60 % 60:02d}:{step % 60:02d} [loggers.py:127] Engine 000: Avg prompt throughput:"
        f" {rng.uniform(10, 99):.1f} tokens/s, Running: {step % 256} reqs, Waiting: 0 reqs, GPU KV cache usage: {step % 100}.0%\n"
    ),
    "bar": lambda step, rng: (
        f"\rTraining:  {step % 100}%|####      | {step}/900000 [01:{step % 60:02d}<3:12:11,  1.65s/it, loss={rng.uniform(1, 3):.4f}]"
    ),
    "one line": lambda step, rng: f"tensor({rng.uniform(0, 9):.6f}, device='cuda:0'), ",
    "secrets": lambda step, rng: (
        f"INFO uploading to https://user:pass{step}@host/x with HF_TOKEN=hf_{step:032x} api_key=sk-{step:030x} step {step}\n"
    ),
    "ray": lambda step, rng: (
        f"(WorkerDict pid={1000 + step % 8}, ip=10.0.0.{step % 4}) step:{step // 8} - actor/entropy:{rng.uniform(0, 1):.3f}"
        f" - perf/max_memory_allocated_gb:60.1 - timing_s/gen:20.2 - global_seqlen/max:{4000 + step % 900}\n"
    ),
    "dense": _dense,
}


def chunks(kind: str, size: int) -> Iterator[bytes]:
    """Yield a log of about `size` bytes that ends in an error."""
    rng, line, step, written = random.Random(kind), KINDS[kind], 0, 0
    while written < size:
        data = "".join(line(step + each, rng) for each in range(CHUNK_LINES)).encode()
        step, written = step + CHUNK_LINES, written + len(data)
        yield data
    yield b"\n" + ERROR.encode()


def explain_piped() -> None:
    """Read a log from stdin as `explain` does; print what it took. The working side of `measure`."""
    from planner.doctor.diagnose import diagnose

    diagnose(ERROR)  # imports and rules are made once
    started = time.process_time()
    found = diagnose(sys.stdin.buffer)
    seconds = time.process_time() - started
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    requests = [failure.budget.requested_bytes for failure in found.failures if failure.budget]
    json.dump({"cpu_s": seconds, "rss_bytes": held, "requests": requests}, sys.stdout)


def measure(kind: str, size: int) -> dict[str, float]:
    """Return the CPU seconds, MB a CPU second, peak memory and whether the error at the end was found."""
    command = [sys.executable, "-m", "benchmarks.doctor_logs", "--piped"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        sent = 0
        for data in chunks(kind, size):
            child.stdin.write(data)
            sent += len(data)
        child.stdin.close()
        said = json.loads(child.stdout.read())
    return {
        "mb": sent / 1e6,
        "cpu_s": said["cpu_s"],
        "mb_per_cpu_s": sent / 1e6 / said["cpu_s"],
        "rss_mib": said["rss_bytes"] / 2**20,
        "error_found": float(int(2.5 * 2**30) in said["requests"]),
    }


def main() -> None:
    """Print one line a kind of log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--piped", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.piped:
        explain_piped()
        return
    document = {}
    for kind in options.kind or KINDS:
        found = document[kind] = measure(kind, options.mb * 10**6)
        if not options.json:
            print(
                f"{kind:<10}{found['mb']:6.0f} MB{found['cpu_s']:7.2f} CPU s{found['mb_per_cpu_s']:7.1f} MB/s{found['rss_mib']:6.0f} MiB"
                f"{'' if found['error_found'] else '  the error was not found'}",
                flush=True,
            )
    if options.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
