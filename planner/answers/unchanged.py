"""Settings that leave the result as it is: which of them a run needs so that it fits, the least slow first."""

from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from planner.answers.changes import Change, apply, changes, to_host
from planner.answers.layouts import FLAGS, SWITCHES
from planner.answers.serving_changes import MOST_UTILIZATION
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import FRAGMENTED, Plan, plan
from planner.run.recipe import VLLM, Recipe, Task
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
from planner.terms.kv_cache import rollout_sequences

WAVES = "engine.max_num_seqs"
ALL = frozenset({"rollout", "score", "forward", "loss", "backward", "step"})
TRAINING = frozenset({"forward", "loss", "backward"})
HELPS: dict[str, frozenset[str]] = {
    "loss": frozenset({"score", "loss", "backward"}),
    "attention": TRAINING | {"score"},
    "checkpointing": TRAINING,
    "tiled_mlp": TRAINING | {"score"},
    "engine.sleep_level": ALL - {"rollout"},
    "reference": ALL,
    "optimizer_offload": ALL,
}
"""Fields whose changes keep the result, and the phases that become smaller."""
MORE_FLAGS = {
    "micro_batch_size": "--batch-size",
    "gradient_accumulation": "--grad-accum",
    "context": "--context",
    "method": "--method",
    "task": "--task",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "attention": "--attention",
    "reference": "--reference",
    "engine.kind": "--engine",
    "engine.sleep_level": "--sleep-level",
    "engine.gpu_memory_utilization": "--gpu-memory-utilization",
    "engine.tensor_parallel": "--tensor-parallel",
    "engine.data_parallel": "--data-replicate",
    WAVES: "--max-num-seqs",
}
NAMES = {**FLAGS, **MORE_FLAGS}
"""Fields and their flags."""
MORE_SWITCHES = {"tiled_mlp": "--tiled-mlp", "double_quant": "--double-quant"}


class Settled(NamedTuple):
    """A run that has room, and what was changed for it."""

    plan: Plan
    changes: tuple[Change, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """As it was planned."""
        return self.plan.asked


def settle(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    fragmented: float = FRAGMENTED,
    before: tuple[Change, ...] = (),
) -> Settled | None:
    """Return the run with as few slowing settings as it has room with; None when none is left to make.

    `fragmented`: room for what the allocator cannot use, over what is alive. `before`: changes it has already.
    """
    trail = [(recipe, before)]
    offered: set[str] = set()
    while True:
        asked, made = trail[-1]
        try:
            found = plan(model, asked, machine)
        except VramwiseError:
            found = None
        if found is not None and found.has_room_for(fragmented):
            return Settled(found, made)
        if found is None or not found.host_fits:  # the last change is not one that helps here
            trail.pop()
            if not trail:
                return None
            continue
        step = next(_helpful(found, asked, machine, fragmented, offered), None)
        if step is None:
            return None
        offered.add(step.name)  # once: what a machine sets aside would be offered for ever
        kept = tuple(each for each in made if not set(each.update) & set(step.update))
        trail.append((apply(asked, step), (*kept, step)))


def strongest(model: ModelSpec, start: Settled, divided: Recipe, machine: Machine) -> Recipe:
    """Return the recipe with every setting that saves memory and keeps the result, its GPUs as in `divided`."""
    division = ("sharding", "parallel") if start.plan.resolved.trains else ("engine",)
    recipe = start.recipe.model_copy(update={name: getattr(divided, name) for name in division})
    for change in _all_changes(start.plan.resolved, recipe, machine, 1):
        tried = apply(recipe, change)
        try:
            resolve(model, tried, machine)
        except VramwiseError:
            continue
        recipe = tried
    return recipe


def _helpful(
    found: Plan, recipe: Recipe, machine: Machine, fragmented: float, offered: Set[str]
) -> Iterator[Change]:
    """Yield changes of what is too large, the least slow first."""
    room = found.trusted_bytes(fragmented)
    over = {phase.name for phase in found.phases if phase.total_bytes > room}
    options = list(_all_changes(found.resolved, recipe, machine, _wave(found, room)))
    for change in sorted(options, key=lambda each: each.rank):
        phases = _phases(change)
        if change.name not in offered and (not over or over & phases):
            yield change


def _phases(change: Change) -> frozenset[str]:
    if change.update.keys() & {WAVES, "engine.gpu_memory_utilization"}:
        return frozenset({"rollout"})
    return frozenset().union(*(HELPS[key] for key in change.update))


def _wave(found: Plan, room: int) -> int:
    """Return how many sequences can be generated at once, by what one of them takes."""
    sequences = rollout_sequences(found.resolved)
    phase = next((each for each in found.phases if each.name == "rollout"), None)
    cache = sum(t.bytes for t in phase.terms if t.name == "kv_cache") if phase else 0
    if phase is None or sequences <= 1 or not cache:
        return 1
    over = phase.total_bytes - room
    return max(1, sequences - max(1, -(-over * sequences // cache)))


def _all_changes(r: Resolved, recipe: Recipe, machine: Machine, wave: int) -> Iterator[Change]:
    unified = machine.gpu is not None and machine.gpu.unified
    for change in changes(r, recipe):
        if change.changes_objective or not set(change.update) <= set(HELPS):
            continue
        if not (unified and to_host(change)):
            yield change
    if r.task is Task.GRPO and rollout_sequences(r) > 1 and not r.switches.generates_whole_batch:
        price = "completions are generated in waves: slower"
        yield Change(f"{WAVES}={wave}", {WAVES: wave}, price, 2)
    if r.task is Task.SERVE and r.engine in VLLM and 0 < r.utilization < MOST_UTILIZATION:
        name = "engine.gpu_memory_utilization"
        price = "little is left on the card for anything else"
        yield Change(f"{name}={MOST_UTILIZATION}", {name: MOST_UTILIZATION}, price, 1)


def flags(recipe: Recipe, base: dict[str, Any]) -> str:
    """Return what a recipe sets beside `base`, as the command line says it."""
    parts = []
    switches = {**SWITCHES, **MORE_SWITCHES}
    for name, value in flat(recipe).items():
        if base.get(name) == value:
            continue
        if name in switches:
            parts.append(switches[name])
        elif name in NAMES:
            parts.append(f"{NAMES[name]} {str(value).lower()}")
    return " ".join(parts)


def flat(recipe: Recipe, *, defaults: bool = False) -> dict[str, Any]:
    """Return a recipe's choices by dotted name; with `defaults` what it has by itself, too."""
    found: dict[str, Any] = {}
    for name, value in recipe.model_dump(mode="json", exclude_defaults=not defaults).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found
