"""What fits where: recommendations for a machine and machines for a model, filtered. No Streamlit here."""

from typing import Any

from app.runs import DEFAULTS, Sent, received
from planner.answers.cards import Card, cards_for_model
from planner.answers.recommend import Recommendation, recommend, refusals
from planner.answers.spent import Spent
from planner.models.spec import ModelSpec
from planner.report.time import HOUR, between, dollars, span
from planner.run.framework import pick
from planner.run.recipe import MachineSection, Task
from planner.run.runfile import machine_of
from planner.units import format_bytes

METHODS = ("qlora", "lora", "full")
SIZES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
"""Steps of the slider of sizes, each twice the one before: most models are small."""


def recommended(
    section: str,
    task: str,
    least: int,
    framework: str,
    search: str = "",
    sizes: tuple[float, float] = (0.0, float("inf")),
    limit: int = 40,
) -> list[Recommendation]:
    """Return the best rows that fit a machine (a MachineSection as JSON), of models by name and size (billions).

    The job of a worker.
    """
    machine = machine_of(MachineSection.model_validate_json(section))
    words = search.lower().split()
    low, high = sizes

    def wanted(name: str, model: ModelSpec) -> bool:
        return low <= model.parameters / 1e9 <= high and all(word in name for word in words)

    return recommend(
        machine,
        task=task,
        least_context=least,
        framework=_trainer(task, framework),
        wanted=wanted,
        limit=limit,
    )


def refusals_for(section: MachineSection, task: str, framework: str) -> list[str]:
    """Return why each method that a framework does not plan, of any model, has no row."""
    return refusals(machine_of(section), task, _trainer(task, framework))


def _trainer(task: str, framework: str) -> str | None:
    """Return the framework that a page's choice names; None = the first that has the task.

    Serving has its own, and what nobody chose gives way to one that does the task.
    """
    return None if task == Task.SERVE or without(task, framework) else framework


def without(task: str, framework: str) -> bool:
    """Return whether the page's framework is the one that nobody chose, and does not do the task."""
    return framework == DEFAULTS["framework"] and not pick(framework).has(Task(task))


def heat_rows(found: list[Recommendation]) -> list[dict[str, Any]]:
    """Return the heat map's cells."""
    lengths = [row.context for row in found]
    middle = (min(lengths, default=1) * max(lengths, default=1)) ** 0.5
    return [
        {
            "model": row.model,
            "method": row.method,
            "context": row.context,
            "batch": row.batch,
            "peak": format_bytes(row.peak_bytes),
            "settings": row.settings,
            "said": tokens_label(row.context),
            # dark text on the bright half of the scale
            "bright": row.context >= middle,
        }
        for row in found
    ]


def tokens_label(tokens: int) -> str:
    """Return 32768 as "32K"."""
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def cards(sent: Sent, context: int, kinds: tuple[str, ...], limit: int | None) -> list[Card]:
    """Return the GPUs that take a run's model for its task, with settings that fit; the job of a worker."""
    run = received(sent)
    return cards_for_model(
        run.model,
        task=run.recipe.task.value,
        context=context,
        framework=_trainer(run.recipe.task, run.recipe.framework),
        gpus=run.section.gpus,
        nodes=run.section.nodes,
        host_ram=run.section.host_ram,
        kinds=kinds,
        limit=limit,
    )


TIME, DOLLARS = "time", "dollars"
SPENT_OF = "Time and dollars are those of a million tokens, at likely speeds and listed prices."


def spent_said(found: Spent | None) -> dict[str, str]:
    """Return a row's time and dollars for people."""
    if found is None:
        return {TIME: "not known", DOLLARS: ""}
    money = "no price listed"
    if found.usd_low is not None and found.usd_high is not None:
        money = between(dollars(found.usd_low), dollars(found.usd_high))
    return {TIME: span(found.hours * HOUR), DOLLARS: money}


def card_rows(found: list[Card]) -> list[dict[str, Any]]:
    """Return the rows of the map and the table of GPUs."""
    return [
        {
            "gpu": card.gpu,
            "memory": format_bytes(card.vram_bytes, digits=1),
            "method": card.method,
            "peak": format_bytes(card.peak_bytes, digits=1),
            "left": format_bytes(card.headroom_bytes, digits=1),
            "settings": card.setting.settings if card.setting else "",
            **spent_said(card.spent),
            "name": card.name,
            "share": card.headroom_bytes / card.capacity_bytes,
        }
        for card in found
    ]
