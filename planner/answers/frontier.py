"""Memory, hours and dollars of one run over cards, counts of them, layouts and settings: what nothing beats.

The run stays what it is: every setting that is tried leaves the result unchanged, and a step trains as many
samples as the recipe says, however many GPUs share them. Speeds are the likely ones, dollars the likely hours at
the middle (geometric) of the listed prices.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from planner.answers.changes import Change, apply
from planner.answers.layouts import SWITCHES
from planner.answers.spent import Spending, Spent, priced_cards, spent
from planner.answers.unchanged import NAMES, flags, flat
from planner.errors import UsageError, VramwiseError
from planner.machines.machine import GpuSpec, Machine, gpu_catalogue, make_machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import EngineKind, ParallelSection, Recipe, Sharding, Task
from planner.run.tasks import TASKS
from planner.speed.budget import DOLLARS, HOURS, MEMORY, Budget
from planner.speed.cards import card_speed
from planner.speed.work import micro_batches
from planner.units import GiB, format_bytes

COUNTS = (1, 2, 4, 8)
"""GPUs that are tried where nobody says how many."""
BATCHES = (1, 2, 4, 8, 16, 32)
KEPT = ("none", "full", "offload")
"""Checkpointing, the quickest first."""
WAVES = (1, 4, 16)
"""Parts in which completions are generated, more of them where nothing fits with fewer."""
RULE = "nothing else that was tried takes less memory, fewer hours and fewer dollars at once"


@dataclass(frozen=True, slots=True)
class Point:
    """One way to do the run."""

    gpu: str
    gpus: int
    method: str
    layout: str
    settings: str
    peak_bytes: int
    """Of the fullest GPU."""
    capacity_bytes: int
    vram_bytes: int
    """Of a card, as torch sees it: what a limit on memory is about."""
    verdict: str
    """fits, proved by a replay."""
    spent: Spent
    flags: str
    """The same for `vramwise plan`."""
    recipe: dict[str, Any] = field(repr=False)
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """Until it is proved."""

    @property
    def values(self) -> dict[str, float | None]:
        """Return what is limited by a budget."""
        return {
            MEMORY: float(self.peak_bytes),
            HOURS: self.spent.hours,
            DOLLARS: self.spent.usd_middle,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in HIDDEN}
        return kept | {"spent": self.spent.rounded()}


HIDDEN = ("plan", "spent")


ANY_BYTES = 80 * GiB
"""Of a card that only says how many samples a step has."""


class Frontier(NamedTuple):
    """The answer."""

    points: tuple[Point, ...]
    """Those nothing beats, the fewest dollars first."""
    tried: int
    """Ways that fit."""
    notes: tuple[str, ...]
    priced: bool
    """Dollars are compared, too."""
    left_out: tuple[str, ...] = ()
    """What was not compared, and why."""

    @property
    def of(self) -> str:
        """Return what hours and dollars are of."""
        return self.points[0].spent.of if self.points else ""

    def least(self, budget: Budget) -> dict[str, str]:
        """Return the smallest value of each limited figure, for people."""
        found = {}
        for name in budget.limits():
            values = [p.values[name] for p in self.points]
            known = [value for value in values if value is not None]
            found[name] = said(name, min(known)) if known else "not known"
        return found

    def within(self, budget: Budget) -> list[Point]:
        """Return the points that meet every limit."""
        return [p for p in self.points if all(x <= 1 for x in budget.over(p.values).values())]

    def nearest(self, budget: Budget) -> tuple[Point, str] | None:
        """Return the point whose worst limit is passed by the least, and that limit; None without points."""
        if not self.points:
            return None
        best = min(self.points, key=lambda p: max(budget.over(p.values).values()))
        over = budget.over(best.values)
        return best, max(over, key=lambda name: over[name])

    def binding(self, budget: Budget) -> list[str]:
        """Return the limits of which lifting one alone lets some point meet the others."""
        found = []
        for name in budget.limits():
            rest = [
                {key: x for key, x in budget.over(p.values).items() if key != name}
                for p in self.points
            ]
            if any(all(x <= 1 for x in over.values()) for over in rest):
                found.append(name)
        return found


def frontier(
    model: ModelSpec,
    recipe: Recipe,
    *,
    cards: Sequence[GpuSpec],
    counts: Sequence[int] = COUNTS,
    nodes: int | None = None,
    host_ram: str | None = None,
    samples_gpus: int = 1,
    spending: Spending = spent,
) -> Frontier:
    """Return the ways to do a run that nothing beats, over these cards and counts.

    `samples_gpus`: GPUs that the recipe's batch is for; a step trains as many samples on any other count.
    """
    if recipe.task is Task.SERVE:
        raise UsageError(
            "task: a frontier is of runs that train",
            hint="`vramwise recommend --task serve` lists cards",
        )
    step = _step(plan(model, recipe, Machine(vram_bytes=ANY_BYTES, num_gpus=samples_gpus)))
    found: list[Point] = []
    for gpu in cards:
        for count in counts if not gpu.unified else counts[:1]:
            machine = make_machine(gpu.id, gpus=count, nodes=nodes, host_ram=host_ram)
            for parts in WAVES:
                more = [
                    point
                    for each in _variants(recipe, count, step, parts)
                    if (point := _tried(model, each, machine, gpu, step, recipe, spending))
                    is not None
                ]
                found += more
                if more or not TASKS[recipe.task].generates:
                    break
    left_out: list[str] = []
    priced = any(p.spent.usd_middle is not None for p in found)
    if priced:
        names = dict.fromkeys(p.gpu for p in found if p.spent.usd_middle is None)
        found = [p for p in found if p.spent.usd_middle is not None]
        if names:
            left_out.append(f"left out, no price is listed: {', '.join(names)} (--price 2.4)")
    idle = [str(count) for count in counts if not any(p.gpus == count for p in found)]
    if found and idle:
        left_out.append(
            f"on {' or '.join(idle)} GPUs nothing trains the {step.rows} sequence(s) of a step, no more and "
            "no fewer: --batch-size and --grad-accum say how many it has"
        )
    kept, tried = _proved(found)
    kept.sort(key=lambda p: (p.spent.usd_middle or 0.0, p.spent.hours))
    notes = tuple(dict.fromkeys(note for p in kept for note in p.spent.assumed))
    return Frontier(tuple(kept), tried, notes, priced, tuple(left_out))


def _tried(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    gpu: GpuSpec,
    step: "_Step",
    asked: Recipe,
    spending: Spending,
) -> Point | None:
    """Return a variant that can start, fits by what is alive, and trains as many samples in a step."""
    try:
        made = plan(model, recipe, machine)
    except VramwiseError:
        return None
    if not made.tensors_fit or _step(made) != step or _refused(made):
        return None
    took = spending(made)
    return _point(made, gpu, took, asked) if took is not None else None


def _refused(made: Plan) -> bool:
    """Say whether the framework refuses a run that can be planned."""
    return any("refuses this run" in note for note in made.assumptions)


def cards_named(names: Iterable[str]) -> list[GpuSpec]:
    """Return the cards of these names whose speed is known; UsageError for one whose speed is not."""
    found = []
    for name in names:
        gpu = make_machine(name).gpu
        if gpu is None or card_speed(gpu.id) is None:
            raise UsageError(
                f"gpu: how fast {gpu.name if gpu else name} computes is not known: memory only",
                hint="`vramwise plan --gpu` plans its memory",
            )
        found.append(gpu)
    return found


def listed_cards() -> list[GpuSpec]:
    """Return the cards with a listed price and a known speed."""
    known = gpu_catalogue()
    return [known[name] for name in priced_cards() if name in known and card_speed(name)]


def _proved(found: list[Point]) -> tuple[list[Point], int]:
    """Return the points nothing beats, every one of them replayed: what does not fit makes room for others."""
    while True:
        front = pareto(found)
        bad = {id(p) for p in front if p.plan is not None and not (p.plan.has_room or p.plan.fits)}
        if not bad:
            proved = [replace(p, verdict=p.plan.verdict) for p in front if p.plan is not None]
            return [replace(p, plan=None) for p in proved], len(found)
        found = [p for p in found if id(p) not in bad]


def pareto(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other one beats: as good in all, and better in one."""
    front: list[tuple[tuple[float, ...], Point]] = []
    # what beats a point is not after it in this order
    for key, _, point in sorted((_key(p), n, p) for n, p in enumerate(points)):
        if not any(all(a <= b for a, b in zip(other, key, strict=True)) for other, _ in front):
            front.append((key, point))
    return [point for _, point in front]


