"""Layouts of several GPUs that a run fits on: what is divided over which ranks, and why the others lose.

The global batch stays what it is: ranks that share a sequence have fewer samples of their own, so they
accumulate more micro-batches. Unchanged results come first, then the framework that was asked for, then
the fewest bytes over the slow links (other nodes, host memory), then what is computed again, then the
bytes between a node's GPUs. Candidates are tried in that order, until enough of them fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from planner.answers.changes import Change, apply
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.framework import pick
from planner.run.ranks import rank_runs
from planner.run.recipe import (
    Checkpointing,
    Method,
    ParallelSection,
    Recipe,
    Sharding,
    Task,
)
from planner.run.resolve import resolve
from planner.run.task_model import task_model
from planner.run.tasks import planned_task
from planner.speed.traffic import Traffic, traffic
from planner.terms.standing import standing
from planner.units import format_bytes

FITTING = 4
"""Layouts that fit, of which the first is the answer."""
TRIED = 60
"""Plans at most; what its standing bytes alone refuse is not planned."""
LOSERS = 16
"""Layouts that would be better placed and do not fit, of which to say why."""
LONG_TOKENS = 16384
"""From here on a sequence is worth dividing."""
VERY_LONG_TOKENS = 8 * LONG_TOKENS
"""From here on no layout takes a run that keeps all activations, or all logits."""
OTHERS = ("hf-trainer", "torchtitan", "megatron")
"""Frameworks that divide what the one that was asked for does not."""
AGAIN = (Checkpointing.FULL, Checkpointing.OFFLOAD)


class Key(NamedTuple):
    """The order of layouts; the first field that differs says why one loses."""

    changed: int
    other_framework: int
    slow_bytes: int
    computed_again: int
    node_bytes: int


@dataclass(frozen=True, slots=True)
class Tried:
    """One layout."""

    recipe: Recipe = field(repr=False)
    update: dict[str, Any]
    framework: str
    words: str
    """Degrees and what else was set, for people."""
    flags: str
    key: Key
    traffic: Traffic
    standing_bytes: int
    """Weights, gradients and states of a rank."""
    plan: Plan | None = None
    why: str = ""
    """Why it loses to the first; empty for the first."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        made = self.plan
        planned = (
            {
                "peak_bytes": made.peak_bytes,
                "peak_phase": made.peak_phase,
                "capacity_bytes": made.capacity_bytes,
                "host_peak_bytes": made.host_peak_bytes,
                "verdict": made.verdict,
                "fits": made.fits,
            }
            if made is not None
            else {"verdict": "does not fit", "fits": False}
        )
        return {
            "layout": self.words,
            "framework": self.framework,
            "flags": self.flags,
            "update": self.update,
            "standing_bytes": self.standing_bytes,
            **planned,
            **self.traffic.to_dict(),
            "why": self.why,
        }


def layouts(
    model: ModelSpec, recipe: Recipe, machine: Machine, *, fitting: int = FITTING
) -> list[Tried]:
    """Return the layouts that fit, the best first, and before them why each better-placed one does not."""
    recipe = _undivided(recipe)
    found: list[Tried] = []
    for candidate in sorted(_candidates(model, recipe, machine), key=lambda each: each.key):
        found.append(_planned(model, candidate, machine))
        if sum(_goes(each) for each in found) >= fitting:
            break
        if sum(each.plan is not None for each in found) >= TRIED:
            break
    best = next((each for each in found if _goes(each)), None)
    explained = sorted((_explained(each, best) for each in found), key=lambda each: each.key)
    lost = [each for each in explained if not _goes(each)]
    return [each for each in explained if _goes(each)] + lost[:LOSERS]


