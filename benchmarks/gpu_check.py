"""`make gpu-check`: plan, trace and record real runs on this machine's GPU, and time the trainer.

    python benchmarks/gpu_check.py [--case NAME]... [--json FILE] [--cpu]

Each case runs in a process of its own (a clean CUDA context), is planned from the live objects,
traced on fake tensors, and recorded; the JSON holds every figure and whether the plan was within
3%. Models are made from catalogue configs with random weights: memory does not depend on their
values, so nothing is downloaded. The whole is sized to stay under 8 minutes. `--cpu` runs the same
cases at toy size without a GPU, to test this script itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from planner.errors import VramwiseError  # noqa: E402
from planner.models.catalogue import load_catalogue  # noqa: E402
from planner.units import format_bytes  # noqa: E402

WITHIN = 0.03
CASE_LIMIT_S = 90
BUDGET_S = 460


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run to plan, trace and record."""

    name: str
    kind: str
    """hf-sft, trl-grpo, vramwise-sft or vramwise-grpo."""
    model: str
    method: str
    length: int
    batch: int
    checkpointing: bool = True
    completion: int = 0
    steps: int = 3


CASES = (
    Case(name="sft-full", kind="hf-sft", model="qwen3-0.6b", method="full", length=1024, batch=2),
    Case(name="sft-lora", kind="hf-sft", model="llama-3.2-1b", method="lora", length=2048, batch=4),
    Case(
        name="sft-lora-plain",
        kind="hf-sft",
        model="tinyllama-1.1b",
        method="lora",
        length=1024,
        batch=2,
        checkpointing=False,
    ),
    Case(
        name="sft-qlora", kind="hf-sft", model="llama-3.2-1b", method="qlora", length=2048, batch=4
    ),
    Case(
        name="grpo-trl",
        kind="trl-grpo",
        model="qwen3-0.6b",
        method="full",
        length=512,
        batch=8,
        completion=128,
        steps=2,
    ),
    Case(
        name="grpo-vramwise",
        kind="vramwise-grpo",
        model="llama-3.2-1b",
        method="lora",
        length=512,
        batch=8,
        completion=256,
        steps=3,
    ),
    Case(
        name="sft-vramwise",
        kind="vramwise-sft",
        model="llama-3.2-1b",
        method="lora",
        length=4096,
        batch=2,
        steps=5,
    ),
)


def main() -> int:
    """Run the cases and write the JSON; 1 if a case failed or was off by more than 3%."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--cpu", action="store_true", help="toy sizes, no GPU")
    parser.add_argument("--worker", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run_case(by_name(options.worker), cpu=options.cpu)))
        return 0
    if not options.cpu and not has_gpu():
        print(
            "gpu-check: no GPU that torch can use; --cpu tests the script itself", file=sys.stderr
        )
        return 4
    started_s, rows = time.monotonic(), []
    chosen = [case for case in CASES if not options.case or case.name in options.case]
    for case in chosen:
        if time.monotonic() - started_s > BUDGET_S:
            rows.append({"case": case.name, "failed": "left out: the 8 minutes are over"})
            continue
        rows.append(in_process(case, cpu=options.cpu))
        print(row_text(rows[-1]), flush=True)
        # after every case: a machine that is taken away keeps what is done
        options.json.write_text(json.dumps({"schema_version": 1, "cases": rows}, indent=1))
    return 0 if all(row.get("within") for row in rows) else 1


def by_name(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in CASES if case.name == name)


def has_gpu() -> bool:
    """True when torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def in_process(case: Case, *, cpu: bool) -> dict[str, Any]:
    """Run one case in a fresh process; a failure is a row too."""
    command = [sys.executable, str(Path(__file__)), "--worker", case.name, *(["--cpu"] * cpu)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=CASE_LIMIT_S * (1 + 2 * cpu)
        )
    except subprocess.TimeoutExpired:
        return {"case": case.name, "failed": "over its time limit"}
    if done.returncode:
        return {"case": case.name, "failed": done.stderr.strip()[-800:]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def row_text(row: dict[str, Any]) -> str:
    """Return one line for a person."""
    if "failed" in row:
        return f"{row['case']:16} FAILED {row['failed'].splitlines()[-1][:120]}"
    sizes = [
        f"{name} {format_bytes(row[f'{name}_peak_bytes']) if row[f'{name}_peak_bytes'] else 'unknown'}"
        for name in ("planned", "traced", "measured")
    ]
    return f"{row['case']:16} {'  '.join(sizes)}  plan {row['plan_error']:+.1%}  {row['seconds']:.0f} s"


def run_case(case: Case, *, cpu: bool) -> dict[str, Any]:
    """Run `case` here and return its row."""
    import torch

    case = toy(case) if cpu else case
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.kind.startswith("vramwise"):
            from benchmarks.gpu_check_vramwise import run_vramwise as run
        else:
            from benchmarks.gpu_check_hf import run_hf as run
        plan, recording, traced = run(case, config_of(case, cpu=cpu), folder, cpu=cpu)
    measured = recording.peak_bytes
    error = plan.peak_bytes / measured - 1
    return {
        "case": case.name,
        **{key: value for key, value in asdict(case).items() if key != "name"},
        "gpu": None if cpu else torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "planned_peak_bytes": plan.peak_bytes,
        "planned_reserved_bytes": plan.reserved_peak_bytes,
        "planned_device_bytes": plan.device_used_bytes,
        "traced_peak_bytes": traced,
        "measured_peak_bytes": measured,
        "measured_reserved_bytes": recording.peak_reserved_bytes,
        "measured_device_bytes": recording.peak_device_bytes or device_used(cpu=cpu),
        "planned_phase": plan.peak_phase,
        "measured_phase": recording.peak_phase,
        "phases": {phase.name: phase.peak_bytes for phase in recording.phases},
        "plan_error": error,
        "trace_error": traced / measured - 1 if traced else None,
        "within": abs(error) <= WITHIN,
        "seconds_per_step": recording.environment["elapsed_s"] / max(1, case.steps),
        "seconds": time.monotonic() - started_s,
    }


def toy(case: Case) -> Case:
    """Return the case at a size for a CPU."""
    completion = 8 if case.completion else 0
    return replace(case, length=64, completion=completion, batch=min(case.batch, 4), steps=2)


def config_of(case: Case, *, cpu: bool) -> dict[str, Any]:
    """Return the model's config.json; `cpu` cuts it down."""
    config = dict(load_catalogue()[case.model]["config"])
    if cpu:
        config |= {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            # not grouped: grouped fp32 keys are planned as CUDA's math kernel, not a CPU's
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 512,
        }
    return config


def device_used(*, cpu: bool) -> int | None:
    """Return what the driver says is in use on the GPU now; None where it does not tell."""
    from profiler.nvml import open_gpus

    if cpu:
        return None
    try:
        with open_gpus() as gpus:
            return gpus.read()[0].used_bytes
    except VramwiseError:
        return None


if __name__ == "__main__":
    sys.exit(main())
