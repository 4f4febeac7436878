"""`vramwise demo`: plan, trace and train a small model by GRPO on whatever this machine has."""

import json
from pathlib import Path
from typing import Any

from planner.errors import VramwiseError
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import RunFile
from planner.units import format_bytes
from profiler.storages import TraceTimeoutError
from profiler.trace import trace
from trainer.config import TrainSection, parse_run
from trainer.demo_model import DemoModel, find_demo_model
from trainer.devices import BF16_CAPABILITY, check_driver
from trainer.dry_run import subject_for
from trainer.grpo import train_grpo
from trainer.metrics import mean
from trainer.preflight import Preflight, settled, this_machine
from trainer.run import quiet
from trainer.session import Result, Say

SCHEMA_VERSION = 1
GENERATIONS = 8
MICRO_BATCH = 16
"""Sequences at full length in one forward, and completions under way at once."""
WINDOW = 10
"""Steps at either end that are compared."""
BAR_WIDTH = 40
TRACE_LIMIT_S = 180.0


def run_demo(*, output: Path, steps: int | None, seed: int, model: str, say: Say) -> dict[str, Any]:
    """Run the demo and return its figures. Raises VramwiseError."""
    quiet()
    check_driver()
    chosen = find_demo_model(model, say=say)
    document = demo_document(
        chosen, output=output.resolve(), steps=steps or chosen.steps, seed=seed
    )
    run, train = parse_run(document, root=Path.cwd())
    traced = _trace(run, train, say=say)
    prepared: list[Preflight] = []
    say(
        f"GRPO ({chosen.method}) on one-digit sums: {chosen.name}, {train.steps} steps, seed {seed}"
    )
    result = train_grpo(run, train, root=Path.cwd(), say=say, on_ready=prepared.append)
    report = _report(chosen, result, prepared[0], traced)
    say(_table(report["phases"]))
    say(curve(report["rewards"]))
    first, last = report["first_mean"], report["last_mean"]
    say(f"accuracy of the first {WINDOW} steps {first:.2f}, of the last {WINDOW} {last:.2f}")
    return report


def demo_document(chosen: DemoModel, *, output: Path, steps: int, seed: int) -> dict[str, Any]:
    """Return the demo's run file."""
    import torch

    native_bf16 = torch.cuda.is_available() and (
        torch.cuda.get_device_capability() >= BF16_CAPABILITY
    )
    return {
        "model": str(chosen.path),
        "recipe": {
            "task": "grpo",
            "method": chosen.method,
            # slow on most CPUs, emulated by GPUs before Ampere
            "dtype": "bf16" if native_bf16 else "fp32",
            "num_generations": GENERATIONS,
            "micro_batch_size": MICRO_BATCH,
            "prompt_length": 48,
            "completion_length": 6,
            "checkpointing": "none",
        },
        "train": {
            "output": str(output),
            "overwrite": True,
            "dataset": {
                "name": "arithmetic",
                "options": {
                    "operations": ["add"],
                    "digits": 1,
                    "examples": chosen.examples,
                    "seed": seed,
                },
            },
            "rewards": ["exact"],
            "sampling": {"stop": ["\n"], "temperature": chosen.temperature},
            "loss": {"type": "grpo"},
            "prompts_per_step": chosen.prompts,
            "steps": steps,
            "lr": chosen.lr,
            "warmup_steps": min(WINDOW, steps - 1),
            "seed": seed,
            "save_every": 0,
        },
    }


def curve(rewards: list[float], *, rows: int = 10) -> str:
    """Return the reward curve as bars, a row for each tenth of the run."""
    size = max(1, -(-len(rewards) // rows))
    lines = []
    for start in range(0, len(rewards), size):
        part = rewards[start : start + size]
        value = mean(part)
        label = f"steps {start + 1}-{start + len(part)}"
        lines.append(f"{label:<14}{value:>6.2f}  {'#' * round(value * BAR_WIDTH)}")
    return "\n".join(lines)


def _trace(run: RunFile, train: TrainSection, *, say: Say) -> dict[str, int]:
    """Return phase -> traced peak of the same training step on fake tensors; none if it takes long.

    On a CPU its own kernels are traced, and library workspaces (term overhead) are left out.
    """
    import torch

    say("tracing the step on fake tensors")
    recipe = settled(run.recipe)
    machine = this_machine(run, train)
    resolved = plan(find_model(run.model), recipe, machine).resolved
    config = json.loads((Path(run.model) / "config.json").read_text(encoding="utf-8"))
    subject = subject_for(resolved, recipe, config, gpu=machine.gpu)
    try:
        recording = trace(subject, time_limit_s=TRACE_LIMIT_S, cpu=machine.cpu)
    except TraceTimeoutError:
        say(f"the trace takes over {TRACE_LIMIT_S:.0f} s on this machine: going on without it")
        return {}
    on_gpu = torch.cuda.is_available()
    return {
        phase.name: phase.peak_bytes - (0 if on_gpu else phase.terms_bytes.get("overhead", 0))
        for phase in recording.phases
    }


def _report(
    chosen: DemoModel, result: Result, ready: Preflight, traced: dict[str, int]
) -> dict[str, Any]:
    rewards = [metrics["rewards/exact/mean"] for metrics in result.metrics]
    if len(rewards) < 2 * WINDOW:
        raise VramwiseError(
            f"the demo was stopped after {len(rewards)} steps",
            hint=f"its log is in {result.output}",
        )
    first, last = mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])
    return {
        "schema_version": SCHEMA_VERSION,
        "model": chosen.name,
        "output": str(result.output),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "first_mean": round(first, 4),
        "last_mean": round(last, 4),
        "gain": round(last - first, 4),
        "rewards": rewards,
        "phases": [
            {
                "name": name,
                "planned_bytes": planned,
                "traced_bytes": traced.get(name),
                "measured_bytes": ready.measured_bytes.get(name),
            }
            for name, planned in ready.planned_bytes.items()
        ],
    }


def _table(phases: list[dict[str, Any]]) -> str:
    columns = ("planned", "traced", "measured")
    lines = [f"{'phase':<10}" + "".join(f"{name:>14}" for name in columns)]
    for phase in phases:
        cells = [phase[f"{name}_bytes"] for name in columns]
        if phase["measured_bytes"] is None:
            continue
        shown = (format_bytes(cell) if cell is not None else "-" for cell in cells)
        lines.append(f"{phase['name']:<10}" + "".join(f"{cell:>14}" for cell in shown))
    return "\n".join(lines)
