"""`train --fit`: settings that meet a budget of memory, hours and dollars, found on the plan.

What leaves the result as it is comes first (planner/answers/unchanged.py); a setting that changes it is taken
only where nothing else meets the memory, and said. The samples of a step are the file's, whatever is chosen.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.answers.advise import levers
from planner.answers.changes import Change, apply
from planner.answers.lengths import at_length
from planner.answers.unchanged import Settled, settle, strongest
from planner.errors import UnsupportedError, UsageError, VramwiseError
from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.report.time import dollars, span
from planner.run.lora_fields import with_start
from planner.run.parallel import layout_of
from planner.run.recipe import Recipe, RunFile, Task
from planner.run.train_bytes import with_train
from planner.speed.budget import DOLLARS, HOURS, MEMORY, Budget
from planner.speed.cost import SECONDS_PER_HOUR, Price, listed_prices, parse_price
from planner.speed.time import Time, time_of
from planner.units import format_bytes, parse_bytes
from trainer.config import TrainSection, parse_run
from trainer.devices import this_machine
from trainer.engines.vllm_settings import settle_engine
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.same_plan import smallest_machine
from trainer.parallel.sharding import refuse_over_ranks
from trainer.preflight import choose_layout, settled
from trainer.step_size import step_prompts

QUICKEST: dict[str, Any] = {"checkpointing": "none", "tiled_mlp": False, "optimizer_offload": False}
"""Where the search begins for what the file leaves open."""
SHORTENING = frozenset({"context", "prompt_length", "completion_length", "num_generations"})
"""Changes of the data or of a step's samples: never made."""
DIVIDED = Change(
    "sharding=fsdp2", {"sharding": "fsdp2"}, "weights travel between GPUs every layer", 3
)
"""Of several GPUs whose layout the file leaves open: weights, gradients and states over all of them."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings, what they hold, and what they take; None = not known."""

    recipe: Recipe
    plan: Plan
    changes: tuple[Change, ...]
    hours: float | None
    usd: float | None
    time: Time | None

    @property
    def values(self) -> dict[str, float | None]:
        """Return what the budget's limits are on, by name."""
        return {MEMORY: float(self.plan.peak_bytes), HOURS: self.hours, DOLLARS: self.usd}

    @property
    def settings(self) -> str:
        """Return what was chosen, as a run file says it."""
        recipe = self.recipe
        parts = [f"micro_batch_size={recipe.micro_batch_size} x {recipe.gradient_accumulation}"]
        parts += [
            f"{name}={_said(getattr(recipe, name))}" for name in QUICKEST if getattr(recipe, name)
        ]
        parts += [each.name for each in self.changes if not set(each.update) & set(QUICKEST)]
        return ", ".join(parts)

    @property
    def takes(self) -> str:
        """Return memory, hours and dollars in words."""
        parts = [f"{format_bytes(self.plan.peak_bytes)} in {self.plan.peak_phase}"]
        if self.hours is not None:
            parts.append(span(self.hours * SECONDS_PER_HOUR))
        if self.usd is not None:
            parts.append(dollars(self.usd))
        return ", ".join(parts)

    @property
    def changed_result(self) -> list[str]:
        """Return the changes that change what is learned."""
        return [each.name for each in self.changes if each.changes_objective]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A run whose settings meet a budget as planned."""

    run: RunFile
    train: TrainSection
    budget: Budget
    chosen: Candidate
    steps: int
    usd_per_hour: float | None
    """Of all GPUs: the dearest listed, or as said."""


class Search:
    """What is looked for, and where: settings of one of `gpus` alike."""

    def __init__(
        self,
        run: RunFile,
        train: TrainSection,
        budget: Budget,
        *,
        steps: int,
        prompts: int | None = None,
        mean_tokens: int | None = None,
        price: str | None = None,
        machine: Machine | None = None,
    ) -> None:
        """`prompts`: of a step, on all GPUs. `machine`: what the budget leaves of each; None: of this one."""
        self.spec: ModelSpec = find_model(run.model, revision=run.revision)
        self.budget = budget
        self.steps = steps
        self.machine = machine or machine_within(run, train, budget)
        gpus = self.machine.num_gpus
        rate = price_of(self.machine, price, budget)
        self.usd_per_hour = gpus * rate.high if rate is not None else None
        self._mean_tokens = mean_tokens
        self._train = train
        self._open = {
            name: value
            for name, value in QUICKEST.items()
            if name not in run.recipe.model_fields_set
        }
        asked = with_train(run).recipe
        self.begin = self._begun(asked)
        self._begins: list[tuple[Recipe, tuple[Change, ...]]] = [(self.begin, ())]
        if gpus > 1 and not {"sharding", "parallel"} & run.recipe.model_fields_set:
            with suppress(UnsupportedError):  # what needs whole weights on every GPU
                self._begins.append((self._begun(apply(asked, DIVIDED)), (DIVIDED,)))
        self.prompts = prompts or step_prompts(run.recipe, train, gpus)
        generations = (self.begin.num_generations or 8) if self.begin.task is Task.GRPO else 1
        self.rows = -(-self.prompts // gpus) * generations
        """Of a step, on one GPU."""

    def _begun(self, asked: Recipe) -> Recipe:
        """Return the recipe as the trainer settles it, at its quickest in what the file leaves open."""
        gpus = self.machine.num_gpus
        started, _ = with_start(self.spec, asked)
        refuse_over_ranks(started, layout_of(self.spec, started, gpus))
        begun = Recipe.model_validate(started.model_dump() | self._open)
        wanted = settle_engine(settled(begun, gpus))
        _, in_rows = choose_layout(self.spec, wanted, self._train)
        return wanted.model_copy(update={"packing": True}) if in_rows else wanted

    def best(self) -> Candidate:
        """Return the quickest settings within the budget; raises VramwiseError with what comes nearest."""
        found = list(self.candidates())
        within = [each for each in found if self.meets(each)]
        if within:
            return min(within, key=_order)
        if not found:
            found = list(self._changing())
            within = [each for each in found if self.meets(each)]
            if within:
                return within[0]
        raise self._nothing(found)

    def meets(self, candidate: Candidate) -> bool:
        """Return whether no limit is known to be broken."""
        known = {name: value for name, value in candidate.values.items() if value is not None}
        return all(known[name] <= limit for name, limit in self.budget.limits().items() if name in known)  # fmt: skip

    def candidates(self) -> Iterator[Candidate]:
        """Yield settings that keep the result and have room, one a size of the micro-batch."""
        for begin, before in self._begins:
            for size in sizes(self.rows):
                asked = self._of_size(begin, size)
                found = settle(self.spec, asked, self.machine, before=before)
                if found is not None:
                    yield self._candidate(found.recipe, found.plan, found.changes)

    def _changing(self) -> Iterator[Candidate]:
        """Yield settings with one change of the result, where none without it has room."""
        recipe, base = self._smallest()
        found = (each.change for each in levers(self.spec, recipe, self.machine, base))
        begin, before = self._begins[-1]
        for change in sorted(found, key=lambda each: each.rank):
            if not change.changes_objective or SHORTENING & set(change.update):
                continue
            begun = apply(self._of_size(begin, 1), change)
            made = settle(self.spec, begun, self.machine, before=(*before, change))
            if made is not None:
                yield self._candidate(made.recipe, made.plan, made.changes)

    def _smallest(self) -> tuple[Recipe, Plan]:
        """Return the settings that keep the result and hold the least."""
        recipe = self._of_size(self._begins[-1][0], 1)
        start = Settled(plan(self.spec, recipe, self.machine))
        smallest = strongest(self.spec, start, recipe, self.machine)
        return smallest, plan(self.spec, smallest, self.machine)

    def _of_size(self, recipe: Recipe, size: int) -> Recipe:
        """Return the recipe with micro-batches of so many rows, as many as the step's rows need."""
        count = -(-self.rows // size)
        return recipe.model_copy(update={"micro_batch_size": size, "gradient_accumulation": count})

    def _candidate(self, recipe: Recipe, made: Plan, changes: tuple[Change, ...]) -> Candidate:
        typical = made
        if self._mean_tokens is not None:
            typical = plan(self.spec, at_length(recipe, self._mean_tokens), self.machine)
        time = time_of(typical)
        hours = time.step_seconds * self.steps / SECONDS_PER_HOUR if time is not None else None
        rate = self.usd_per_hour
        usd = hours * rate if hours is not None and rate is not None else None
        return Candidate(recipe=recipe, plan=made, changes=changes, hours=hours, usd=usd, time=time)

    def _nothing(self, found: list[Candidate]) -> VramwiseError:
        """Return the error of a budget that nothing meets: what comes nearest and which limit binds."""
        if not found:
            recipe, made = self._smallest()
            found = [self._candidate(recipe, made, ())]
        nearest = min(found, key=lambda each: max(self._over(each).values()))
        over = self._over(nearest)
        binding = max(over, key=lambda name: over[name])
        limits = ", ".join(self.budget.said(name) for name in self.budget.limits())
        return VramwiseError(
            f"--fit: nothing meets {limits}: nearest is {nearest.settings} with {nearest.takes}; "
            f"{binding} binds: {over[binding]:.2f} times {self.budget.said(binding)}",
            hint=HINTS[binding],
        )

    def _over(self, candidate: Candidate) -> dict[str, float]:
        """Return how many times each limit a candidate is, as far as both are known."""
        values = {name: value for name, value in candidate.values.items() if value is not None}
        return {name: values[name] / limit for name, limit in self.budget.limits().items() if name in values}  # fmt: skip


HINTS = {
    MEMORY: "more memory, a smaller or packed model, or a shorter context: vramwise advise RUN.yaml",
    HOURS: "fewer steps, or a faster card: vramwise plan MODEL without a card lists them",
    DOLLARS: "fewer steps, or a cheaper card: vramwise plan MODEL without a card lists them",
}


def sizes(rows: int) -> list[int]:
    """Return the micro-batches to try, of all rows first: each half of the one before."""
    found = [rows]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def machine_within(
    run: RunFile,
    train: TrainSection,
    budget: Budget,
    *,
    ranks: Ranks = ALONE,
    gpus: int | None = None,
) -> Machine:
    """Return a machine of GPUs like this one, each with no more memory than the budget allows, and than any rank has.

    `gpus`: unless there are as many as ranks. All ranks call it. Raises UsageError.
    """
    here = this_machine(run, train.model_copy(update={"device_memory": None}))
    here = replace(here, num_gpus=gpus or ranks.size, nodes=run.machine.nodes or 0)
    here = smallest_machine(here, ranks, shared=here.cpu)
    limit = budget.memory_bytes or here.vram_bytes
    if train.device_memory:
        limit = min(limit, parse_bytes(train.device_memory, field="train.device_memory"))
    return replace(here, vram_bytes=min(limit, here.vram_bytes))


def price_of(machine: Machine, price: str | None, budget: Budget) -> Price | None:
    """Return dollars an hour; raises UsageError where a limit on dollars has none to go by."""
    if price is not None:
        return parse_price(price)
    found = listed_prices().get(machine.gpu.id) if machine.gpu is not None else None
    if found is None and budget.usd is not None:
        where = machine.gpu.name if machine.gpu is not None else "this machine"
        raise UsageError(
            f"--fit: {budget.said(DOLLARS)} says nothing without a price: none is listed for {where}",
            hint="--price 2.4 (US dollars for one GPU and hour)",
        )
    return found


def _order(candidate: Candidate) -> tuple[float, int, int]:
    """Return the key of candidates that all meet the budget: the quickest, as planned or by their levers."""
    slow = sum(each.rank for each in candidate.changes)
    return (candidate.hours or 0.0, slow, -(candidate.recipe.micro_batch_size or 1))


def _said(value: Any) -> str:
    return str(getattr(value, "value", value)).lower()


def fitted_run(run: RunFile, search: Search, chosen: Candidate, *, root: Path) -> Fitted:
    """Return the run file with the chosen settings in it: what a resume reads, and what the output folder keeps."""
    document = run.model_dump(mode="json", exclude_unset=True)
    recipe = document.setdefault("recipe", {})
    made = chosen.recipe
    recipe["micro_batch_size"] = made.micro_batch_size
    recipe["gradient_accumulation"] = made.gradient_accumulation
    for name in QUICKEST:
        recipe[name] = getattr(made, name)
    for change in chosen.changes:
        for name, value in change.update.items():
            section, _, field = name.rpartition(".")
            (recipe.setdefault(section, {}) if section else recipe)[field] = value
    document["train"]["prompts_per_step"] = search.prompts
    document["train"]["preflight"] = True
    limit = search.machine.vram_bytes - search.machine.context_bytes
    if search.budget.memory_bytes is not None:
        document["train"]["device_memory"] = f"{limit}b"
    validated = RunFile.model_validate(document)
    run, train = parse_run(validated.model_dump(mode="json", exclude_unset=True), root=root)
    return Fitted(
        run=run,
        train=train,
        budget=search.budget,
        chosen=chosen,
        steps=search.steps,
        usd_per_hour=search.usd_per_hour,
    )


def steps_of(train: TrainSection, rows: int | None, per_step: int) -> int:
    """Return the optimizer steps of a run whose data set has `rows`."""
    if train.epochs is None or rows is None:
        return train.steps
    return max(1, -(-int(rows * train.epochs) // per_step))
