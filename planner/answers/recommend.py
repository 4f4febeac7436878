"""Models and methods that fit a GPU, each with the best settings found."""

from collections.abc import Callable
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
    machine: Machine, *, task: str = "sft", least_context: int = 2048, framework: str = "vramwise"
) -> list[Recommendation]:
    """Return every catalogue model and method that fits with room for the allocator's slack.

    The largest models first; for each the longest context in powers of two up to the model's own,
    then the largest batch at `least_context`.
    """
    variants = SERVING if task == "serve" else TRAINING
    base: dict[str, Any] = {"task": task, "micro_batch_size": 1}
    base["framework"] = "vllm" if task == "serve" else framework
    recipes = {label: make_recipe(**base, **fields) for label, fields in variants.items()}
    order = list(recipes)
    found = []
    for name in catalogue_names():
        model = catalogue_model(name)
        for label, recipe in recipes.items():
            best = _best(model, machine, label, recipe, least_context)
            if best is not None:
                found.append(best)
    found.sort(key=lambda row: (-row.parameters, order.index(row.method)))
    return found


def _best(
    model: ModelSpec, machine: Machine, label: str, recipe: Recipe, least: int
) -> Recommendation | None:
    try:
        weights = base_weights(model, resolve(model, recipe, machine)).total
    except VramwiseError:
        return None
    if weights > machine.vram_bytes:
        return None

    def at(update: dict[str, Any]) -> Plan | None:
        return _try(model, recipe.model_copy(update=update), machine)

    contexts = [least, *(c for c in CONTEXTS if c > least)]
    contexts = [c for c in contexts if c <= max(least, model.max_position)]
    reached = _largest([{"context": count} for count in contexts], at)
    if reached is None:
        return None
    context, result = reached[0]["context"], reached[1]
    batches = [{"context": least, "micro_batch_size": size} for size in (1, *BATCHES)]
    most = _largest(batches, at)
    batch = most[0]["micro_batch_size"] if most else 1
    r = result.resolved
    settings = f"{r.checkpointing.value} checkpointing, {r.optimizer.value}"
    if not r.trains:
        settings = f"{r.kv_dtype} KV, {r.quantization or r.dtype} weights"
    return Recommendation(
        model.name, model.parameters, label, context, batch, settings,
        result.peak_bytes, result.verdict,
    )  # fmt: skip


def _largest(
    updates: list[dict[str, int]], at: Callable[[dict[str, Any]], Plan | None]
) -> tuple[dict[str, int], Plan] | None:
    """Return the last of growing `updates` whose plan fits; only what is returned is replayed."""
    reached: list[tuple[dict[str, int], Plan]] = []
    for update in updates:
        result = at(update)
        if result is None:
            break
        reached.append((update, result))
    while reached and not reached[-1][1].fits:
        reached.pop()
    return reached[-1] if reached else None


def _try(model: ModelSpec, recipe: Recipe, machine: Machine) -> Plan | None:
    try:
        result = plan(model, recipe, machine)
    except VramwiseError:
        return None
    return result if result.has_room else None
