"""`vramwise accuracy --tier trace`: published single-GPU runs against the trace of the same step.

A row is scored when a reference step expresses it: the HF Trainer's SFT step without fused kernels
or TRL's GRPO step with full logits, on one GPU, at a stated length, in the releases that the run
used. Two depths are traced and every phase is extrapolated: decoder layers of one kind add the same
bytes each.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from planner.accuracy.names import machine_named, measured_config, model_named
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rl_recipe import rl_recipe
from planner.accuracy.rows import Layout, Row
from planner.accuracy.score import Accuracy, score_files
from planner.accuracy.sft_recipe import recipe_of
from planner.errors import UnsupportedError
from planner.models.catalogue import load_catalogue
from planner.models.spec import ModelSpec
from planner.run.framework import pick
from planner.run.recipe import Recipe, Task
from planner.run.resolve import resolve
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import Temperature, TrlGrpo
from profiler.trace import Subject, trace

FUSED = ("foak", "liger", "unsloth", "scattermoe", "fused")
INTERVAL = (0.97, 1.03)
QUANTITY = "peak_allocated"


def score(files: Iterable[Path]) -> Accuracy:
    """Return the errors of traces over every row of `files` that a subject expresses."""
    return score_files(files, predict=predict)


def predict(row: Row) -> Prediction:
    """Return what the trace says about `row`; raises NotCovered with the reason."""
    options, model, temperature = _step(row)
    return around(QUANTITY, peak_bytes(options, model, temperature=temperature), *INTERVAL)


def subject_of(row: Row) -> Subject:
    """Return the step of `row` at full depth; raises NotCovered with the reason."""
    options, _, temperature = _step(row)
    return _Frozen(options, temperature).subject()


def _step(row: Row) -> tuple[StepOptions, ModelSpec, Temperature | None]:
    """Return the step of a row, and how full GRPO logits meet the temperature (None: an SFT step)."""
    if row.quantity != QUANTITY:
        raise NotCovered("the trace tier scores peak_allocated")
    model = model_named(row["model"])
    machine = machine_named(row["gpu"])
    resolved = resolve(model, _recipe(row, model), machine)
    if resolved.switches.linear_experts and any(layer.mlp.num_experts for layer in model.layers):
        raise NotCovered("experts as separate linears: the installed transformers fuses them")
    entry = load_catalogue().get(model.name)
    config = measured_config(model.name) if entry is None else dict(entry["config"])
    if not config:
        raise NotCovered("the model's config is not known")
    try:
        options = step_options(resolved, config, gpu=machine.gpu, steps=1)
        options = replace(options, warm_optimizer=True)
    except UnsupportedError as error:
        raise NotCovered(str(error)) from error
    grpo = resolved.task is Task.GRPO
    return options, model, Temperature(resolved.switches.grpo_temperature) if grpo else None


def _recipe(row: Row, model: ModelSpec) -> Recipe:
    """Return the recipe of a row that a reference step expresses."""
    if (row.integer("n_gpus") or row.integer("num_gpus")) != 1:
        raise NotCovered("the trace runs one GPU")
    if row.layout is Layout.RL:
        recipe = rl_recipe(row, model)
        if recipe.task is not Task.GRPO or _trace_step(recipe) != "trl-full":
            raise NotCovered(f"{recipe.task} of {recipe.framework} has no reference step")
        return recipe
    if any(word in row["kernels"].lower() for word in FUSED):
        raise NotCovered("fused kernels have no reference step")
    if row.integer("seq_len") is None:
        raise NotCovered("the run's length is not stated")
    recipe = recipe_of(row, model)
    if _trace_step(recipe) != "hf":
        raise NotCovered(f"framework {recipe.framework} has no reference step")
    return recipe


def _trace_step(recipe: Recipe) -> str:
    switches = pick(recipe.framework).switches_of(recipe.task.value)
    return switches.trace_step


def peak_bytes(
    options: StepOptions, model: ModelSpec, *, temperature: Temperature | None = None
) -> int:
    """Return the peak at the model's full depth, from two traces of a few layers."""
    period = len(model.layers)
    few, more = 2 * period, 4 * period
    if more >= model.num_layers:
        return max(_phases(_Frozen(options, temperature)).values())
    low, high = (
        _phases(_Frozen(replace(options, layers=count), temperature)) for count in (few, more)
    )
    steps = (model.num_layers - few) / (more - few)
    return max(int(low[name] + (high[name] - low[name]) * steps) for name in low)


class _Frozen:
    """A step as a cache key: the config inside is a dict."""

    def __init__(self, options: StepOptions, temperature: Temperature | None) -> None:
        self.options = options
        self.temperature = temperature
        self._key = repr((options, temperature))

    def subject(self) -> Subject:
        """Return the step to trace."""
        if self.temperature is None:
            return HfSft(self.options)
        return TrlGrpo(self.options, fused=False, temperature=self.temperature)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self._key == other._key


@lru_cache(maxsize=256)
def _phases(frozen: _Frozen) -> dict[str, int]:
    options = frozen.options
    _say(
        f"tracing {options.config.get('model_type')} {options.method}, {options.layers or 'all'} "
        f"layers, {options.micro_batch} x {options.length} tokens"
    )
    recording = trace(frozen.subject())
    return {phase.name: phase.peak_bytes for phase in recording.phases}


def _say(text: str) -> None:
    """Print progress where somebody watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
