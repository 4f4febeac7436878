"""Models and methods that fit a GPU, best first, each with the settings that take it furthest.

A row never pairs numbers that do not hold together: `context`, `batch`, `settings` and `peak_bytes` are of
one plan, and so are those of `at_least`. Both are replayed on the allocator before they are shown.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from typing import Any, NamedTuple

from planner.answers.longest import USUAL, at, contexts, longest, proved
from planner.answers.ranking import Worth, price_penalty, worth
from planner.answers.slower import Lever, lever_times
from planner.answers.spent import Spending, Spent, spent
from planner.answers.unchanged import Settled, flags, settle, strongest
from planner.errors import UsageError, VramwiseError
from planner.machines.machine import Machine
from planner.models.catalogue import catalogue_model, catalogue_names
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.framework import pick, with_task
from planner.run.recipe import Loss, ParallelSection, Recipe, Sharding, Task
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
from planner.run.runfile import make_recipe
from planner.run.tasks import TASKS
from planner.terms.counts import base_weights

OWN, OTHER = "vramwise", "hf-trainer"
RUNNERS = (OWN, "trl", OTHER, "vllm")
"""Whose runs are shown when nobody is named: the first that has the task."""
PLAIN = "qwen3-0.6b"
"""A model of layers that every framework has."""
BATCHES = (2, 4, 8, 16, 32, 64)
SCORE_DIGITS = 3
USUAL_SPARE, GENERATING, RECURRENT = 1.15, 1.3, 1.4
"""Room over what is alive at which a search begins: most runs' fragments need less, and each row is replayed."""
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
METHODS = {**TRAINING, **SERVING}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run that fits: numbers of one plan."""

    context: int
    batch: int
    """Sequences of a micro-batch; while serving, requests of that length at once."""
    settings: str
    """What was chosen, for people."""
    prices: tuple[str, ...]
    """What the settings that were changed to make it fit cost."""
    peak_bytes: int
    flags: str
    """The same for `vramwise plan MODEL`."""
    recipe: dict[str, Any] = field(repr=False)
    """The same as a run file's recipe."""
    verdict: str = "fits"
    layout: str = ""
    """How several GPUs divide the run; empty on one."""
    levers: tuple[Lever, ...] = ()
    """The same settings with their prices in time."""
    spent: Spent | None = None
    """Time and money of a run, or of a million tokens; None where the card's speed is not known."""


