"""Models and methods that fit a GPU, each with the best settings found."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.catalogue import catalogue_model, catalogue_names
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from planner.terms.counts import base_weights

CONTEXTS = tuple(2**power for power in range(9, 21))
BATCHES = (2, 4, 8, 16, 32, 64)


TRAINING: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
}
SERVING: dict[str, dict[str, Any]] = {
    "serve": {},
    "serve fp8": {"quantization": "fp8"},
    "serve 4-bit": {"quantization": "awq-4bit"},
}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One model and method that fits."""

    model: str
    parameters: int
    method: str
    context: int
    batch: int
    settings: str
    peak_bytes: int
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def recommend(
    machine: Machine,
    *,
    task: str = "sft",
    least_context: int = 2048,
    framework: str = "vramwise",
    replayed: int = 0,
) -> list[Recommendation]:
    """Return every catalogue model and method whose tensors fit, the largest models first.

    For each the longest context in powers of two up to the model's own, then the largest batch at
    `least_context`. The first `replayed` rows fit with the allocator's slack too.
    """
    variants = SERVING if task == "serve" else TRAINING
    base: dict[str, Any] = {"task": task, "micro_batch_size": 1}
    base["framework"] = "vllm" if task == "serve" else framework
    recipes = {label: make_recipe(**base, **fields) for label, fields in variants.items()}
    order = list(recipes)
    pairs = [
        (model, label) for model in map(catalogue_model, catalogue_names()) for label in recipes
    ]
    pairs.sort(key=lambda pair: (-pair[0].parameters, order.index(pair[1])))
    found: list[Recommendation] = []
    for model, label in pairs:
        fits = _fits_safely if len(found) < replayed else _tensors_fit
        best = _best(model, machine, label, recipes[label], least_context, fits)
        if best is not None:
            found.append(best)
    return found


def _best(
    model: ModelSpec,
    machine: Machine,
    label: str,
    recipe: Recipe,
    least: int,
    fits: Callable[[Plan], bool],
) -> Recommendation | None:
    try:
        weights = base_weights(model, resolve(model, recipe, machine)).total
    except VramwiseError:
        return None
    if weights > machine.vram_bytes:
        return None

    def reach(field: str, sizes: Iterable[int]) -> tuple[int, Plan] | None:
        """Return the largest size that fits: sizes are tried upwards by tensors, then downwards."""
        made: list[tuple[int, Plan]] = []
        for size in sizes:
            update = {"context": least, field: size}
            result = _try(model, recipe.model_copy(update=update), machine)
            if result is None:
                break
            made.append((size, result))
        return next((pair for pair in reversed(made) if fits(pair[1])), None)

    longest = max(least, model.max_position)
    contexts = (least, *(c for c in CONTEXTS if least < c <= longest))
    reached = reach("context", contexts)
    if reached is None:
        return None
    context, result = reached
    batch = (reach("micro_batch_size", BATCHES) or (1, result))[0]
    r = result.resolved
    settings = f"{r.checkpointing.value} checkpointing, {r.optimizer.value}"
    if not r.trains:
        settings = f"{r.kv_dtype} KV, {r.quantization or r.dtype} weights"
    return Recommendation(
        model.name, model.parameters, label, context, batch, settings,
        result.peak_bytes, "fits" if fits is _fits_safely else "tensors fit",
    )  # fmt: skip


def _tensors_fit(result: Plan) -> bool:
    return result.tensors_fit


def _fits_safely(result: Plan) -> bool:
    return result.verdict == "fits"


def _try(model: ModelSpec, recipe: Recipe, machine: Machine) -> Plan | None:
    try:
        result = plan(model, recipe, machine)
    except VramwiseError:
        return None
    return result if result.tensors_fit else None
