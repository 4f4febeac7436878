"""What pages ask the planner for, each a plain function that a worker can do. No Streamlit here."""

from typing import NamedTuple

from app import runs
from app.runs import Run, Sent
from planner import reserved
from planner.accuracy.calibrate import fingerprint
from planner.accuracy.score import Accuracy, measurement_files, score_files
from planner.accuracy.stored import stored_predictor
from planner.answers import advise
from planner.answers.amount import spending_of
from planner.answers.changes import Change
from planner.answers.frontier import COUNTS, Frontier, frontier, listed_cards
from planner.answers.layouts import Tried, layouts
from planner.answers.serving import ServingView, serving_view
from planner.errors import VramwiseError
from planner.plan import Plan, plan
from planner.run.framework import pick, with_task
from planner.run.recipe import Task
from planner.speed.cards import card_speed

COMPARED = (
    "vramwise", "trl", "unsloth", "hf-trainer", "verl", "axolotl", "llamafactory", "ms-swift", "vllm",
)  # fmt: skip
MOST_COMPARED = 4
CURVE_TOKENS = tuple(2**power for power in range(9, 18))


def side_by_side(task: str) -> tuple[str, ...]:
    """Return the frameworks that are compared unless others are chosen: those that do the task."""
    have = with_task(Task(task))
    return tuple(name for name in COMPARED if name in have)[:MOST_COMPARED]


class Lever(NamedTuple):
    """A change that lowers the peak, and where it leaves the run."""

    change: Change
    saved_bytes: int
    verdict: str
    """Empty where nobody asked: a run that fits needs none."""
    price: str
    """In words and in time."""


class Mended(NamedTuple):
    """Changes after which a run fits."""

    changes: list[Change]
    saved_bytes: int


def plan_of(sent: Sent) -> Plan:
    """Return a run's plan with its replay made."""
    with _received(sent) as run:
        return _replayed(plan(run.model, run.recipe, run.machine))


def _replayed(result: Plan) -> Plan:
    """Return the plan after asking for what is computed when asked for: it travels with it."""
    _ = result.verdict, result.low_bytes, result.high_bytes
    return result


def levers(sent: Sent, judged: bool) -> list[Lever]:
    """Return the single changes that lower a run's peak, the most bytes first; `judged`: with verdicts."""
    with _received(sent) as run:
        return [
            Lever(
                found.change, found.saved_bytes, found.plan.verdict if judged else "", found.price
            )
            for found in _singles(run)
        ]


def _singles(run: Run) -> list[advise.Advice]:
    base = plan(run.model, run.recipe, run.machine)
    return advise.levers(run.model, run.recipe, run.machine, base)


def mended(sent: Sent) -> Mended | None:
    """Return the shortest combination of changes with which a run fits."""
    with _received(sent) as run:
        peak = plan(run.model, run.recipe, run.machine).peak_bytes
        found = advise.combination(run.model, run.recipe, run.machine, _singles(run))
        return Mended(found[0], peak - found[1].peak_bytes) if found else None


def limits(sent: Sent) -> dict[str, int]:
    """Return the largest context, batch, generations and rank."""
    with _received(sent) as run:
        base = plan(run.model, run.recipe, run.machine)
        return advise.limits(run.model, run.recipe, run.machine, base)


def layouts_of(sent: Sent, fitting: int) -> list[Tried]:
    """Return the layouts of several GPUs that fit a run, and why others lose."""
    with _received(sent) as run:
        found = layouts(run.model, run.recipe, run.machine, fitting=fitting)
        for tried in found:
            if tried.plan is not None:
                _replayed(tried.plan)
        return found


def ways(sent: Sent, samples: int, epochs: float) -> Frontier:
    """Return the ways to do a run that nothing beats, over the cards with a listed price and the run's own."""
    with _received(sent) as run:
        cards, own = listed_cards(), run.machine.gpu
        if own is not None and own not in cards and card_speed(own.id) is not None:
            cards.append(own)
        count = run.section.gpus
        return frontier(
            run.model,
            run.recipe,
            cards=cards,
            counts=COUNTS if count == 1 else (count,),
            nodes=run.section.nodes,
            host_ram=run.section.host_ram,
            samples_gpus=count,
            spending=spending_of(run.file, None, None, samples=samples, epochs=epochs),
        )


def served(sent: Sent, shared_prefix: int) -> ServingView | None:
    """Return a server's view of its plan."""
    with _received(sent) as run:
        base = plan(run.model, run.recipe, run.machine)
        return serving_view(run.model, run.recipe, run.machine, base, shared_prefix=shared_prefix)


def curve(sent: Sent) -> dict[str, list[tuple[int, int]]]:
    """Return (tokens, peak bytes) of every framework that can express a run."""
    with _received(sent) as run:
        own = pick(run.recipe.framework).name
        names = [own, *(name for name in side_by_side(run.recipe.task) if name != own)]
        lines = {}
        for name in names:
            points = [(n, size) for n in CURVE_TOKENS if (size := _peak(run, name, n)) is not None]
            if points:
                lines[name] = points
        return lines


def _peak(run: Run, framework: str, tokens: int) -> int | None:
    prompt = run.recipe.prompt_length
    update = {"framework": framework, "context": tokens, "completion_length": None}
    update["prompt_length"] = min(prompt, tokens - 1) if prompt else None
    try:
        return plan(run.model, run.recipe.model_copy(update=update), run.machine).peak_bytes
    except VramwiseError:
        return None


def accuracy() -> Accuracy:
    """Score every shipped measurement."""
    return score_files(measurement_files(), predict=stored_predictor(fingerprint))


class _received:
    """The run that was sent; what the planner remembers of a private model goes with it."""

    def __init__(self, sent: Sent) -> None:
        self.sent = sent

    def __enter__(self) -> Run:
        return runs.received(self.sent)

    def __exit__(self, *failed: object) -> None:
        if self.sent.model is not None:
            reserved.forget(self.sent.model)
