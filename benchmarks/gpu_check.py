"""`make gpu-check`: what this machine's GPU does, beside what vramwise says it does, in 8 minutes.

    python benchmarks/gpu_check.py [--only NAME]... [--json FILE] [--wheels DIR] [--cpu]

Needs torch and transformers; everything else may come as wheels (`benchmarks/gpu_check_wheels.py DIR`
fetches them where there is a network, `--wheels DIR` unpacks here what this machine lacks). Nothing is
downloaded: models are made from catalogue configs with random weights, whose values move no byte.

Cases are whole runs, each in a process of its own: planned from the live objects, recorded, traced on
fake tensors; good if plan and trace are within 3% of the recording. Probes ask one question each. The
bundled trainer's come first, and the JSON is complete after every line: a machine that is taken away
keeps what is done. What this machine cannot run is left out by name. `--cpu` runs the same at toy size
without a GPU, to test this script itself. Exit code 0: nothing failed; 1: something did; 4: no GPU;
5: a package of the light set is missing.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu_check_jobs import JOBS, RESTART_CODE, Case, Probe  # noqa: E402
from benchmarks.gpu_check_wheels import unpack_missing  # noqa: E402
from planner.units import format_bytes  # noqa: E402

SCHEMA_VERSION = 2
BUDGET_S = 465.0
"""Of the whole: 15 s are left of 8 minutes for starting and stopping."""
JOB_LIMIT_S = 120.0
MIN_START_S = 15.0
"""With less left of the budget, a job is not worth starting."""
CPU_LIMIT_S = 600.0
BASE = {"torch": "torch", "pydantic": "pydantic", "yaml": "pyyaml", "psutil": "psutil"}
BASE |= {"rich": "rich", "typer": "typer", "huggingface_hub": "huggingface_hub"}
"""Module -> package of what everything needs."""
MARK = "gpu-check-row "
MIN_BF16_CAPABILITY = 8


def main(
    arguments: Sequence[str] | None = None,
    *,
    jobs: Sequence[Case | Probe] = JOBS,
    about: str = (__doc__ or "").splitlines()[0],
    out: str = "gpu-check.json",
) -> int:
    """Run what was asked for of `jobs`; see the module's docstring for the exit codes."""
    names = [job.name for job in jobs]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--json", type=Path, default=Path(out))
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--budget", type=float, help=f"seconds; {BUDGET_S:.0f} on a GPU")
    parser.add_argument("--cpu", action="store_true", help="toy sizes, no GPU")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        from benchmarks.gpu_check_run import main as work

        return work(options.worker, cpu=options.cpu, mark=MARK)
    for name, folder in (("--wheels", options.wheels), ("--json", options.json.parent)):
        if folder is not None and not folder.is_dir():
            parser.error(f"{name}: no folder {folder}")
    clock = Clock(options.budget or (float("inf") if options.cpu else BUDGET_S))
    with tempfile.TemporaryDirectory() as site:
        if options.wheels:
            try:
                for line in unpack_missing(options.wheels, Path(site)):
                    print(line, flush=True)
            except (zipfile.BadZipFile, ValueError) as error:
                parser.error(f"--wheels: {error}")
            sys.path.insert(0, site)
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [site, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        chosen = [job for job in jobs if not options.only or job.name in options.only]
        return check(chosen, options, clock)


def check(jobs: Sequence[Case | Probe], options: argparse.Namespace, clock: "Clock") -> int:
    """Run `jobs` and report them."""
    missing = [package for module, package in BASE.items() if find_spec(module) is None]
    if missing:
        say_error(f"{', '.join(missing)} not installed: pip install them, or give --wheels DIR")
        return 5
    (facts,) = rows_of(["environment"], cpu=options.cpu, limit_s=120, clock=clock)
    if facts.get("failed"):
        say_error(f"cannot look at this machine: {facts['failed']}")
        return 1
    if facts["problem"]:
        say_error(f"no GPU that torch can use: {facts['problem']}; --cpu tests the script itself")
        return 4
    report = Report(options.json, facts)
    ready: list[Case | Probe] = []
    for job in jobs:
        reason = why_not(job, facts)
        if reason:
            report.add(job, {"name": job.name, "left_out": reason})
        else:
            ready.append(job)
    limit_s = CPU_LIMIT_S if options.cpu else JOB_LIMIT_S
    for group in grouped(ready):
        rows = rows_of([job.name for job in group], cpu=options.cpu, limit_s=limit_s, clock=clock)
        for job, row in zip(group, rows, strict=True):
            report.add(job, row)
    return report.close(clock)


def why_not(job: Case | Probe, facts: dict[str, Any]) -> str | None:
    """Return why this machine cannot run `job`; None if it can."""
    absent = [name for name in job.needs if find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    capability = facts.get("capability")
    wants_bf16 = isinstance(job, Case) or job.bf16
    if wants_bf16 and capability and capability[0] < MIN_BF16_CAPABILITY:
        version = ".".join(map(str, capability))
        return f"wants bf16, which compute capability {version} only emulates (8.0 is the first)"
    return None


def grouped(jobs: Sequence[Case | Probe]) -> list[list[Case | Probe]]:
    """Return jobs that share a process: probes in a row; a case is alone with its CUDA context."""
    groups: list[list[Case | Probe]] = []
    for job in jobs:
        shares = isinstance(job, Probe) and not job.alone
        before = groups[-1][-1] if groups else None
        if shares and isinstance(before, Probe) and not before.alone:
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups


class Clock:
    """Counts down from `budget_s`."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._began_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.budget_s - self.spent_s


def rows_of(
    names: Sequence[str], *, cpu: bool, limit_s: float, clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yield the row of every job, in order; one process, and a fresh one after a job that ended it."""
    left = list(names)
    while left:
        if clock.left_s < MIN_START_S:
            for name in left:
                yield {"name": name, "left_out": f"the {clock.budget_s:.0f} s are over"}
            return
        for row in one_process(tuple(left), cpu=cpu, limit_s=limit_s, clock=clock):
            left.pop(0)
            yield row


def one_process(
    names: Sequence[str], *, cpu: bool, limit_s: float, clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yield rows until all are done, or one fails by ending the process or taking too long."""
    command = [sys.executable, str(Path(__file__)), "--worker", *names, *(["--cpu"] * cpu)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment_of_workers(cpu=cpu),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=pump, args=(process.stdout, lines), daemon=True).start()
        try:
            for name in names:
                allowed_s = min(limit_s, clock.left_s)
                try:
                    line = lines.get(timeout=max(0.1, allowed_s))
                except queue.Empty:
                    yield {"name": name, "failed": f"took longer than {allowed_s:.0f} s"}
                    return
                if line is None:
                    process.wait()
                    if process.returncode == RESTART_CODE:
                        return
                    yield {"name": name, "failed": last_words(process.returncode, errors)}
                    return
                yield json.loads(line)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pump(stream: Any, lines: "queue.SimpleQueue[str | None]") -> None:
    """Move marked lines from a worker's stdout into the queue; None at its end."""
    for line in stream:
        if line.startswith(MARK):
            lines.put(line.removeprefix(MARK))
    lines.put(None)


def last_words(code: int, errors: Any) -> str:
    """Return what a worker that ended early said last."""
    errors.seek(0)
    said = [line.strip() for line in errors.read().splitlines() if line.strip()]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process ended ({ended}): {said[-1][:300] if said else 'no message'}"


def environment_of_workers(*, cpu: bool) -> dict[str, str]:
    """Return the environment of a worker: one GPU, no hub; toys gain nothing from more threads."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if cpu else {}
    return (
        os.environ
        | threads
        | {
            # NVML counts in this order too; more GPUs would make transformers' Trainer data parallel
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": gpus[0],
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


class Report:
    """Prints a line a job and keeps the JSON file complete."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self._document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "environment": {key: value for key, value in facts.items() if key != "problem"},
            "cases": [],
            "probes": [],
        }
        where = facts["gpu"] or "CPU, toy sizes"
        print(f"{where}, torch {facts['packages'].get('torch')}", flush=True)

    def add(self, job: Case | Probe, row: dict[str, Any]) -> None:
        """Take the row of a job."""
        self._document["cases" if isinstance(job, Case) else "probes"].append(row)
        print(row_text(row), flush=True)
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self._document, indent=1))
        part.replace(self._path)

    def close(self, clock: Clock) -> int:
        """Say how it went; return the exit code."""
        rows = self._document["cases"] + self._document["probes"]
        good = [row for row in rows if row.get("ok")]
        left_out = [row for row in rows if "left_out" in row]
        bad = [row["name"] for row in rows if row not in good and row not in left_out]
        words = f"{len(good)} good, {len(left_out)} left out, {len(bad)} bad"
        print(f"{words} in {clock.spent_s:.0f} s; {self._path}", *bad)
        return 0 if good and not bad else 1


def row_text(row: dict[str, Any]) -> str:
    """Return one line for a person."""
    name = f"{row['name']:20}"
    if "left_out" in row:
        return f"{name} left out: {row['left_out']}"
    if "failed" in row:
        return f"{name} FAILED {row['failed']} {row.get('where', '')}".rstrip()
    verdict = "ok " if row["ok"] else "BAD"
    said = row.get("summary") or case_text(row)
    problems = "; ".join(row["problems"])
    return f"{name} {verdict} {said}  {row['seconds']:.0f} s{'  ' if problems else ''}{problems}"


def case_text(row: dict[str, Any]) -> str:
    """Return a case's peaks and its speed."""
    sizes = [
        f"{word} {format_bytes(row[f'{word}_peak_bytes'])}"
        for word in ("planned", "traced", "measured")
        if row[f"{word}_peak_bytes"]
    ]
    error = "not compared" if row["plan_error"] is None else f"{row['plan_error']:+.1%}"
    return f"{', '.join(sizes)} ({error}), {row['seconds_per_step']:.3f} s a step,"


def say_error(text: str) -> None:
    """Print one line on stderr."""
    print(f"gpu-check: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