def _undivided(recipe: Recipe) -> Recipe:
    """Return the recipe without its own layout, with as many samples in a step as before."""
    inner = recipe.parallel.tensor * recipe.parallel.pipeline * recipe.parallel.context
    update = {
        "sharding": Sharding.NONE,
        "parallel": ParallelSection(),
        "reshard_after_forward": None,
        "optimizer_offload": False,
        "offload": recipe.offload.model_copy(update={"parameters": False}),
        "gradient_accumulation": max(1, recipe.gradient_accumulation // inner),
    }
    return recipe.model_copy(update=update)


def best_layout(model: ModelSpec, recipe: Recipe, machine: Machine) -> Tried | None:
    """Return the first layout that fits, or None."""
    found = layouts(model, recipe, machine, fitting=1)
    return found[0] if found and _goes(found[0]) else None


def laid_out(recipe: Recipe, machine: Machine) -> bool:
    """Say whether a recipe states how several GPUs divide it."""
    several = any(
        getattr(recipe.parallel, name) > 1 for name in ("tensor", "pipeline", "context", "expert")
    )
    serves = recipe.task is Task.SERVE
    return machine.num_gpus == 1 or serves or several or recipe.sharding is not Sharding.NONE


def _goes(tried: Tried) -> bool:
    return tried.plan is not None and tried.plan.fits


def _planned(model: ModelSpec, tried: Tried, machine: Machine) -> Tried:
    if tried.standing_bytes > machine.vram_bytes:
        need = format_bytes(tried.standing_bytes)
        return replace(tried, why=f"weights, gradients and states alone take {need}")
    try:
        made = plan(model, tried.recipe, machine)
    except VramwiseError as error:
        return replace(tried, why=f"refused: {error.message}")
    if made.fits:
        return replace(tried, plan=made)
    if not made.host_fits:
        need = format_bytes(made.host_peak_bytes)
        return replace(tried, plan=made, why=f"host memory: a node would need {need}")
    if made.peak_bytes <= made.capacity_bytes:
        risk = f"{made.risk.p_oom:.0%} risk of running out in {made.peak_phase}"
        return replace(tried, plan=made, why=f"{made.verdict}: {risk}")
    need, room = format_bytes(made.peak_bytes), format_bytes(made.capacity_bytes)
    largest = max(made.phase(made.peak_phase).terms, key=lambda term: term.bytes)
    text = f"{made.peak_phase} needs {need} of {room}, {largest.name} the most of it"
    return replace(tried, plan=made, why=text)


def _explained(tried: Tried, best: Tried | None) -> Tried:
    """Return a layout that fits with the reason why another one is before it."""
    if best is None or tried is best or not _goes(tried):
        return tried
    mine, other = tried.key, best.key
    if mine.other_framework != other.other_framework:
        return replace(tried, why=f"another framework: {tried.framework}")
    if mine.slow_bytes != other.slow_bytes:
        own, first = (format_bytes(size) for size in (mine.slow_bytes, other.slow_bytes))
        link = (
            "other nodes" if tried.traffic.network > best.traffic.network else "the host's memory"
        )
        return replace(tried, why=f"more from {link}: {own} a step, {first} in the first")
    if mine.computed_again != other.computed_again:
        return replace(tried, why="computes the layers again, which the first need not")
    own, first = (format_bytes(size) for size in (mine.node_bytes, other.node_bytes))
    return replace(tried, why=f"more between a node's GPUs: {own} a step, {first} in the first")


def _candidates(model: ModelSpec, recipe: Recipe, machine: Machine) -> Iterator[Tried]:
    """Yield every layout worth a plan, in no order."""
    asked = pick(recipe.framework).family
    seen = set()
    for framework in dict.fromkeys((recipe.framework, *OTHERS)):
        other = pick(framework).family != asked
        if other and (recipe.task is not Task.SFT or recipe.method is not Method.FULL):
            continue
        for update in _updates(model, recipe, machine, framework, offloads=not other):
            made = _one(model, recipe, machine, framework, update, int(other))
            if made is not None and (made.framework, made.words) not in seen:
                seen.add((made.framework, made.words))
                yield made


def _one(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    framework: str,
    update: dict[str, Any],
    other: int,
) -> Tried | None:
    """Return one layout; None for one that its framework refuses."""
    inner = 1
    for name in ("tensor", "pipeline", "context"):
        inner *= update.get(f"parallel.{name}", 1)
    # the step has as many samples as it would have with one on every GPU
    update = {**update, "gradient_accumulation": recipe.gradient_accumulation * inner}
    if framework != recipe.framework:
        update = {"framework": framework, **update}
    try:
        changed = apply(recipe, Change("layout", update, "", 0))
        resolved = resolve(task_model(model, planned_task(changed)), changed, machine)
        shaped = task_model(model, planned_task(changed))
        moved = traffic(shaped, resolved, machine.node_gpus)
        first = rank_runs(shaped, resolved)[0]
        held = standing(first.model, first.resolved).total
    except (VramwiseError, ValueError):
        return None
    again = AGAIN.index(resolved.checkpointing) + 1 if resolved.checkpointing in AGAIN else 0
    kind = f", {resolved.layout.context_kind}" if resolved.layout.context > 1 else ""
    extra = [f"{resolved.layout}{kind}", resolved.sharding.value]
    extra += ["layers stay whole"] if "reshard_after_forward" in update else []
    extra += [f"{update['checkpointing']} checkpointing"] if "checkpointing" in update else []
    extra += ["chunked loss"] if "loss" in update else []
    extra += ["weights on the host"] if update.get("offload.parameters") else []
    extra += ["states on the host"] if update.get("optimizer_offload") else []
    key = Key(0, other, moved.slow, again, moved.node)
    words = ", ".join(extra)
    name = resolved.framework.name
    return Tried(changed, update, name, words, _flags(update), key, moved, held)


def _updates(
    model: ModelSpec, recipe: Recipe, machine: Machine, framework: str, *, offloads: bool
) -> Iterator[dict[str, Any]]:
    """Yield what a framework could set."""
    switches = pick(framework).switches_of(recipe.task.value)
    again: list[dict[str, Any]] = [{}]
    if recipe.checkpointing is None:
        again.append({"checkpointing": "full"})
    if _tokens(recipe) >= LONG_TOKENS and recipe.checkpointing is None and recipe.loss is None:
        again.append({"checkpointing": "full", "loss": "chunked"})
        again.append({"checkpointing": "offload", "loss": "chunked"})
        again = again[2:] if _tokens(recipe) >= VERY_LONG_TOKENS else again
    inner = list(_inner(model, recipe, machine, framework))
    for degrees in inner:
        for computed in again:
            if switches.layers == "megatron":
                yield {"sharding": "megatron", **degrees, **computed}
                continue
            if not degrees:
                yield {"sharding": "ddp", **computed}
            yield {"sharding": "fsdp2", **degrees, **computed}
            nodes = machine.num_gpus // machine.node_gpus
            if nodes > 1 and not degrees:
                yield {"sharding": "fsdp2", "parallel.data_replicate": nodes, **computed}
            if not degrees:
                yield {"sharding": "fsdp2", "reshard_after_forward": False, **computed}
            if not degrees and offloads:
                yield from (
                    {**each, **computed} for each in _offloads(recipe, switches.offloads_by)
                )


def _offloads(recipe: Recipe, by: str) -> Iterator[dict[str, Any]]:
    """Yield what waits in host memory: DeepSpeed's for what is built on the HF Trainer, else its own."""
    if by == "deepspeed":
        yield {"sharding": "zero3", "optimizer_offload": True}
        yield {"sharding": "zero3", "optimizer_offload": True, "offload.parameters": True}
        if recipe.method is not Method.QLORA:
            yield {"sharding": "fsdp2", "optimizer_offload": True, "offload.parameters": True}
    else:
        yield {"sharding": "fsdp2", "optimizer_offload": True}


def _inner(
    model: ModelSpec, recipe: Recipe, machine: Machine, framework: str
) -> Iterator[dict[str, Any]]:
    """Yield degrees of the ranks that work on one sample together; {} for none."""
    yield {}
    switches = pick(framework).switches_of(recipe.task.value)
    gpus, node = machine.num_gpus, machine.node_gpus
    tensors = _powers(node) if switches.tensor_plan != "none" else [1]
    stages = _powers(min(gpus, model.num_layers)) if switches.pipelines else [1]
    contexts = _powers(gpus) if switches.contexts and _tokens(recipe) >= LONG_TOKENS else [1]
    routed = any(layer.mlp.num_experts for layer in model.layers)
    experts = _powers(gpus) if switches.expert_parallel and routed else [1]
    # less in flight and less sent where the heads can be divided; else it is refused, and ring is left
    kinds = [kind for kind in ("ulysses", "ring") if kind in switches.contexts]
    for tensor in tensors:
        for pipeline in stages:
            for context in contexts:
                for expert in experts:
                    product = tensor * pipeline * context
                    if gpus % product or product * expert == 1:
                        continue
                    found = {
                        "parallel.tensor": tensor,
                        "parallel.pipeline": pipeline,
                        "parallel.context": context,
                        "parallel.expert": expert,
                    }
                    found = {name: degree for name, degree in found.items() if degree > 1}
                    if tensor > 1 and switches.tensor_plan == "megatron":
                        found["parallel.sequence"] = True
                    for kind in kinds if context > 1 else [""]:
                        yield {**found, **({"parallel.context_kind": kind} if kind else {})}


def _tokens(recipe: Recipe) -> int:
    return recipe.context or (recipe.prompt_length or 0) + (recipe.completion_length or 0)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


FLAGS = {
    "framework": "--framework",
    "sharding": "--shard",
    "checkpointing": "--checkpointing",
    "loss": "--loss",
    "gradient_accumulation": "--grad-accum",
    "parallel.data_replicate": "--data-replicate",
    "parallel.tensor": "--tensor-parallel",
    "parallel.pipeline": "--pipeline-parallel",
    "parallel.context": "--context-parallel",
    "parallel.context_kind": "--context-kind",
    "parallel.expert": "--expert-parallel",
    "reshard_after_forward": "--reshard-after-forward",
}
SWITCHES = {
    "parallel.sequence": "--sequence-parallel",
    "optimizer_offload": "--optimizer-offload",
    "offload.parameters": "--parameter-offload",
}


def _flags(update: dict[str, Any]) -> str:
    """Return a layout as the command line says it."""
    parts = []
    for name, value in update.items():
        if name in SWITCHES:
            parts.append(SWITCHES[name])
        elif name != "gradient_accumulation" or value > 1:
            parts.append(f"{FLAGS[name]} {str(value).lower()}")
    return " ".join(parts)
