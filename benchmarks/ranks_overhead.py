"""What training on several ranks costs beside computing and sending: the plumbing's share of a step.

`python benchmarks/ranks_overhead.py [--json]`. Two gloo ranks of this machine, one thread each, train a small Llama by
SFT under FSDP2. A step's time is split: inside a pass (the model's forward and backward with FSDP2's own
collectives), inside the optimizer's step, inside the figures that ranks tell each other, and the rest, which is the
trainer's: dealing, collating, agreeing, logging. `overhead_ratio` = the rest / the step: medians of one run.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer import stepping
from trainer.config import parse_run
from trainer.parallel.ranks import Ranks, join, leave
from trainer.parallel.sharding import Sharded
from trainer.sft import train_sft
from trainer.small_model import make_small_model

SCHEMA_VERSION = 1
WARM_STEPS = 2
KINDS = ("pass", "step", "told")


class Clock:
    """Seconds by kind since the last `take`; what is timed inside something timed counts there alone."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._inside = False

    def timed(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work`, timed."""

        def run(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return work(*arguments, **named)
            self._inside, started = True, time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                self._seconds[kind] += time.perf_counter() - started
                self._inside = False

        return run

    def take(self) -> dict[str, float]:
        """Return the seconds of each kind, and begin anew."""
        taken, self._seconds = self._seconds, dict.fromkeys(KINDS, 0.0)
        return taken


def measure(ranks: Ranks, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train; return medians over the steps after the first ones."""
    clock = Clock()
    # what a pass waits for, to agree, is told
    for name in ("_reduced", "gather_objects", "broadcast_object"):
        setattr(Ranks, name, clock.timed("told", getattr(Ranks, name)))
    stepping.apply_step = clock.timed("step", stepping.apply_step)
    agreed = Sharded._agreed
    Sharded._agreed = lambda self, work, kind: agreed(self, clock.timed("pass", work), kind)  # type: ignore[method-assign]
    steps: list[tuple[float, dict[str, float]]] = []
    whole = stepping.Stepper.run

    run, train = parse_run(json.loads((folder / "run.json").read_text()), root=folder)
    began = [0.0]

    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        now = time.perf_counter()
        # from the end of one update to the end of the next: data, dealing and logging are in it
        done = whole(self, *arguments, **named)
        ended = time.perf_counter()
        steps.append((ended - (began[0] or now), clock.take()))
        began[0] = ended
        return done

    stepping.Stepper.run = step  # type: ignore[method-assign]
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        train_sft(run, train, root=folder, ranks=ranks)
    kept = steps[WARM_STEPS:]
    figures = {f"{kind}_s": statistics.median(own[kind] for _, own in kept) for kind in KINDS}
    figures["seconds_per_step"] = statistics.median(total for total, _ in kept)
    figures["overhead_ratio"] = statistics.median(
        1 - sum(own.values()) / total for total, own in kept
    )
    return figures


def worker(rank: int, port: int, folder: str, options: argparse.Namespace) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = join()
    figures = ranks.gather_objects(measure(ranks, Path(folder), options))
    if ranks.first:
        worst = max(figures, key=lambda own: own["overhead_ratio"])
        (Path(folder) / "figures.json").write_text(json.dumps(worst))
    leave()


def document(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the run: ragged samples, more of them than divide evenly."""
    rows = [
        {"prompt": f"{n} + {n} =", "completion": " " + "9" * (20 + 37 * n % options.length)}
        for n in range(64)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = make_small_model(
        folder / "model",
        hidden=options.hidden,
        layers=options.layers,
        intermediate=4 * options.hidden,
    )
    return {
        "model": str(model),
        "recipe": {
            "task": "sft",
            "method": "full",
            "dtype": "fp32",
            "context": options.length + 64,
            "micro_batch_size": 4,
            "checkpointing": "full",
            "sharding": "fsdp2",
        },
        "train": {
            "output": str(folder / "out"),
            "dataset": {"name": "rows.jsonl"},
            "steps": WARM_STEPS + options.steps,
            "prompts_per_step": options.batch,
            "preflight": False,
            "print_completions": 0,
            "save_every": 0,
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("ranks", 2), ("steps", 8), ("hidden", 256), ("layers", 4), ("length", 256), ("batch", 15)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "run.json").write_text(json.dumps(document(folder, options)))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        torch.multiprocessing.start_processes(
            worker, (port, scratch, options), nprocs=options.ranks, start_method="spawn"
        )
        figures = json.loads((folder / "figures.json").read_text())
    answer = {
        "schema_version": SCHEMA_VERSION,
        "ranks": options.ranks,
        **{name: round(value, 4) for name, value in figures.items()},
    }
    if options.json:
        print(json.dumps(answer))
    else:
        print("\n".join(f"{name:<18}{value:>10}" for name, value in answer.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
