"""Rules for weights, gradients and optimizer states: loading, casting, gathering, saving, not fitting."""

import re
from dataclasses import replace

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.state import (
    kbit_upcast_bytes,
    saved_bytes,
    standing_of,
    static_state,
    trains_at_all,
    weights_bytes,
)
from planner.run.recipe import LoraSection
from planner.units import format_bytes

_TRAINED_HEAD = re.compile(
    r"(?:train\w*|modules_to_save|additional_target|target\w*)[^\n]{0,60}(?:embed\w*|lm_head)",
    re.IGNORECASE,
)


def _beyond_the_card(signals: Signals, more: int | None) -> bool:
    """Return whether the plan's standing bytes of one rank and `more` exceed the card: then nothing else is needed to run out."""
    context, card = signals.context, signals.card_bytes
    if not more or not card or context.model is None or not context.method:
        return False
    if context.sharding and "gpus" not in context.numbers:
        return False  # a rank's share is not known
    held = standing_of(context)
    return held is not None and held.total + more > card


def upcast(signals: Signals) -> Cause | None:
    """Something went to fp32: norms and embeddings, or a trained head."""
    context = signals.context
    head = context.model
    if signals.first("kbit_prepare"):
        size, found = kbit_upcast_bytes(context), signals.candidate("weight")
        tensor = bool(found and found is signals.candidates[0] and "fp32" in found.name)
        formula = f"embeddings, head and norms in fp32: {format_bytes(size)}" if size else ""
        return Cause(
            category="upcast_fp32",
            certainty=Certainty.PROVEN if formula and tensor else Certainty.CONSISTENT,
            explanation="prepare_model_for_kbit_training casts everything left in 16 bit to fp32: embeddings and head (the norms are about a MiB), and the residual stream with them.",
            formula=formula,
        )
    if (
        context.method in ("lora", "qlora")
        and _TRAINED_HEAD.search(context.text)
        and not signals.first("vocab", "load", "save")
    ):
        formula = ""
        if head:
            modules = ("embed_tokens",) if head.tied else ("embed_tokens", "lm_head")
            trained = {"lora": LoraSection(modules_to_save=modules)}
            more = saved_bytes(context, **trained)
            formula = f"with gradients and states: {format_bytes(-more)}" if more else ""
        return Cause(
            category="upcast_fp32",
            certainty=Certainty.CONSISTENT,
            explanation="training embed_tokens or lm_head beside the adapters makes them fp32 with gradients and Adam states.",
            formula=formula,
        )
    return None


def optimizer_temp(signals: Signals) -> Cause | None:
    """AdamW's multi-tensor temporaries."""
    if not signals.first("optimizer_temp"):
        return None
    found = signals.candidate("weight", "partition")
    return Cause(
        category="optimizer_temp",
        certainty=Certainty.PROVEN
        if found and _beyond_the_card(signals, found.bytes)
        else Certainty.CONSISTENT,
        explanation="the foreach AdamW makes about one extra copy of the parameters while it steps.",
        formula=found.formula if found else "",
    )


def optimizer_states(signals: Signals) -> Cause | None:
    """Adam moments, allocated at the first step or by the engine's start."""
    if not signals.first("optimizer_init", "optimizer_states"):
        return None
    found, state = signals.candidate("partition"), static_state(signals.context)
    return Cause(
        category="optimizer_states",
        certainty=Certainty.CONSISTENT,
        explanation="optimizer states (and fp32 masters) are allocated here, before or at the first step: the shard of the static state does not fit, whatever the batch."
        + (
            " The request is a flat copy of ALL parameters on one rank: nothing divides it among the ranks."
            if found and "on one rank" in found.name
            else ""
        ),
        formula=found.formula if found else state.formula if state else "",
    )