@dataclass(frozen=True, slots=True)
class Recommendation(Setting):
    """One model and method that fits, as far as it goes: settings for the longest context."""

    model: str = ""
    parameters: int = 0
    method: str = ""
    released: str = ""
    score: float = 0.0
    at_least: Setting | None = None
    """The least slow settings, and the largest batch with them, at the context that was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        first = ("model", "parameters", "method", "context", "batch", "settings")
        document = asdict(self)
        for part, row in ((document, self), (document["at_least"], self.at_least)):
            if row is not None and row.spent is not None:
                part["spent"] = row.spent.rounded()
        return {name: document[name] for name in first} | document


def recommend(
    machine: Machine,
    *,
    task: str = "sft",
    least_context: int = 2048,
    framework: str | None = None,
    limit: int | None = None,
    wanted: Callable[[str, ModelSpec], bool] | None = None,
    only: ModelSpec | None = None,
    spending: Spending = spent,
) -> list[Recommendation]:
    """Return the best `limit` (None: all) models and methods that fit, the best first: see ranking.RULE.

    `framework`: None for the first of RUNNERS; UsageError for one that does not have the task.
    `wanted`: of which catalogue models, by name and size; `only`: of this model alone. Pairs are planned in the order of what they could
    be worth, so that those behind the last row that is asked for are never planned.
    """
    found: list[Recommendation] = []
    framework = runner(task, framework)
    models = {
        name: model
        for name in (catalogue_names() if only is None else [only.name])
        if (model := only or catalogue_model(name)) and (wanted is None or wanted(name, model))
    }
    for row in _ranked(models, machine, task, least_context, framework, spending):
        found.append(row)
        if len(found) == limit:
            break
    return found


def _ranked(
    models: dict[str, ModelSpec], machine: Machine, task: str, least: int, framework: str,
    spending: Spending,
) -> Iterator[Recommendation]:  # fmt: skip
    """Yield rows by falling score.

    A pair waits at what it is worth at best: first by its model alone, then, once it is planned, less what the
    price of its cheapest batch takes off; only those that come out first are replayed. (Settings that turn out
    to have no room in the replay give way to slower ones, which are priced then.)
    """
    queue: list[tuple[float, int, int, int, _Pair | _Begun | Recommendation]] = []
    ticket = count()
    methods = list(variants(task))
    places = {name: place for place, name in enumerate(models)}

    def wait(score: float, pair: _Pair, waiting: "_Pair | _Begun | Recommendation") -> None:
        order = places[pair.name], methods.index(pair.method), next(ticket)
        heapq.heappush(queue, (-round(score, SCORE_DIGITS), *order, waiting))

    for name, model in models.items():
        for label in methods:
            pair = _Pair(name, model, label, worth(name, model))
            wait(pair.best(least), pair, pair)
    begun: dict[tuple[object, ...], _Start | None] = {}
    alike: dict[tuple[object, ...], Recommendation | None] = {}
    while queue:
        *_, waiting = heapq.heappop(queue)
        if isinstance(waiting, Recommendation):
            yield waiting
            continue
        pair = waiting.pair if isinstance(waiting, _Begun) else waiting
        key = (_shape(pair.model), pair.method)
        if isinstance(waiting, _Pair):
            if key not in begun:
                begun[key] = _start(pair, machine, task, framework, least)
            start = begun[key]
            if start is not None:
                wait(pair.best(least) - start.penalty(spending), pair, _Begun(pair, start))
            continue
        if key not in alike:
            alike[key] = furthest(pair, waiting.start, machine, task, least, spending)
        row = _named(alike[key], pair)
        if row is not None:
            wait(row.score, pair, row)


def _shape(model: ModelSpec) -> tuple[object, ...]:
    """Return all of a model but its name: fine-tunes and later versions are often the same shapes."""
    named = ("name", "hub_id", "source")
    values = ((f.name, getattr(model, f.name)) for f in fields(model) if f.name not in named)
    return tuple(repr(value) if isinstance(value, dict) else value for _, value in values)


def _named(row: Recommendation | None, pair: "_Pair") -> Recommendation | None:
    if row is None:
        return None
    near = row.at_least or row
    score = round(pair.worth.at(row.context) - price_penalty(near.spent), SCORE_DIGITS)
    return replace(row, model=pair.name, released=pair.worth.released, score=score)


class _Pair(NamedTuple):
    """A model and a method, not planned yet."""

    name: str
    model: ModelSpec
    method: str
    worth: Worth

    def best(self, least: int) -> float:
        """Return the score at the longest context there may be, whatever it costs."""
        return self.worth.at(max(least, self.model.longest or least))


class _Start(NamedTuple):
    """A pair at the context asked for, planned and not replayed."""

    recipes: list[Recipe]
    base: Settled
    sizes: list[Settled]
    """The comfortable settings at each micro-batch there is room for, the smallest first; none: it is narrow."""

    def penalty(self, spending: Spending) -> float:
        """Return the least that the price takes off a score at any of these sizes."""
        least = None
        for size in reversed(self.sizes):  # the largest is the cheapest as a rule
            found = price_penalty(spending(size.plan))
            least = found if least is None else min(least, found)
            if not least:
                break
        return least or 0.0


class _Begun(NamedTuple):
    """A pair that is planned and waits for its replays."""

    pair: _Pair
    start: _Start


def runner(task: str, framework: str | None) -> str:
    """Return the framework of a task's rows; raises UsageError for one that does not have the task."""
    wanted = Task(task)
    if framework is None:
        return next(name for name in RUNNERS if wanted in pick(name).tasks)
    if not pick(framework).has(wanted):
        raise UsageError(
            f"framework: {framework} has no {task} of its own",
            hint=f"{', '.join(with_task(wanted))} have",
        )
    return framework


def refusals(machine: Machine, task: str, framework: str | None) -> list[str]:
    """Return why each method that a framework does not plan, of any model, has no row."""
    model, said = catalogue_model(PLAIN), []
    framework = runner(task, framework)
    for label in variants(task):
        recipes = starts(task, label, framework, machine)
        reasons = []
        for recipe in recipes:
            try:
                resolve(model, recipe, machine)
            except VramwiseError as error:
                reasons.append(error.message)
        if len(reasons) == len(recipes):
            said += reasons[:1]
    return said


