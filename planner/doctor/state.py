"""What the planner says the run holds before its first batch, from what the log tells of it."""

from dataclasses import dataclass
from typing import Any

from planner.doctor.context import Context
from planner.doctor.framework import framework_of
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.run.placement import DIVIDES
from planner.run.recipe import EngineSection, Method, Optimizer, Recipe, Sharding, Task
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from planner.terms.groups import Communicators, communicators
from planner.terms.standing import Standing, model_of_size, standing
from planner.terms.vllm_profile import sampler_buffers
from planner.units import GiB, format_bytes

WHOLE = Machine(vram_bytes=80 * GiB)
"""Any card: standing bytes do not depend on it."""


SORTING_RELEASE = "vllm==0.12.0"
"""Its sampler's warm-up sorts all logits, outside the budget: what `vllm_sampler` messages tell of."""


@dataclass(frozen=True, kw_only=True)
class StaticState:
    """Bytes one GPU holds before the first batch, as an inequality against the card."""

    low_bytes: int
    high_bytes: int
    formula: str
    exact: bool
    """The parameter count is the model's own, not read from its name."""


def model_of(context: Context) -> ModelSpec | None:
    """Return the run's model; of one known by size alone a stand-in; None without either."""
    if context.model is not None:
        return context.model
    return model_of_size(context.parameters) if context.parameters else None


def weights_bytes(context: Context) -> int | None:
    """Return the bytes of one whole copy of the base weights, or None if the size is unknown.

    Of an unsaid method: as the checkpoint stores them.
    """
    wide: dict[str, Any] = {"dtype": "fp32"} if "fp32" in context.model_name else {}
    if context.method in ("full", "lora", "qlora"):
        found = _held(context, ranks=1, **wide)
    else:
        found = _held(context, ranks=1, task=Task.SERVE, method=Method.FULL, **wide)
    return found.weights if found else None


def served_bytes(context: Context) -> int | None:
    """Return the weights of one rank of vLLM, by its release's own layout; None if not known."""
    engine = EngineSection(tensor_parallel=context.number("tp") or 1)
    found = _held(
        context, ranks=1, task=Task.SERVE, method=Method.FULL, framework="vllm", engine=engine
    )
    return found.weights if found else None


def sampler_bytes(context: Context, rows: int, vocab: int) -> int:
    """Return what vLLM's sampler holds for `rows` sequences at its largest moment."""
    model = model_of_size(1)
    fields = {"task": Task.SERVE, "method": Method.FULL, "framework": SORTING_RELEASE}
    r = resolve(model, _recipe(context, **fields), WHOLE)
    return rows * vocab * sum(width for _, width in sampler_buffers(r, rows, vocab))


def kbit_upcast_bytes(context: Context) -> int | None:
    """Return what prepare_model_for_kbit_training leaves in fp32; None without a known model."""
    if context.model is None:
        return None
    wide, narrow = (
        _held(context, ranks=1, method=Method.QLORA, framework=name, double_quant=False)
        for name in ("hf-trainer", "vramwise")
    )
    return 2 * (wide.weights - narrow.weights) if wide and narrow else None


def trains_at_all(context: Context, card_bytes: int) -> bool:
    """Return whether one sample of one token would train on this card by the plan (True if unknown)."""
    model = context.model
    if model is None:
        return True
    machine = Machine(vram_bytes=card_bytes, num_gpus=context.gpus)
    try:
        smallest = plan(model, _recipe(context, micro_batch_size=1), machine)
    except VramwiseError:
        return True
    return smallest.verdict == "fits"


def saved_bytes(context: Context, **changes: Any) -> int | None:
    """Return what a change of the recipe takes off one GPU's standing bytes; None if not known."""
    before, after = _held(context), _held(context, **changes)
    return before.total - after.total if before and after else None


def static_state(context: Context) -> StaticState | None:
    """Return weights + gradients + optimizer on one GPU; None if the size is unknown.

    Full fine-tuning is bracketed: everything in 16 bit, or with fp32 weights or masters (a log
    seldom says which). PPO holds two trained models and two frozen ones.
    """
    if any(DIVIDES[Sharding(context.sharding or "none")]) and "gpus" not in context.numbers:
        return None  # a shard's size needs the number of ranks
    ppo = context.task == "ppo"
    trained = context.method or ("full" if ppo else "")
    narrow: dict[str, Any] = {
        "dtype": "bf16",
        "mixed_precision": "none",
        "optimizer": Optimizer.ADAMW,
    }
    wide: dict[str, Any] = {**narrow, "dtype": "fp32", "mixed_precision": "bf16"}
    if not trained:
        held = weights_bytes(context)
        if held is None:
            return None
        low = high = held
        text = f"weights {format_bytes(held)}"
    else:
        small = _held(context, method=Method(trained), **narrow)
        if small is None:
            return None
        large = _held(context, method=Method.FULL, **wide) if trained == "full" else small
        assert large is not None
        frozen = 2 * small.weights if ppo else 0
        models = 2 if ppo else 1
        low, high = (models * held.total + frozen for held in (small, large))
        text = _words(small, large, models, frozen)
    span = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return StaticState(
        low_bytes=low, high_bytes=high, formula=f"{text} = {span}", exact=context.model is not None
    )


def _words(small: Standing, large: Standing, models: int, frozen: int) -> str:
    """Return the sum in words, a range where masters may be kept."""
    parts = []
    for name in Standing._fields:
        low, high = getattr(small, name), getattr(large, name)
        if high:
            size = format_bytes(low)
            parts.append(f"{name} {size if low == high else f'{size}..{format_bytes(high)}'}")
    text = " + ".join(parts)
    if models == 2:
        return f"actor and critic: 2 x ({text}), reference and reward: {format_bytes(frozen)}"
    return text


def communicators_of(context: Context, card_bytes: int) -> Communicators | None:
    """Return the groups that one rank of the run talks in, with their bytes; None: not expressible."""
    model = model_of(context)
    if model is None or context.gpus < 2:
        return None
    machine = Machine(vram_bytes=card_bytes, num_gpus=context.gpus, context_bytes=1)
    try:
        return communicators(resolve(model, _recipe(context), machine), machine)
    except VramwiseError:
        return None


def standing_of(context: Context, *, ranks: int | None = None, **fields: Any) -> Standing | None:
    """Return the planner's standing bytes of one GPU; `ranks` 1: of a run that divides nothing."""
    return _held(context, ranks=ranks, **fields)


def _held(context: Context, *, ranks: int | None = None, **fields: Any) -> Standing | None:
    """Return the planner's standing bytes; `ranks` 1: one whole copy. None: not expressible."""
    model = model_of(context)
    if model is None:
        return None
    if ranks is not None:
        fields["sharding"] = Sharding.NONE
    machine = Machine(vram_bytes=WHOLE.vram_bytes, num_gpus=ranks or context.gpus)
    try:
        return standing(model, resolve(model, _recipe(context, **fields), machine))
    except VramwiseError:
        return None


def _recipe(context: Context, **fields: Any) -> Recipe:
    """Return the recipe of what is known of the run, one token long; `fields` win."""
    values: dict[str, Any] = {
        "task": Task.SFT,
        "method": Method(context.method or "lora"),
        "framework": framework_of(context).name,
        "dtype": "bf16",
        "sharding": Sharding(context.sharding or "none"),
        "context": 1,
        **fields,
    }
    return make_recipe(**values)
