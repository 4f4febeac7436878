"""Models and methods that fit a GPU, each with the best settings found."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.catalogue import catalogue_model, catalogue_names
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import ParallelSection, Recipe, Sharding
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
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
    layout: str = ""
    """How several GPUs divide the run; empty on one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def recommend(
    machine: Machine,
    *,
    task: str = "sft",
    least_context: int = 2048,
    framework: str = "vramwise",
    replayed: int = 40,
) -> list[Recommendation]:
    """Return every catalogue model and method that fits, the largest models first.

    On several GPUs a run is divided by the first of LAYOUTS that fits.

    For each the longest context in powers of two up to the model's own, then the largest batch at
    `least_context`. The first `replayed` rows are replayed on the allocator; the others leave the
    room that the most fragmented of the replays needed.
    """
    variants = SERVING if task == "serve" else TRAINING
    spread = LAYOUTS if task != "serve" and machine.num_gpus > 1 else ALONE
    base: dict[str, Any] = {"task": task, "micro_batch_size": 1}
    base["framework"] = "vllm" if task == "serve" else framework
    recipes = {label: make_recipe(**base, **fields) for label, fields in variants.items()}
    order = list(recipes)
    found = []
    for name in catalogue_names():
        model = catalogue_model(name)
        for label, recipe in recipes.items():
            for layout in spread:
                divided = layout.of(recipe, machine)
                best = divided and _best(model, machine, label, divided, least_context)
                if best:
                    found.append(best)
                    break
    found.sort(key=lambda row: (-row.parameters, order.index(row.method)))
    proven = (row.proven() if index < replayed else row for index, row in enumerate(found))
    return [row.said() for row in proven if row is not None]


class _Layout(NamedTuple):
    """One way to divide a run."""

    sharding: Sharding
    per_node: bool = False
    """Shards inside a node, replicas of it."""

    def of(self, recipe: Recipe, machine: Machine) -> Recipe | None:
        """Return the recipe so divided; None where there is one node only."""
        nodes = machine.num_gpus // machine.node_gpus
        if self.per_node and nodes == 1:
            return None
        copies = ParallelSection(data_replicate=nodes) if self.per_node else ParallelSection()
        return recipe.model_copy(update={"sharding": self.sharding, "parallel": copies})


ALONE = (_Layout(Sharding.NONE),)
LAYOUTS = (_Layout(Sharding.DDP), _Layout(Sharding.FSDP2, per_node=True), _Layout(Sharding.FSDP2))
"""Of several GPUs, the fewest bytes over slow links first; `advise` tries more."""


class _Candidate(NamedTuple):
    """What fits of one model and method: its plans at the longest context and the largest batch."""

    model: ModelSpec
    method: str
    context: Plan
    batch: Plan | None
    contexts: list[Recipe]
    """Those below `context`, in order."""
    batches: list[Recipe]
    """Those below `batch`, in order."""

    @property
    def parameters(self) -> int:
        """Size of the model."""
        return self.model.parameters

    def proven(self) -> "_Candidate | None":
        """Return it without what a replay on the allocator refuses; None when nothing is left."""
        context = _fitting(self.context, self.contexts)
        if context is None:
            return None
        return self._replace(context=context, batch=_fitting(self.batch, self.batches))

    def said(self) -> Recommendation:
        """Return the row."""
        r = self.context.resolved
        settings = f"{r.checkpointing.value} checkpointing, {r.optimizer.value}"
        if not r.trains:
            settings = f"{r.kv_dtype} KV, {r.quantization or r.dtype} weights"
        batch = self.batch.resolved.sequences if self.batch else 1
        return Recommendation(
            self.model.name, self.parameters, self.method, r.seq_tokens, batch, settings,
            self.context.peak_bytes, "fits", _said(r) if r.layout.gpus > 1 else "",
        )  # fmt: skip


def _said(r: Resolved) -> str:
    return f"{r.layout}, {r.sharding.value}"


def _best(
    model: ModelSpec, machine: Machine, label: str, recipe: Recipe, least: int
) -> _Candidate | None:
    try:
        resolved = resolve(model, recipe, machine)
        weights = base_weights(model, resolved).total // resolved.placement.weight_shards
    except VramwiseError:
        return None
    if weights > machine.vram_bytes:
        return None
    longest = max(least, model.max_position)
    contexts = [
        recipe.model_copy(update={"context": tokens})
        for tokens in (least, *(c for c in CONTEXTS if least < c <= longest))
    ]
    context, below = _largest(model, contexts, machine)
    if context is None:
        return None
    batches = [
        recipe.model_copy(update={"context": least, "micro_batch_size": size})
        for size in (1, *BATCHES)
    ]
    batch, smaller = _largest(model, batches, machine)
    return _Candidate(model, label, context, batch, below, smaller)


def _largest(
    model: ModelSpec, recipes: list[Recipe], machine: Machine
) -> tuple[Plan | None, list[Recipe]]:
    """Return the plan of the last of growing recipes that has room, and the recipes before it."""
    best, low, high = None, 0, len(recipes)
    middle = 0  # most often the least decides
    while low < high:
        planned = _try(model, recipes[middle], machine)
        if planned is None:
            high = middle
        else:
            best, low = planned, middle + 1
        middle = (low + high) // 2
    return best, recipes[: max(0, low - 1)]


def _fitting(best: Plan | None, below: list[Recipe]) -> Plan | None:
    """Return the largest plan that fits when it is replayed."""
    below = list(below)
    while best is not None and not best.fits:
        best = plan(best.spec, below.pop(), best.machine) if below else None
    return best


def _try(model: ModelSpec, recipe: Recipe, machine: Machine) -> Plan | None:
    try:
        result = plan(model, recipe, machine)
    except VramwiseError:
        return None
    return result if result.has_room else None