def variants(task: str) -> dict[str, dict[str, Any]]:
    """Return the methods of a task: a label, and the fields of the recipe."""
    return SERVING if task == Task.SERVE else TRAINING


def starts(task: str, label: str, framework: str, machine: Machine) -> list[Recipe]:
    """Return the quickest recipes of a method: one for each layout of the GPUs, the quickest first."""
    fields: dict[str, Any] = {"task": task, "micro_batch_size": 1, **METHODS[label]}
    fields["framework"] = framework
    if machine.gpu is not None and not machine.gpu.bf16_native:
        fields["dtype"] = "fp16"
    if task == Task.SERVE:
        return [
            make_recipe(**fields, engine={"tensor_parallel": ranks, "data_parallel": copies})
            for ranks, copies in _serving_layouts(machine)
        ]
    base = make_recipe(**fields, checkpointing="none")
    layouts = LAYOUTS if machine.num_gpus > 1 else ALONE
    found = [divided for layout in layouts if (divided := layout.of(base, machine)) is not None]
    if machine.num_gpus > 1 and label == "qlora" and framework == OWN:
        # our trainer packs the whole base on every GPU before it is divided; others load it in parts
        other = {"framework": OTHER, "double_quant": True, "loss": Loss.CHUNKED}
        whole = base.model_copy(update={"sharding": Sharding.FSDP2, **other})
        found.append(whole)
    return found


def _serving_layouts(machine: Machine) -> Iterator[tuple[int, int]]:
    """Yield GPUs that share a model, and copies of it; only what leaves no GPU idle."""
    ranks = 1
    while ranks <= machine.node_gpus:
        if machine.num_gpus % ranks == 0:
            yield ranks, machine.num_gpus // ranks
        ranks *= 2


class _Layout(NamedTuple):
    """One way to divide a training run."""

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


def quickest(
    model: ModelSpec, recipes: Sequence[Recipe], machine: Machine, tokens: int, fragmented: float
) -> Settled | None:
    """Return the first of `recipes` that goes at this context, slowed down no more than it needs."""
    tried = (settle(model, at(recipe, tokens), machine, fragmented) for recipe in recipes)
    return next((found for found in tried if found is not None), None)


def _start(pair: _Pair, machine: Machine, task: str, framework: str, least: int) -> _Start | None:
    """Return the quickest settings of a model and method at the context asked for; None where there are none."""
    model = pair.model
    if model.longest and least > model.longest:
        return None
    recipes = [
        each
        for each in starts(task, pair.method, framework, machine)
        if _weights_fit(model, each, machine)
    ]
    near = comfortable(model, recipes, machine, least, task)
    base = near or quickest(model, recipes, machine, least, USUAL)
    if base is None:
        return None
    sizes = _batches(model, near, machine, spare(model, task)) if near is not None else []
    return _Start(recipes, base, sizes)


def furthest(
    pair: _Pair, start: _Start, machine: Machine, task: str, least: int, spending: Spending
) -> Recommendation | None:
    """Return the row of a model and method: its longest context and, beside it, the context asked for."""
    model, base, recipes = pair.model, start.base, start.recipes
    lengths = contexts(least, model.longest or 1 << 20)
    full = strongest(model, base, recipes[-1], machine)

    end = longest(model, full, machine, lengths, USUAL)
    if end is None:  # a larger share of the card for vLLM may leave too little for its graphs
        full = base.recipe
        end = longest(model, full, machine, lengths, USUAL)

    def find(tokens: int, fragmented: float) -> Settled:
        # what is slowed down at the least context is so at a longer one
        same = settle(model, at(base.recipe, tokens), machine, fragmented, base.changes)
        other = same or quickest(model, recipes[1:], machine, tokens, fragmented)
        return other or Settled(plan(model, at(full, tokens), machine))

    far = None if end is None else proved(model, machine, lengths, end, base.plan.peak_bytes, find)
    near = _largest_that_fits(start.sizes)
    if near is None and far is not None:  # the same settings hold a shorter context
        shorter = far._replace(plan=plan(model, at(far.recipe, least), machine))
        near = _largest_that_fits(_batches(model, shorter, machine, spare(model, task))) or far
    far = far or near
    if far is None or near is None:
        return None
    longest_one = setting(far, spending)
    return Recommendation(
        **{each.name: getattr(longest_one, each.name) for each in fields(Setting)},
        parameters=model.parameters,
        method=pair.method,
        at_least=setting(near, spending),
    )


