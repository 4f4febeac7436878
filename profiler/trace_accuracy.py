"""`vramwise accuracy --tier trace`: published single-GPU runs against the trace of the same step.

A row is scored when one of the reference steps expresses it: the HF Trainer's SFT step without
fused kernels, on one GPU, at a stated length. Two depths are traced and every phase is
extrapolated: decoder layers of one kind add the same bytes each.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rows import Layout, Row
from planner.accuracy.score import Accuracy, score_files
from planner.accuracy.sft_recipe import recipe_of
from planner.hub import load_catalogue
from planner.model import ModelSpec
from planner.resolve import Resolved, resolve
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions
from profiler.trace import trace

FRAMEWORKS = ("hf-trainer", "peft-loop", "fms-hf-tuning")
INTERVAL = (0.97, 1.03)
QUANTITY = "peak_allocated"


def score(files: Iterable[Path]) -> Accuracy:
    """Return the errors of traces over every row of `files` that a subject expresses."""
    return score_files(files, predict=predict)


def predict(row: Row) -> Prediction:
    """Return what the trace says about `row`; raises NotCovered with the reason."""
    if row.layout is not Layout.SFT or row.quantity != QUANTITY:
        raise NotCovered("the trace states peak_allocated of fine-tuning steps")
    if row.integer("n_gpus") != 1:
        raise NotCovered("the trace runs one GPU")
    if row.integer("seq_len") is None:
        raise NotCovered("the run's length is not stated")
    kernels = row["kernels"].lower()
    if any(word in kernels for word in ("foak", "liger", "unsloth", "scattermoe", "fused")):
        raise NotCovered("fused kernels have no reference step")
    model = model_named(row["model"])
    entry = load_catalogue().get(model.name)
    if entry is None:
        raise NotCovered("the model's config is not in the catalogue")
    resolved = resolve(model, recipe_of(row, model), machine_named(row["gpu"]))
    if not resolved.framework.name.startswith(FRAMEWORKS):
        raise NotCovered(f"framework {resolved.framework.name} has no reference step")
    if resolved.switch("linear_experts") and any(layer.mlp.num_experts for layer in model.layers):
        raise NotCovered("experts as separate linears: the installed transformers fuses them")
    options = _options(resolved, entry["config"])
    return around(QUANTITY, peak_bytes(options, model), *INTERVAL)


def _options(resolved: Resolved, config: dict[str, Any]) -> StepOptions:
    options = step_options(resolved, config, steps=1)
    return replace(options, warm_optimizer=True)


def peak_bytes(options: StepOptions, model: ModelSpec) -> int:
    """Return the peak at the model's full depth, from two traces of a few layers."""
    period = len(model.layers)
    few, more = 2 * period, 4 * period
    if more >= model.num_layers:
        return max(_phases(_Frozen(options)).values())
    low, high = (_phases(_Frozen(replace(options, layers=count))) for count in (few, more))
    steps = (model.num_layers - few) / (more - few)
    return max(int(low[name] + (high[name] - low[name]) * steps) for name in low)


class _Frozen:
    """Options as a cache key: the config inside is a dict."""

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        self._key = repr(options)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self._key == other._key


@lru_cache(maxsize=256)
def _phases(frozen: _Frozen) -> dict[str, int]:
    recording = trace(HfSft(frozen.options))
    return {phase.name: phase.peak_bytes for phase in recording.phases}
