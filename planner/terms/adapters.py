"""adapters: LoRA matrices, modules_to_save copies, and what stays of a policy to compare with."""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.errors import UnsupportedError
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.counts import adapters, lora_of, rest_width
from planner.terms.shards import adapter_shard
from planner.terms.term import Term
from planner.terms.weights import trained_width

OWN_ADAPTERS = frozenset({"llamafactory", "ms-swift", "megatron", "torchtune", "litgpt"})
"""Frameworks that do not hand `targets` to PEFT as they are: they list linears, or have LoRA of their own."""


def pissa_work(model: ModelSpec, r: Resolved) -> Term:
    """Return what PiSSA's start needs in passing: one adapted weight at a time is decomposed in fp32.

    While it is: the weight, the solver's copy of it, U, S and V twice (V is handed on transposed), of
    which `pissa_niter_N` makes the first `rank` columns alone. At the end: the weight, BA and what is left.
    """
    work = 0
    for module in lora_of(model, r).adapted:
        rows, columns = module.out_features, module.in_features
        kept = module.rank if "niter" in r.lora_init else min(rows, columns)
        solving = 2 * rows * columns + kept * (rows + 2 * columns + 1)
        factors = module.rank * (rows + columns)
        work = max(work, 4 * max(solving, 3 * rows * columns + factors))
    return Term(
        "overhead",
        work,
        "PiSSA: the largest adapted weight in fp32, with its decomposition {0:,} B",
        (work,),
        "trainer/adapters.py start_pissa; aten linalg_svd",
    )


class Group(NamedTuple):
    """Trained parameters of one width."""

    parameters: int
    width: int
    """Bytes of a parameter, and of its gradient unless somebody says otherwise."""


def _refuse_expert_dropout(model: ModelSpec, r: Resolved) -> None:
    """Refuse dropout of adapters on fused experts: PEFT adds their product to the weights.

    peft 0.21 tuners/lora/layer.py, ParamWrapper: "does not work with lora_dropout != 0".
    """
    if not r.lora_dropout or r.linear_experts or r.framework.family in OWN_ADAPTERS:
        return
    if r.target_parameters or adapters(model, r).experts != (0, 0):
        raise UnsupportedError(
            f"lora.dropout: {r.lora_dropout:g}, but PEFT has no dropout for fused experts",
            hint="0, or leave the experts out of lora.targets and lora.target_parameters",
        )


def lora(model: ModelSpec, r: Resolved) -> Term:
    """Return the adapters' bytes; 0 for full fine-tuning."""
    if r.method is Method.FULL or not r.trains:
        return Term("adapters", 0)
    _refuse_expert_dropout(model, r)
    counts = adapters(model, r)
    width, whole = element_bytes(r.adapter_dtype), rest_width(r)
    saved, biases = counts.rest.saved_parameters, counts.rest.bias_parameters
    size = counts.parameters * width + saved * whole
    template = "{0:,} LoRA parameters of rank {1} in {2} modules x {3} B"
    args: tuple[object, ...] = (counts.parameters, r.lora_rank, counts.modules, width)
    if saved:
        template += " + copies of modules_to_save {4:,} x {5} B"
        args = (*args, saved, whole)
    if r.keeps_start:
        # the biases are the base's own; only what they were at the start is a copy
        size += size + biases * whole
        template += f", and all once more as they were at the start, with {{{len(args)}:,}} biases"
        args = (*args, biases)
    if r.placement.divides_adapters:
        ranks = r.placement.weight_shards
        held = adapter_shard(model, r, ranks) * width
        size = held + -(-(size - counts.parameters * width) // ranks)
        template += f" over {{{len(args)}}} ranks, each tensor in whole rows"
        args = (*args, ranks)
        if r.placement.offload.weights:
            size, template, args = 0, "on the host between uses: {0:,} B a rank", (size,)
    return Term(
        "adapters",
        size,
        template,
        args,
        "rank x (in + out) for each adapted linear, as PEFT makes them",
    )


def trained_groups(model: ModelSpec, r: Resolved) -> tuple[Group, ...]:
    """Return everything that gets a gradient, by width."""
    if not r.trains:
        return ()
    if r.method is Method.FULL:
        return (Group(model.parameters, trained_width(r)),)
    counts = adapters(model, r)
    adapted = Group(counts.parameters, element_bytes(r.adapter_dtype))
    rest = Group(counts.rest.parameters, rest_width(r))
    return (adapted, rest) if rest.parameters else (adapted,)


def trained_parameters(model: ModelSpec, r: Resolved) -> int:
    """Parameters that get gradients."""
    return sum(group.parameters for group in trained_groups(model, r))


def trains_head(model: ModelSpec, r: Resolved) -> bool:
    """Say whether the output head gets a gradient."""
    if not r.trains or r.method is Method.FULL:
        return r.trains
    return bool(r.modules_to_save) and adapters(model, r).rest.head


def trains_embedding(model: ModelSpec, r: Resolved) -> bool:
    """Say whether the input embedding is trained whole."""
    if not r.trains or r.method is Method.FULL:
        return r.trains
    return bool(r.modules_to_save) and adapters(model, r).rest.embedding


def trains_tied(model: ModelSpec, r: Resolved) -> bool:
    """Say whether embedding and head are one trained weight."""
    tied = model.tied and (r.method is Method.FULL or r.switches.ties_saved_modules)
    return tied and trains_head(model, r)
