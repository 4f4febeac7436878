"""Cards that take a model: for a run as it is, and for the methods of a task with settings that fit."""

from bisect import insort
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from planner.answers.longest import USUAL
from planner.answers.recommend import (
    Setting,
    comfortable,
    quickest,
    runner,
    setting,
    starts,
    variants,
)
from planner.answers.spent import Spending, Spent, order, priced_cards, spent
from planner.answers.unchanged import Settled
from planner.errors import VramwiseError
from planner.machines.machine import GpuSpec, Machine, gpu_catalogue, make_machine
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.run.recipe import Recipe

BROAD_KINDS = ("consumer", "workstation", "datacenter", "unified", "embedded")
"""All but slices of a card."""


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU, and what a run does on it."""

    gpu: str
    name: str
    kind: str
    gpus: int
    vram_bytes: int
    method: str
    verdict: str
    fits: bool
    peak_bytes: int
    capacity_bytes: int
    setting: Setting | None = None
    """Settings that fit, where they were looked for."""
    spent: Spent | None = None
    """Time and money; None where the card's speed is not known."""

    @property
    def headroom_bytes(self) -> int:
        """Capacity less the peak; negative when it does not fit."""
        return self.capacity_bytes - self.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        known = {"spent": self.spent.rounded() if self.spent else None}
        return {**asdict(self), "headroom_bytes": self.headroom_bytes, **known}


def known_cards(kinds: tuple[str, ...] = BROAD_KINDS) -> list[GpuSpec]:
    """Return the catalogue's cards whose memory is known, the smallest first."""
    cards = [g for g in gpu_catalogue().values() if g.torch_total_bytes and g.kind in kinds]
    return sorted(
        cards, key=lambda g: (g.torch_total_bytes or 0, -(g.bandwidth_bytes_per_s or 0), g.id)
    )


def cards_for_run(
    model: ModelSpec,
    recipe: Recipe,
    *,
    gpus: int = 1,
    nodes: int | None = None,
    host_ram: str | None = None,
    spending: Spending = spent,
) -> list[Card]:
    """Return every card with the verdict of this very run, in the order of spent.RULE.

    Cards that refuse the run are left out. Raises what the last card says where none takes the run: a mistake in the run itself.
    """
    found: list[Card] = []
    refused: VramwiseError | None = None
    for gpu in known_cards():
        machine = make_machine(gpu.id, gpus=gpus, nodes=nodes, host_ram=host_ram)
        try:
            made = plan(model, recipe, machine)
        except VramwiseError as error:
            refused = error
            continue
        method = recipe.method.value if made.resolved.trains else recipe.task.value
        found.append(
            Card(gpu.id, gpu.name, gpu.kind, gpus, machine.vram_bytes, method, made.verdict, made.fits,
                 made.peak_bytes, made.capacity_bytes, spent=spending(made))
        )  # fmt: skip
    if refused is not None and not found:
        raise refused
    return sorted(found, key=lambda card: order(card.spent))


def cards_for_model(
    model: ModelSpec,
    *,
    task: str = "sft",
    context: int = 2048,
    framework: str | None = None,
    gpus: int = 1,
    nodes: int | None = None,
    host_ram: str | None = None,
    kinds: tuple[str, ...] = BROAD_KINDS,
    limit: int | None = None,
    spending: Spending = spent,
) -> list[Card]:
    """Return the cards that take a model and the methods that do, in the order of spent.RULE.

    Settings are those that slow the run least; all of them leave the result as it is. Cards with a listed
    price are all planned, the others as far as `limit` reaches, the smallest first; rows that are shown are
    replayed, and fit.
    """
    found: list[_Chosen] = []
    framework = runner(task, framework)
    if model.longest and context > model.longest:
        return []
    priced = priced_cards()
    cards = sorted(known_cards(kinds), key=lambda gpu: gpu.id not in priced)
    for gpu in cards:
        if limit is not None and len(found) >= limit and gpu.id not in priced:
            break
        machine = make_machine(gpu.id, gpus=gpus, nodes=nodes, host_ram=host_ram)
        for method in variants(task):
            recipes = starts(task, method, framework, machine)
            chosen = comfortable(model, recipes, machine, context, task)
            if chosen is None:
                chosen = _barely(model, recipes, machine, context)
            if chosen is not None:
                found.append(_Chosen(gpu, method, recipes, chosen, spending(chosen.plan)))
    shown: list[Card] = []
    waiting = sorted(found, key=_place)
    while waiting and (limit is None or len(shown) < limit):
        row = waiting.pop(0)
        if row.chosen.plan.fits:
            shown.append(row.card(spending))
            continue
        other = _barely(model, row.recipes, row.chosen.plan.machine, context)
        if other is not None:  # slower settings: its place may be further back
            slower = row._replace(chosen=other, spent=spending(other.plan))
            insort(waiting, slower, key=_place)
    return shown


class _Chosen(NamedTuple):
    """A card and a method with its settings, not replayed yet."""

    gpu: GpuSpec
    method: str
    recipes: list[Recipe]
    chosen: Settled
    spent: Spent | None

    def card(self, spending: Spending) -> Card:
        """Return the row to show."""
        made = self.chosen.plan
        return Card(self.gpu.id, self.gpu.name, self.gpu.kind, made.machine.num_gpus, made.machine.vram_bytes, self.method,
                    "fits", True, made.peak_bytes, made.capacity_bytes, setting(self.chosen, spending), self.spent)  # fmt: skip


def _place(row: _Chosen) -> tuple[int, float]:
    return order(row.spent)


def _barely(
    model: ModelSpec, recipes: list[Recipe], machine: Machine, context: int
) -> Settled | None:
    """Return settings without room for all fragments that fit when they are replayed."""
    found = quickest(model, recipes, machine, context, USUAL)
    return found if found is not None and found.plan.fits else None
