"""The failed run planned: what it needs, and what each change saves, by the planner itself."""

from dataclasses import dataclass

from planner.doctor.cause import Signals
from planner.doctor.context import Context
from planner.doctor.fix_makers import Fix
from planner.doctor.framework import framework_of
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.plan import Plan, plan
from planner.run.recipe import Checkpointing, Method, Recipe, Sharding, Task
from planner.units import format_bytes

TRAINING = (
    "logits_vocab",
    "activations",
    "static_state",
    "weights",
    "optimizer_states",
    "optimizer_temp",
    "upcast_fp32",
    "attention_quadratic",
    "longest_sample",
    "default_changed",
    "generation_batch",
    "unsharded_gradients",
    "reduce_scatter_copy",
    "communicators",
    "one_rank_fuller",
    "unknown",
)
MAX_LEVERS = 5


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan of the run that failed and the changes that lower its peak."""

    plan: Plan
    fixes: tuple[Fix, ...]
    assumed: str
    """What had to be assumed to plan it; "" = the config said everything."""

    def sentence(self) -> str:
        """Return one line for a person."""
        basis = f" ({self.assumed})" if self.assumed else ""
        ranks = self.plan.ranks
        fullest = max(ranks, key=lambda rank: rank.peak_bytes) if len(ranks) > 1 else None
        uneven = (
            f"; the fullest is rank {fullest.rank} ({fullest.role}), {format_bytes(fullest.peak_bytes)}"
            if fullest
            else ""
        )
        return f"the planner's figure for this run{basis}: {self.plan.verdict}, {self.plan.why}{uneven}"


def planned(signals: Signals, category: str, recipe: Recipe | None) -> Planned | None:
    """Return the run planned, or None when model, card or sizes are not known."""
    from planner.answers.advise import levers

    context, card = signals.context, signals.card_bytes
    if context.model is None or card is None or category not in TRAINING:
        return None
    assumed = ""
    if recipe is None:
        recipe = recipe_of(context)
        assumed = _assumed(context) if recipe else ""
    if recipe is None or recipe.task is Task.SERVE:
        return None
    machine = Machine(vram_bytes=card, num_gpus=context.gpus)
    try:
        base = plan(context.model, recipe, machine)
        found = levers(context.model, recipe, machine, base)
    except VramwiseError:
        return None
    fixes = tuple(
        Fix(
            change=f"{lever.change.name} ({lever.change.price})",
            saved_bytes=lever.saved_bytes,
            formula=f"plan: {format_bytes(base.peak_bytes)} -> {format_bytes(lever.plan.peak_bytes)}, {lever.plan.verdict}",
        )
        for lever in found[:MAX_LEVERS]
    )
    return Planned(plan=base, fixes=fixes, assumed=assumed)


def _assumed(context: Context) -> str:
    """Return what a recipe read from a text had to assume."""
    framework = framework_of(context)
    rest = "checkpointing on, the framework's usual loss"
    return f"framework {framework.name}, {rest}" if framework.assumed else rest


def recipe_of(context: Context) -> Recipe | None:
    """Return a recipe of what a text says, or None when method, batch or length are missing."""
    length = context.number("length")
    completion, prompt = context.number("completion"), context.number("prompt")
    batch = context.number("batch")
    if not context.method or not batch or not (length or completion):
        return None
    task = Task.GRPO if context.task == "grpo" else Task.DPO if context.task == "dpo" else Task.SFT
    grpo = task is Task.GRPO and completion is not None
    try:
        return Recipe(
            task=task,
            method=Method(context.method),
            framework=framework_of(context).name,
            micro_batch_size=batch,
            context=None if grpo else length or (prompt or 0) + (completion or 0),
            prompt_length=prompt if grpo else None,
            completion_length=completion if grpo else None,
            num_generations=context.number("generations"),
            checkpointing=Checkpointing.FULL,
            sharding=Sharding(context.sharding or "none"),
        )
    except ValueError:
        return None