def spare(model: ModelSpec, task: str) -> float:
    """Return room for fragments over what is alive, by what the model's steps and the task leave behind."""
    if any(mixer.state_shapes for layer in model.layers for mixer in layer.mixers):
        return RECURRENT
    return GENERATING if TASKS[Task(task)].generates else USUAL_SPARE


def comfortable(
    model: ModelSpec, recipes: Sequence[Recipe], machine: Machine, tokens: int, task: str
) -> Settled | None:
    """Return the quickest settings with room for the fragments that such runs have."""
    return quickest(model, recipes, machine, tokens, spare(model, task))


def _weights_fit(model: ModelSpec, recipe: Recipe, machine: Machine) -> bool:
    """Say whether the weights alone leave any room; what a recipe's framework refuses does not."""
    try:
        resolved = resolve(model, recipe, machine)
        ranks = resolved.placement.weight_shards if resolved.trains else resolved.tensor_parallel
        return base_weights(model, resolved).total // ranks < machine.vram_bytes
    except VramwiseError:
        return False


def _batches(
    model: ModelSpec, found: Settled, machine: Machine, fragmented: float
) -> list[Settled]:
    """Return the same settings at every micro-batch that has room, the smallest first; serving has its own."""
    sizes = [found]
    room = found.plan.trusted_bytes(fragmented)
    grows = 0
    for size in BATCHES if found.plan.resolved.trains else ():
        last = sizes[-1].plan  # the first pair of plans says what a sequence takes
        if last.peak_bytes + (size - last.resolved.batch) * grows > room:
            break
        try:
            larger = plan(
                model, found.recipe.model_copy(update={"micro_batch_size": size}), machine
            )
        except VramwiseError:
            break
        if not larger.has_room_for(fragmented):
            break
        more = larger.resolved.batch - last.resolved.batch
        if more > 0:  # some frameworks raise a small batch by themselves
            grows = (larger.peak_bytes - last.peak_bytes) // more
        sizes.append(found._replace(plan=larger))
    return sizes


def _largest_that_fits(sizes: list[Settled]) -> Settled | None:
    """Return the largest micro-batch that fits when it is replayed."""
    return next((each for each in reversed(sizes) if each.plan.fits), None)


def setting(found: Settled, spending: Spending = spent) -> Setting:
    """Return a run as its row says it."""
    made, r = found.plan, found.plan.resolved
    return Setting(
        context=r.seq_tokens,
        batch=r.batch if r.trains else _requests(made),
        settings=_said(made),
        prices=tuple(dict.fromkeys(change.price for change in found.changes)),
        peak_bytes=made.peak_bytes,
        flags=flags(found.recipe, {}),
        recipe=found.recipe.model_dump(mode="json", exclude_defaults=True),
        layout=_layout(r),
        levers=lever_times(made, found.changes),
        spent=spending(made),
    )


def _requests(made: Plan) -> int:
    """Return how many requests of the planned length vLLM runs at once."""
    if made.serving is None or made.serving.pool is None:
        return 1
    return max(1, min(int(made.serving.max_concurrency), made.resolved.max_num_seqs))


def _said(made: Plan) -> str:
    r, asked = made.resolved, made.asked
    if not r.trains:
        parts = [f"{r.kv_dtype} KV", f"{r.quantization or r.dtype} weights"]
        if asked.engine.gpu_memory_utilization:
            parts.append(f"{r.utilization:.0%} of the card")
        return ", ".join(parts)
    kept = {"none": "no checkpointing", "full": "full checkpointing"}
    parts = [kept.get(r.checkpointing.value, f"{r.checkpointing.value} checkpointing")]
    parts.append(r.optimizer.value + (" on the host" if r.optimizer_offload else ""))
    if asked.engine.max_num_seqs:
        parts.append(f"{r.max_num_seqs} generated at once")
    if not (made.machine.gpu is None or made.machine.gpu.bf16_native):
        parts.append(r.dtype)
    return ", ".join(parts)


def _layout(r: Resolved) -> str:
    if r.gpus == 1:
        return ""
    if r.trains:
        by = f", by {r.framework.family}" if r.framework.family != OWN else ""
        return f"{r.layout}, {r.sharding.value}{by}"
    return f"tensor {r.tensor_parallel} x {r.data_parallel} engine(s)"
