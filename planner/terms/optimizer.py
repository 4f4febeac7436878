"""optimizer: states between steps, and the temporaries of the step itself."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, prod
from typing import NamedTuple

from planner.models.rank_part import parameters_by_kind
from planner.models.spec import ModelSpec, ModuleSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.adapters import Group, trained_groups
from planner.terms.counts import BLOCK_8BIT, SMALL_TENSOR, adapters
from planner.terms.optimizer_kinds import KINDS
from planner.terms.shards import trained_share
from planner.terms.step_scratch import bundles, states_away
from planner.terms.term import Term
from planner.terms.zero import step_copies


class OptimizerCosts(NamedTuple):
    """States, host states and the step's temporaries."""

    states: Term
    host: Term
    step: Term


def optimizer(model: ModelSpec, r: Resolved) -> OptimizerCosts:
    """Return the optimizer's bytes on one GPU."""
    groups = trained_groups(model, r)
    count = sum(group.parameters for group in groups)
    shards = r.placement.state_shards
    kind = KINDS[r.optimizer]
    states = kind.states
    masters = sum(group.parameters * _master(r, group) for group in groups)
    wide = sum(group.parameters * state_width(r, group.width) for group in groups)
    if kind.eight_bit:
        small = _small(model, r)
        size = int((count - small) * states * (1 + 4 / BLOCK_8BIT)) + small * states * 4
    elif kind.factored:
        size = _factored(model, r)
    else:
        size = int(wide * states)
    share = trained_share(model, r, shards)
    routed = _routed(model, r)
    size = _of_a_rank(size + masters, share, routed / max(1, count), r)
    each = (size * shards / max(1, count)) if not routed else (masters + wide * states) / count
    text = "{0:,} trained parameters x {1:.6g} B ({2} state(s), master copy {3} B) / {4} shard(s)"
    if routed:
        text = "({5:,} parameters / {4} + {6:,} of experts / {7}) x {1:.6g} B ({2} state(s), master copy {3} B)"
    args = (count, each, states, _master(r, groups[0]) if groups else 0, shards)
    term = Term(
        "optimizer",
        size,
        text,
        (*args, count - routed, routed, expert_holders(r)),
        f"{r.optimizer}: states as wide as the parameter; 8-bit ones with a scale for 256 elements",
    )
    nothing = Term("optimizer", 0)
    own = bundles(model, r) if r.switches.step_scratch_bytes else nothing
    if states_away(r):  # paged ones are evicted to the host when pressed
        return OptimizerCosts(nothing, term, own)
    # foreach AdamW holds sqrt(exp_avg_sq) of every parameter at once
    step = int(wide * share) if kind.square_roots else 0
    if r.placement.zero is not None:
        return OptimizerCosts(term, nothing, _flattened(model, r, square_roots=kind.square_roots))
    if r.switches.step_scratch_bytes:
        return OptimizerCosts(term, nothing, own)
    return OptimizerCosts(
        term,
        nothing,
        Term(
            "optimizer",
            step,
            "{0:,} x {1:.6g} B: foreach sqrt of the second moment",
            (count // shards, wide / max(1, count)),
            "torch.optim.adamw _multi_tensor_adamw",
        ),
    )


def _flattened(model: ModelSpec, r: Resolved, *, square_roots: bool) -> Term:
    """Return the copies of DeepSpeed's step."""
    size, at_once = step_copies(model, r, square_roots=square_roots)
    return Term(
        "optimizer",
        size,
        "{0:,} elements of 1 / {1} at once: fp32 gradients, with what they are made of or the roots {2:,} B",
        (at_once, r.placement.state_shards, size),
        "DeepSpeed runtime/zero: _prepare_fp32_grad_for_sub_group; stage_1_and_2.py: step",
    )


def _routed(model: ModelSpec, r: Resolved) -> int:
    """Return the experts' parameters where their states are divided over other ranks than the rest's."""
    apart = r.layout.expert * r.layout.expert_tensor > 1 and r.placement.state_shards > 1
    return parameters_by_kind(model)[1] if apart and r.method is Method.FULL else 0


def expert_holders(r: Resolved) -> int:
    """Return the ranks that divide the states of the experts that all of them hold."""
    return max(1, r.layout.expert_data // r.layout.data_replicate)


def _of_a_rank(size: int, share: Fraction, routed: float, r: Resolved) -> int:
    """Return one rank's bytes of states; `routed`: the experts' part, which their own ranks divide."""
    experts = int(size * routed)
    if not experts:
        return ceil(size * share)
    return ceil((size - experts) * share) + -(-experts // expert_holders(r))


def _master(r: Resolved, group: Group) -> int:
    """Bytes of the fp32 copy that the optimizer keeps of one parameter."""
    return 4 if r.master_weights and group.width < 4 else 0


def state_width(r: Resolved, width: int) -> int:
    """Bytes of a state's element of a parameter of `width` bytes."""
    masters = r.master_weights and width < 4
    return 4 if masters or r.switches.fp32_optimizer_state else width


def _small(model: ModelSpec, r: Resolved) -> int:
    """Parameters 8-bit optimizers keep in 32 bit: tensors under 4096 elements, HF's embeddings."""
    if r.method is not Method.FULL:
        return adapters(model, r).small
    small: int = sum(
        times * module.count * prod(shape)
        for module, times in _modules(model)
        for shape in module.shapes
        if prod(shape) < SMALL_TENSOR
    )
    if r.switches.embeddings_32bit_state:
        small += sum(
            module.parameters
            for module in model.embeddings
            if module.weight_parameters >= SMALL_TENSOR
        )
    return small


def _factored(model: ModelSpec, r: Resolved) -> int:
    """Adafactor: a row and a column statistic in fp32 for every matrix."""
    if r.method is not Method.FULL:
        return 4 * adapters(model, r).factored
    total = 0
    for module, times in _modules(model):
        for shape in module.shapes:
            factored = sum(shape[-2:]) * max(1, _leading(shape)) if len(shape) >= 2 else shape[0]
            total += 4 * times * module.count * factored
    return total


def _leading(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape[:-2]:
        product *= size
    return product


def _modules(model: ModelSpec) -> Iterator[tuple[ModuleSpec, int]]:
    for module in (*model.embeddings, *model.final, *model.towers):
        yield module, 1
    if model.head is not None and not model.tied:
        yield model.head, 1
    for layer in model.layers:
        for module in layer.modules:
            yield module, layer.count