DIGITS = 2
"""Figures that differ in no more than this are alike to a person."""


def _key(p: Point) -> tuple[float, ...]:
    """Return memory, hours and dollars as people tell them apart."""
    values = (p.spent.hours, p.spent.usd_middle or 0.0, float(p.peak_bytes))
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)


def _point(made: Plan, gpu: GpuSpec, took: Spent, asked: Recipe) -> Point:
    r, count = made.resolved, made.machine.num_gpus
    document = made.asked.model_dump(mode="json", exclude_defaults=True)
    return Point(
        gpu=gpu.id,
        gpus=count,
        method=r.method.value if r.trains else r.task.value,
        layout=f"{r.layout}, {r.sharding.value}" if count > 1 else "",
        settings=_said(made),
        peak_bytes=made.peak_bytes,
        capacity_bytes=made.capacity_bytes,
        vram_bytes=made.machine.vram_bytes,
        verdict="",
        spent=took,
        flags=_flags(made.asked, asked),
        recipe=document,
        plan=made,
    )


def _flags(recipe: Recipe, asked: Recipe) -> str:
    """Return what tells a recipe from the one that was asked for, as the command line says it."""
    parts = [flags(recipe, flat(asked))]
    before, after = flat(asked), flat(recipe)
    whole = flat(recipe, defaults=True)
    for name in before.keys() - after.keys():  # back to what a recipe has by itself
        value = whole[name]
        if name in SWITCHES:
            parts.append(SWITCHES[name].replace("--", "--no-", 1))
        elif value is not None and name in NAMES:
            parts.append(f"{NAMES[name]} {value}")
    return " ".join(filter(None, parts))


