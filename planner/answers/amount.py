"""How much a run trains, and the plan of its typical step: samples, epochs, steps, or a file of lengths."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from planner.answers.spent import Spending, Spent, spent
from planner.errors import UsageError
from planner.plan import Plan, plan
from planner.run.recipe import Recipe, RunFile, Task
from planner.run.tasks import TASKS
from planner.speed.cost import Amount, parse_price, refuse_amount

if TYPE_CHECKING:
    from planner.answers.length_files import Lengths


def amount_of(
    made: Plan,
    run: RunFile,
    lengths: "Path | Lengths | None",
    *,
    samples: int | None = None,
    epochs: float | None = None,
    total_steps: int | None = None,
    mean_completion: int | None = None,
) -> tuple[Plan, Amount]:
    """Return the plan of a typical step and the amount of steps that somebody asked for.

    Flags win over the train section of a run.yaml; with a file of lengths its samples are counted, and
    the typical step has micro-batches as long as theirs are on average.
    """
    train = run.train or {}
    if samples is None and total_steps is None and lengths is None:
        total_steps = train.get("steps") if train.get("epochs") is None else None
    epochs = epochs if epochs is not None else train.get("epochs")
    typical, recipe, longest = made, run.recipe, 0
    if mean_completion is not None:
        recipe, longest = _shorter(made, recipe, mean_completion), made.resolved.completion_tokens
        typical = plan(made.spec, recipe, made.machine)
    if lengths is not None:
        from planner.answers.length_files import read_lengths

        found = read_lengths(lengths) if isinstance(lengths, Path) else lengths
        samples = samples if samples is not None else len(found.counts)
        typical = _typical(made, recipe, found)
    if epochs is not None and samples is None and total_steps is None:
        if "epochs" in train:
            epochs = None  # of a data set that a plan does not read
        else:
            raise UsageError(
                "epochs: of how many samples is not said",
                hint="--samples 7473, or --lengths FILE with one length a sample",
            )
    known = lengths is not None
    return typical, Amount(
        samples=samples,
        epochs=epochs,
        total_steps=total_steps,
        lengths_known=known,
        longest_completion=longest,
    )


def spending_of(
    run: RunFile,
    lengths: Path | None,
    price: str | None,
    *,
    samples: int | None = None,
    epochs: float | None = None,
    total_steps: int | None = None,
    mean_completion: int | None = None,
) -> Spending:
    """Return what says the time and money of any plan of a run, a file of lengths being read once.

    What is wrong with the amount or the price is refused here, whatever cards are known.
    """
    refuse_amount(Amount(samples, epochs, total_steps))
    if price is not None:
        parse_price(price)
    read: Path | Lengths | None = lengths
    if lengths is not None:
        from planner.answers.length_files import read_lengths

        read = read_lengths(lengths)

    def spending(made: Plan) -> Spent | None:
        typical, amount = amount_of(
            made,
            run,
            read,
            samples=samples,
            epochs=epochs,
            total_steps=total_steps,
            mean_completion=mean_completion,
        )
        return spent(typical, amount, price)

    return spending


def spending_for(samples: int | None, epochs: float | None, price: str | None) -> Spending:
    """Return what says the time and money of plans of different settings: of the samples, or of a million tokens."""
    amount = Amount(samples, epochs)
    refuse_amount(amount)
    if epochs is not None and samples is None:
        raise UsageError("epochs: of how many samples is not said", hint="--samples 7473")
    if price is not None:
        parse_price(price)
    return partial(spent, amount=amount, price=price)


def _shorter(made: Plan, recipe: Recipe, mean: int) -> Recipe:
    """Return the recipe with completions of that length; UsageError for one that cannot be a mean."""
    r = made.resolved
    if not TASKS[r.task].generates:
        raise UsageError(f"mean-completion: --task {r.task} makes no completions")
    if not 1 <= mean <= r.completion_tokens:
        raise UsageError(
            f"mean-completion: {mean:,} is not allowed",
            hint=f"from 1 to the {r.completion_tokens:,} tokens that the recipe allows",
        )
    lengths = {"prompt_length": r.prompt_tokens, "completion_length": mean, "context": None}
    return recipe.model_copy(update=lengths)


def _typical(made: Plan, recipe: Recipe, lengths: "Lengths") -> Plan:
    """Return the plan at the average length of a micro-batch's padded rows."""
    from planner.answers.lengths import at_length

    r = made.resolved
    cap = recipe.context if recipe.task is not Task.GRPO else None
    counts = sorted(min(count, cap) if cap else count for count in lengths.counts)
    if r.packing and cap:
        return made  # rows are full
    rows = r.sequences if r.padded else 1
    return plan(made.spec, at_length(recipe, round(longest_of(counts, rows))), made.machine)


def longest_of(counts: list[int], rows: int) -> float:
    """Return the mean of the longest of `rows` draws from sorted lengths."""
    size = len(counts)
    below = 0.0
    total = 0.0
    for index, count in enumerate(counts, 1):
        share = (index / size) ** rows
        total += count * (share - below)
        below = share
    return total
