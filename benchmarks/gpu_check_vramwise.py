"""The cases of gpu_check that run the bundled trainer."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_jobs import Case, LeftOutError, Outcome
from benchmarks.gpu_check_run import empty_caches
from planner.errors import VramwiseError
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.run.runfile import make_recipe
from planner.units import format_bytes
from profiler.calibration import this_machine
from profiler.explain import as_measured
from profiler.torch_recorder import LiveRecording, record
from profiler.trace import trace
from trainer.dry_run import subject_for
from trainer.metrics import METRICS_FILE, read_metrics
from trainer.phase_memory import PhaseMemory
from trainer.preflight import PREFLIGHT_FILE, settled
from trainer.run import train_run

# vLLM's CPU build packs weights, keeps its KV cache and has no graphs
VLLM_ON_A_CPU = {"*": "vLLM is planned as it is on CUDA"}
# planner/terms/optimizer.py: 48 MiB, or 12 bytes a trained parameter if that is less
TOY_SCRATCH = {
    "step": "the step's scratch is planned for tensors that fill a chunk; toys are smaller"
}
REWARDS = """
def spread(completions, completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]
"""
"""Completions of random weights are all wrong: only rewards that differ make a step learn."""


def run_vramwise(
    case: Case, config: dict[str, Any], folder: Path, *, cpu: bool, free_bytes: int | None
) -> Outcome:
    """Train `case`; its phases are named by the trainer itself, rollouts among them."""
    document = run_document(case, folder / "model", folder, cpu=cpu)
    make_model(config, folder / "model", cpu=cpu)
    empty_caches()  # or its pool would count as reserved by the run
    recipe = settled(make_recipe(**document["recipe"]))
    with_vllm = case.engine.startswith("vllm")
    if with_vllm:
        from trainer.engines.vllm_settings import settle_engine

        recipe = settle_engine(recipe)
    machine = this_machine() or make_machine(vram="16GiB")
    planned = plan(find_model(str(folder / "model")), recipe, machine)
    must_fit(planned, free_bytes)
    run_file = folder / "run.yaml"
    run_file.write_text(json.dumps(document))  # JSON is YAML
    with record(subject=case.kind, follow=cpu and not with_vllm) as live:
        # the trainer's marks in its steps, and the recorder's in its rehearsal
        live.phases.wrap_marker(PhaseMemory, "__call__")
        live.phases.wrap_marker(LiveRecording, "phase")
        live.phases.wrap_turn(LiveRecording, "turn")
        train_run(run_file, resume=False, say=lambda _text: None)
    steps = read_metrics(folder / "run" / METRICS_FILE)
    rehearsal = json.loads((folder / "run" / PREFLIGHT_FILE).read_text())
    return Outcome(
        plan=as_measured(planned, live.recording),
        recording=live.recording,
        # the trace knows no engine's memory
        traced_phases={} if with_vllm else traced_phases(planned, recipe, config, cpu=cpu),
        step_seconds=[step["seconds"] for step in steps],
        not_compared={} if not cpu else VLLM_ON_A_CPU if with_vllm else TOY_SCRATCH,
        more={
            "engine_agrees": steps[-1].get("sampling/logp_difference_max"),
            "tokens_per_second": steps[-1]["tokens_per_second"],
            "losses": [step["loss"] for step in steps],
            "rehearsal": {phase["name"]: phase["peak_bytes"] for phase in rehearsal["phases"]},
        },
    )


def must_fit(planned: Plan, free_bytes: int | None) -> None:
    """Raise LeftOutError when the plan needs more than is free on this card now."""
    if free_bytes is not None and planned.peak_bytes > free_bytes:
        raise LeftOutError(
            f"needs {format_bytes(planned.peak_bytes)} by its plan, {format_bytes(free_bytes)} is free"
        )


def traced_phases(
    planned: Plan, recipe: Recipe, config: dict[str, Any], *, cpu: bool
) -> dict[str, int]:
    """Return phase -> peak of the same step on fake tensors; empty if no step expresses it.

    Fake tensors are traced as a GPU's: on a CPU without its cuBLAS workspace.
    """
    try:
        plain = json.loads(json.dumps(config))
        traced = trace(subject_for(planned.resolved, recipe, plain, gpu=planned.machine.gpu))
    except VramwiseError:
        return {}
    return {
        phase.name: phase.peak_bytes - (phase.terms_bytes.get("overhead", 0) if cpu else 0)
        for phase in traced.phases
    }


def make_model(config: dict[str, Any], folder: Path, *, cpu: bool) -> None:
    """Write a random model of `config` with a small tokenizer: one token a character."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.small_model import small_tokenizer

    small_tokenizer().save_pretrained(folder)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    dtype = torch.float32 if cpu else torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if cpu else "cuda"):
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.save_pretrained(folder)


def run_document(case: Case, model: Path, folder: Path, *, cpu: bool) -> dict[str, Any]:
    """Return the run file of the case; prompts and completions have its full lengths."""
    task = case.kind.removeprefix("vramwise-")
    recipe: dict[str, Any] = {
        "task": task,
        "method": case.method,
        "dtype": "fp32" if cpu else "bf16",
        "checkpointing": case.checkpointing,
        "micro_batch_size": case.batch,
    }
    train: dict[str, Any] = {
        "output": str(folder / "run"),
        "dataset": str(folder / "rows.jsonl"),
        "steps": case.steps,
        "lr": 1e-5,
        "save_every": 0,
        "print_completions": 0,
    }
    folder.joinpath("rewards.py").write_text(REWARDS)
    prompt = case.length - case.completion if task == "grpo" else 16
    rows = [
        {"prompt": words(prompt, seed=row), "completion": words(case.length, seed=row)}
        for row in range(16)
    ]
    folder.joinpath("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if task == "grpo":
        recipe |= {
            "prompt_length": prompt,
            "completion_length": case.completion,
            "num_generations": case.batch,
            "engine": {"kind": case.engine},
        }
        train |= {"rewards": ["rewards.py:spread"], "prompts_per_step": 2}
    else:
        recipe["context"] = case.length
    return {"model": str(model), "recipe": recipe, "machine": {}, "train": train}


def words(length: int, *, seed: int) -> str:
    """Return a text of `length` characters, which the small tokenizer makes as many tokens."""
    sentence = f"{seed} + {seed % 5} = {seed + seed % 5} "
    return (sentence * (length // len(sentence) + 1))[:length]
