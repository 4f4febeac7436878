"""The cases of gpu_check that run the bundled trainer."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import Case
from planner.errors import VramwiseError
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from profiler.calibration import this_machine
from profiler.explain import as_measured
from profiler.recording import Recording
from profiler.torch_recorder import record
from profiler.trace import trace


def run_vramwise(
    case: Case, config: dict[str, Any], folder: Path, *, cpu: bool
) -> tuple[Plan, Recording, int | None]:
    """Train `case` and return its plan, its recording and the traced peak."""
    from planner.machines.machine import make_machine
    from planner.models.hub import find_model
    from trainer.dry_run import subject_for
    from trainer.run import train_run

    model = folder / "model"
    make_model(config, model, cpu=cpu)
    run_file = folder / "run.yaml"
    document = run_document(case, model, folder, cpu=cpu)
    run_file.write_text(json.dumps(document))  # JSON is YAML
    with record(subject=case.kind, follow=cpu) as live:
        train_run(run_file, resume=False, say=lambda _text: None)
    recording = live.recording
    machine = this_machine() or make_machine(vram="16GiB")
    recipe = make_recipe(**document["recipe"])
    planned = plan(find_model(str(model)), recipe, machine)
    try:
        peak: int | None = trace(subject_for(planned.resolved, recipe, config)).peak_bytes
    except VramwiseError:
        peak = None
    return as_measured(planned, recording), recording, peak


def make_model(config: dict[str, Any], folder: Path, *, cpu: bool) -> None:
    """Write a random model of `config` with a small tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.small_model import make_small_model

    make_small_model(folder, hidden=64, layers=1, heads=2, intermediate=64)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    dtype = torch.float32 if cpu else torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if cpu else "cuda"):
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.save_pretrained(folder)


def run_document(case: Case, model: Path, folder: Path, *, cpu: bool) -> dict[str, Any]:
    """Return the run file of the case."""
    task = case.kind.removeprefix("vramwise-")
    recipe: dict[str, Any] = {
        "task": task,
        "method": case.method,
        "dtype": "fp32" if cpu else "bf16",
        "checkpointing": "full" if case.checkpointing else "none",
        "micro_batch_size": case.batch,
    }
    data: dict[str, Any] = {"name": "arithmetic", "options": {"operations": ["add"], "digits": 1}}
    train: dict[str, Any] = {
        "output": str(folder / "run"),
        "dataset": data,
        "steps": case.steps,
        "lr": 1e-5,
        "save_every": 0,
    }
    if task == "grpo":
        recipe |= {
            "prompt_length": case.length - case.completion,
            "completion_length": case.completion,
            "num_generations": case.batch,
            "engine": {"kind": "transformers"},
        }
        train |= {"rewards": ["exact"], "prompts_per_step": 2}
    else:
        rows = folder / "rows.jsonl"
        word = "12 + 7 = 19 "
        row = {"prompt": word, "completion": word * (case.length // 4)}
        rows.write_text("\n".join(json.dumps(row) for _ in range(64)))
        recipe["context"] = case.length
        train["dataset"] = str(rows)
    return {"model": str(model), "recipe": recipe, "machine": {}, "train": train}