def whole_model(signals: Signals) -> Cause | None:
    """Loading or moving a whole model to one GPU."""
    if not signals.first("load", "module_to"):
        return None
    context, card = signals.context, signals.card_bytes
    weights = weights_bytes(context)
    exceeds = bool(weights and card and weights > card and context.model)
    found = signals.candidate("weight")
    parts = (
        [f"one copy {format_bytes(weights)}, card {format_bytes(card)}"] if weights and card else []
    )
    parts += [found.formula] if found else []
    many = (
        context.gpus > 1
        or context.sharding in ("zero3", "fsdp", "ddp")
        or (signals.event is not None and len(signals.event.ranks) > 1)
    )
    many = many or bool(signals.event and signals.event.cuda and (signals.event.cuda.gpu or 0) > 0)
    told = many or "gpus" in context.numbers  # whether other ranks hold copies too is known
    if many:
        category = "full_copy_per_gpu"
        explanation = "every rank puts a whole copy of the weights on its GPU: sharding was not active when the model was loaded."
    elif (
        card and context.task in ("sft", "grpo", "dpo", "ppo") and not trains_at_all(context, card)
    ):
        category = "static_state"
        explanation = "the base weights alone fill the card, whatever the batch or the rank: context, gradients and activations come on top."
    else:
        category, explanation = (
            "weights",
            "the weights themselves fill the card while they are placed.",
        )
    return Cause(
        category=category,
        certainty=Certainty.PROVEN if exceeds and told else Certainty.CONSISTENT,
        explanation=explanation,
        formula="; ".join(parts),
    )


def gathered(signals: Signals) -> Cause | None:
    """Sharded parameters gathered in full, or one FSDP layer."""
    context = signals.context
    layer = signals.candidate("layer")
    sharded = context.sharding in ("zero3", "fsdp", "fsdp2")
    in_generation = signals.first("generation") and context.sharding == "zero3"
    sized = bool(
        layer
        and sharded
        and signals.candidates[0] is layer
        and signals.first("forward", "backward", "unit_gather")
    )
    one_layer = sized or bool(signals.first("unit_gather"))
    if not (signals.first("gather") or in_generation or one_layer):
        return None
    weights = weights_bytes(context)
    formula = (
        layer.formula
        if layer and sized
        else f"{format_bytes(weights)} on every GPU"
        if weights
        else ""
    )
    card = signals.card_bytes
    whole = bool(weights and card and weights > card and context.model)
    exceeds = (
        whole if not one_layer else bool(layer) and _beyond_the_card(signals, signals.tried_bytes)
    )
    return Cause(
        category="gather_full_params",
        certainty=Certainty.PROVEN if exceeds else Certainty.CONSISTENT,
        explanation="one sharded layer is gathered to be computed with, and there was no room for it."
        if one_layer
        else "all sharded parameters are gathered on every GPU"
        + (" for generation." if in_generation else ", whole and at once."),
        formula=formula,
    )


def saving(signals: Signals) -> Cause | None:
    """A full state dict on the GPU."""
    if not signals.first("save"):
        return None
    found, weights = signals.candidate("weight", "layer"), weights_bytes(signals.context)
    return Cause(
        category="save_full_state",
        certainty=Certainty.PROVEN if _beyond_the_card(signals, weights) else Certainty.CONSISTENT,
        explanation="saving gathers or clones the full parameters on the GPU: the peak is in the save, after hours of quiet training.",
        formula=found.formula
        if found
        else f"{format_bytes(2 * weights)} in fp32"
        if weights
        else "",
    )


def does_not_fit(signals: Signals) -> Cause | None:
    """Weights, gradients and optimizer alone exceed the card."""
    context, card = signals.context, signals.card_bytes
    lead = signals.candidates[0] if signals.candidates else None
    if not context.method and lead and lead.kind == "weight" and signals.first("backward"):
        context = replace(context, method="full")  # a weight's gradient: the base is trained
    state = static_state(context)
    if state is None or card is None or (not context.method and context.task != "ppo"):
        return None
    sure = state.exact and (
        (bool(signals.context.method) and state.low_bytes > card)
        or (signals.context.mixed_fp32 and state.high_bytes > card)
    )
    near = state.high_bytes > card
    if not near:
        return None
    return Cause(
        category="static_state",
        certainty=Certainty.PROVEN if sure else Certainty.CONSISTENT,
        explanation="weights, gradients and optimizer states alone exceed the card: no batch size or length helps.",
        formula=f"{state.formula} > {format_bytes(card)}",
    )
