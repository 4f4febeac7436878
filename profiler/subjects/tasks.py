"""Which step runs a task other than SFT and GRPO, for a trace."""

from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError
from planner.models.catalogue import load_catalogue, model_names
from planner.models.config_file import read_config
from planner.run.recipe import Loss, Reference, Task
from planner.run.resolved import Resolved
from profiler.subjects.distill import Distill
from profiler.subjects.options import StepOptions
from profiler.subjects.preferences import TrlOdds, TrlPairs
from profiler.subjects.scores import EmbedStep, ScoreStep
from profiler.trace import Subject

TRL_STEPS = ("trl", "trl-full")
HF_STEPS = (*TRL_STEPS, "hf", "hf-full")


def task_subject(resolved: Resolved, options: StepOptions, config: dict[str, Any]) -> Subject:
    """Return the step of a task; raises UnsupportedError for one that nothing expresses."""
    step, task = resolved.switches.trace_step, resolved.task
    if step in TRL_STEPS and task in (Task.DPO, Task.KTO):
        if resolved.reference is Reference.OFFLOADED:
            raise UnsupportedError("reference: an offloaded copy cannot be traced")
        fused = step == "trl" and resolved.loss is not Loss.FULL
        return TrlPairs(options, task=task, fused=fused, reference=resolved.reference)
    if step in TRL_STEPS and task in (Task.ORPO, Task.SIMPO):
        return TrlOdds(options, task=task)
    teacher = resolved.companion("teacher")
    if step in TRL_STEPS and teacher is not None:
        if not teacher.resident:
            raise UnsupportedError(
                f"teacher_placement: a teacher that is {teacher.placement} cannot be traced"
            )
        fused = step == "trl" and resolved.loss is not Loss.FULL
        return Distill(options, teacher=_config(teacher.name), fused=fused)
    if step in HF_STEPS and task in (Task.REWARD, Task.RERANK):
        return ScoreStep(options, task=task)
    if step in HF_STEPS and task is Task.EMBED:
        return EmbedStep(options, resolved=resolved)
    raise UnsupportedError(
        f"framework {resolved.framework.name}: its {task} step cannot be traced",
        hint="--framework trl has steps of " + ", ".join(TRACED),
    )


def _config(name: str) -> dict[str, Any]:
    """Return the teacher's config.json; the catalogue or a folder has it."""
    entry = load_catalogue().get(model_names().get(name.lower(), ""))
    if entry is not None:
        return dict(entry["config"])
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnsupportedError(
            f"teacher: {name[:60]} cannot be traced", hint="a catalogue name or a config.json"
        )
    return read_config(file)


TRACED = ("sft", "grpo", "dpo", "kto", "orpo", "simpo", "reward", "distill", "embed", "rerank")