def said(name: str, value: float) -> str:
    """Return a figure that a budget limits, for people."""
    if name == MEMORY:
        return format_bytes(int(value))
    return f"{value:.3g} h" if name == HOURS else f"${value:.2f}"


def _said(made: Plan) -> str:
    r = made.resolved
    kept = {"none": "no checkpointing", "full": "full checkpointing"}
    parts = [f"batch {r.batch}" + (f" x {r.grad_accum}" if r.grad_accum > 1 else "")]
    parts.append(kept.get(r.checkpointing.value, f"{r.checkpointing.value} checkpointing"))
    if r.optimizer_offload:
        parts.append("optimizer on the host")
    if TASKS[r.task].generates:
        parts.append(r.engine.value)
        if made.asked.engine.max_num_seqs:
            parts.append(f"{r.max_num_seqs} at once")
    return ", ".join(parts)


class _Step(NamedTuple):
    """What no variant changes."""

    rows: int
    """Sequences of a step on all GPUs."""
    tokens: int
    group: int
    """Sequences that one rank makes together: a prompt's completions."""


def _step(made: Plan) -> _Step:
    r = made.whole[1] if made.whole is not None else made.resolved
    each = micro_batches(r) * r.layout.data
    group = r.num_generations if TASKS[r.task].generates else 1
    return _Step(r.batch * each, r.tokens * each, max(1, group))


def _variants(recipe: Recipe, count: int, step: "_Step", parts: int) -> Iterator[Recipe]:
    """Yield the run's settings on so many GPUs, a step staying as it is, its completions made in `parts`."""
    for divided in _layouts(recipe, count):
        inner = divided.parallel.tensor * divided.parallel.pipeline * divided.parallel.context
        ranks = max(1, count // inner)
        if step.rows % (ranks * step.group):
            continue
        share = step.rows // ranks
        own = recipe.micro_batch_size or 1
        sizes = {1, own, max(size for size in BATCHES if size <= share)}
        for size in sorted(each for each in sizes if share % each == 0):
            batch = {"micro_batch_size": size, "gradient_accumulation": share // size}
            for kept, offload in (*((kept, False) for kept in KEPT), (KEPT[-1], True)):
                slow = {"checkpointing": kept, "optimizer_offload": offload}
                for engine in _engines(recipe, share, parts):
                    yield _changed(divided, batch | slow | engine)


def _changed(recipe: Recipe, update: dict[str, Any]) -> Recipe:
    return apply(recipe, Change("", update, "", 0))


def _layouts(recipe: Recipe, count: int) -> list[Recipe]:
    """Return the recipe divided over so many GPUs: as it says itself, with whole copies, and in shards."""
    plain = {"parallel": ParallelSection().model_dump(), "reshard_after_forward": None}
    if count == 1:
        return [_changed(recipe, plain | {"sharding": Sharding.NONE.value})]
    own = [recipe] if recipe.sharding is not Sharding.NONE else []
    divided = [
        _changed(recipe, plain | {"sharding": each.value})
        for each in (Sharding.DDP, Sharding.FSDP2)
        if each is not recipe.sharding or recipe.parallel != ParallelSection()
    ]
    return [*own, *divided]


def _engines(recipe: Recipe, share: int, parts: int) -> list[dict[str, Any]]:
    """Return what can generate a step's completions; nothing to change where none are."""
    kind = recipe.engine.kind
    if not TASKS[recipe.task].generates or kind in (EngineKind.NONE, EngineKind.VLLM_SERVER):
        return [{}]
    own = recipe.engine.max_num_seqs
    wave = own if parts == 1 else -(-share // parts)
    kinds = dict.fromkeys(
        (EngineKind.VLLM_SHARED, EngineKind.TRANSFORMERS, kind or EngineKind.TRANSFORMERS)
    )
    return [{"engine.kind": each.value, "engine.max_num_seqs": wave} for each in kinds]
