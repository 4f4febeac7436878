"""What to change so that it fits, what each change costs, and the largest that fits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

from planner.answers.changes import Change, apply, changes, to_host
from planner.answers.layouts import layouts
from planner.answers.slower import Slower, slower, with_time
from planner.errors import UsageError, VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import FRAGMENTED, Plan, plan
from planner.run.card_notes import EIGHT_BIT, has_bitsandbytes_optimizers, has_vllm
from planner.run.recipe import MAX_TOKENS, Method, Recipe, Task

__all__ = [
    "Advice",
    "Change",
    "advise",
    "apply",
    "changes",
    "combination",
    "largest",
    "levers",
    "limits",
]
MAX_COMBINATION = 4
MUCH = 4
"""A change that saves this part of what is missing helps much."""
MAX_COUNT = 2**20
FITS, FITS_SAFELY = frozenset({"fits", "tight"}), frozenset({"fits"})
"""Verdicts that will do: tensors fit, or the allocator's slack too."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and what it does to the peak."""

    change: Change
    saved_bytes: int
    plan: Plan
    slower: Slower | None = None
    """Its price in time; None = not known."""

    @property
    def price(self) -> str:
        """Return what it costs, in words and in time."""
        return with_time(self.change.price, self.slower)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "change": self.change.name,
            "saved_bytes": self.saved_bytes,
            "price": self.change.price,
            "slower": round(self.slower.share, 4) if self.slower else None,
            "slower_of": self.slower.of if self.slower else None,
            "changes_objective": self.change.changes_objective,
            "peak_bytes": self.plan.peak_bytes,
            "peak_phase": self.plan.peak_phase,
            "fits": self.plan.fits,
            "verdict": self.plan.verdict,
        }


def levers(model: ModelSpec, recipe: Recipe, machine: Machine, base: Plan) -> list[Advice]:
    """Return every single change that gives room, the most useful first, then the most bytes."""
    found = []
    for change in changes(base.resolved, recipe):
        try:
            changed = plan(model, apply(recipe, change), machine)
        except VramwiseError:
            continue
        saved = base.peak_bytes - changed.peak_bytes
        host_ok = changed.host_fits
        if saved > 0 and host_ok and _possible(change, changed, machine):
            found.append(Advice(change, saved, changed, slower(base.time, changed)))
    found.sort(
        key=lambda advice: (usefulness(advice, base), -advice.saved_bytes, advice.change.rank)
    )
    return found


def usefulness(advice: Advice, base: Plan) -> int:
    """Return how early a change is told: what keeps the result and helps much before what changes it and is enough."""
    enough, keeps = advice.plan.has_room, not advice.change.changes_objective
    missing = max(0, base.peak_bytes - base.trusted_bytes(FRAGMENTED))
    much = advice.saved_bytes * MUCH >= missing
    if keeps and (enough or much):
        return 0 if enough else 1
    return 2 if enough else 3


def _possible(change: Change, changed: Plan, machine: Machine) -> bool:
    """Say whether a card has what a change asks for."""
    r = changed.resolved
    eight_bit = "optimizer" in change.update and r.optimizer in EIGHT_BIT
    unified = machine.gpu is not None and machine.gpu.unified
    if unified and to_host(change):
        return False
    if eight_bit and not has_bitsandbytes_optimizers(machine.gpu):
        return False
    return not (
        any(key.startswith("engine.kind") for key in change.update) and not has_vllm(machine.gpu)
    )


def combination(
    model: ModelSpec, recipe: Recipe, machine: Machine, singles: list[Advice]
) -> tuple[list[Change], Plan] | None:
    """Return the shortest combination that fits, the least costly among equals; None = none does."""
    keep = sorted((advice.change for advice in singles), key=lambda change: change.rank)
    for length in range(1, MAX_COMBINATION + 1):
        best: tuple[int, int, list[Change], Plan] | None = None
        for group in combinations(keep, length):
            fields = [key for change in group for key in change.update]
            if len(set(fields)) < len(fields):
                continue
            changed = recipe
            try:
                for change in group:
                    changed = apply(changed, change)
                result = plan(model, changed, machine)
            except VramwiseError:
                continue
            price = sum(change.rank + 10 * change.changes_objective for change in group)
            if best is not None and (price, result.peak_bytes) >= best[:2]:
                continue
            if result.tensors_fit and result.fits:
                best = (price, result.peak_bytes, list(group), result)
        if best is not None:
            return best[2], best[3]
    return None


def largest(verdict: Callable[[int], str], *, limit: int, accepted: frozenset[str]) -> int:
    """Return the largest n whose verdict is accepted, exact to one; 0 = not even 1."""

    def fits(count: int) -> bool:
        return verdict(count) in accepted

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _verdict(model: ModelSpec, machine: Machine, make: Callable[[int], Recipe], count: int) -> str:
    """Return the verdict; a replay is made only where fragmentation can decide it."""
    try:
        result = plan(model, make(count), machine)
    except UsageError:
        return "does not fit"
    if not result.tensors_fit:
        return "does not fit"
    return "fits" if result.has_room else result.verdict


def limits(model: ModelSpec, recipe: Recipe, machine: Machine, base: Plan) -> dict[str, int]:
    """Return the largest context, batch, generations and rank, each with all else as it is."""
    r = base.resolved

    def context(n: int) -> Recipe:
        # the prompt keeps its length while there is room for one token of completion
        prompt = min(r.prompt_tokens, n - 1) or None
        return recipe.model_copy(
            update={"context": n, "prompt_length": prompt, "completion_length": None}
        )

    makers: dict[str, tuple[Callable[[int], Recipe], int]] = {"context": (context, MAX_TOKENS)}
    if (
        r.trains
    ):  # a server's pool holds what it holds: how many requests that are is its own answer
        makers["micro_batch_size"] = (
            lambda n: recipe.model_copy(update={"micro_batch_size": n}),
            MAX_COUNT,
        )
    if r.task is Task.GRPO:
        makers["num_generations"] = (
            lambda n: recipe.model_copy(update={"num_generations": n}),
            MAX_COUNT,
        )
    if r.trains and r.method is not Method.FULL and not r.started:
        makers["lora_rank"] = (
            lambda n: recipe.model_copy(
                update={"lora": recipe.lora.model_copy(update={"rank": n})}
            ),
            2**14,
        )
    found = {}
    for name, (make, limit) in makers.items():
        verdict = cache(partial(_verdict, model, machine, make))  # both searches ask the same
        found[name] = largest(verdict, limit=limit, accepted=FITS)
        found[f"{name}_safe"] = largest(verdict, limit=found[name], accepted=FITS_SAFELY)
    return found


def advise(model: ModelSpec, recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """Return the JSON document of `vramwise advise`."""
    base = plan(model, recipe, machine)
    singles = levers(model, recipe, machine, base)
    document: dict[str, Any] = {
        "schema_version": 1,
        "model": model.name,
        "verdict": base.verdict,
        "fits": base.fits,
        "peak_bytes": base.peak_bytes,
        "capacity_bytes": base.capacity_bytes,
        "changes": [advice.to_dict() for advice in singles],
        "combination": None,
        "largest": limits(model, recipe, machine, base),
    }
    if base.resolved.trains and machine.num_gpus > 1:
        document["layouts"] = [tried.to_dict() for tried in layouts(model, recipe, machine)]
    if not base.fits:
        found = combination(model, recipe, machine, singles)
        if found is not None:
            group, result = found
            document["combination"] = {
                "changes": [change.name for change in group],
                "changes_objective": any(change.changes_objective for change in group),
                "peak_bytes": result.peak_bytes,
                "verdict": result.verdict,
            }
    return document
