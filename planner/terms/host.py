"""Host memory of a node: what engines keep there of weights, gradients and states, buffer by buffer.

DeepSpeed at 007cca6 (runtime/zero/stage3.py) and 02aa38c (stage_1_and_2.py), the 0.18 line; torch 2.13
(distributed/fsdp/_flat_param.py, _fully_shard/_fsdp_param.py). Every rank is a process of its own and
has its own buffers.
"""

from collections.abc import Iterator
from math import ceil

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.activations import pinned
from planner.terms.adapters import trained_parameters
from planner.terms.counts import adapters, base_weights, rest_width
from planner.terms.gradients import gradient_width, largest_trained
from planner.terms.optimizer_kinds import KINDS
from planner.terms.shards import tensor_shards, trained_share
from planner.terms.term import Term
from planner.terms.weights import flat_units, trained_width

FP32 = 4
SWAP_BUFFERS = 4
"""offload_optimizer.buffer_count: parameter, gradient and two states (offload_config.py)."""
PARAMETER_BUFFERS, PARAMETER_BUFFER = 5, 10**8
"""offload_param.buffer_count and buffer_size, in elements (offload_config.py)."""
MAX_IN_CPU = 10**9
"""offload_param.max_in_cpu: elements that stay in host memory beside the disk (offload_config.py)."""
STAGE3 = "DeepSpeed stage3.py: _create_fp32_partitions, initialize_optimizer_states, _setup_for_real_optimizer"
STAGE2 = (
    "DeepSpeed stage_1_and_2.py: __init__, initialize_optimizer_states, accumulated_grads_in_cpu"
)
FSDP2 = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py: CPUOffloadPolicy"
FSDP = "torch.distributed.fsdp _flat_param.py: _local_shard and _cpu_grad, pinned"


def node_ranks(r: Resolved) -> int:
    """Return the processes that share one host."""
    return r.node_gpus


def host(
    model: ModelSpec,
    r: Resolved,
    states: Term,
    others: tuple[Term, ...],
    once: tuple[Term, ...] = (),
) -> tuple[Term, ...]:
    """Return what one node's host memory holds.

    `states`: of an optimizer that keeps its own there; `others`: further terms of one rank; `once`: those of
    the node.
    """
    engine = r.placement.offload.by
    if engine in ("zero", "zero3"):
        found = (*others, *_deepspeed(model, r))
    elif engine == "fsdp":
        found = (*others, *_fsdp(model, r, states))
    else:
        found = (*others, states)
    ranks = node_ranks(r)
    return (*(of_node(term, ranks) for term in found if term.bytes), *once)


def of_node(term: Term, ranks: int) -> Term:
    """Return what `ranks` processes of a node hold of a term each."""
    if ranks == 1:
        return term
    template = "{0} ranks on the node x {1:,} B: {2}"
    args = (ranks, term.bytes, term.formula)
    return Term(term.name, ranks * term.bytes, template, args, term.source)


def _buffer(size: int, r: Resolved) -> int:
    """Return the bytes of a buffer, page-locked or not."""
    return pinned(size, r) if r.offload.pinned else size


def _groups(model: ModelSpec, r: Resolved, elements: int) -> Iterator[int]:
    """Yield the elements of each flat group of stage 3."""
    size = _sub_group(model, r)
    while elements > 0:
        yield min(size, elements)
        elements -= size


def _sub_group(model: ModelSpec, r: Resolved) -> int:
    """Return elements of a flat group: at least a tensor's part."""
    zero = r.placement.zero
    assert zero is not None
    return max(zero.sub_group, -(-largest_trained(model, r) // r.placement.state_shards), 1)


def _deepspeed(model: ModelSpec, r: Resolved) -> Iterator[Term]:
    trained = trained_parameters(model, r)
    part = -(-trained // r.placement.state_shards)
    width = gradient_width(r) if r.method is not Method.FULL else element_bytes(r.dtype)
    stage3 = r.placement.offload.by == "zero3"
    if r.placement.offload.states and r.offload.device == "nvme":
        yield from _swapped(model, r, part, width)
    elif r.placement.offload.states:
        yield _states(r, part, stage3=stage3)
        yield _gradients(model, r, part, width, stage3=stage3)
        if not stage3:
            one = largest_trained(model, r)
            size = _buffer(width * part, r) + _buffer(width * one, r)
            yield Term(
                "weights",
                size,
                "16-bit copy of the shard {0:,} x {1} B + the largest gradient {2:,} x {1} B",
                (part, width, one),
                STAGE2,
            )
    if r.placement.offload.weights:
        yield _parameters(model, r, part)


def _states(r: Resolved, part: int, *, stage3: bool) -> Term:
    """Return the fp32 master and DeepSpeedCPUAdam's fp32 states of one rank."""
    count = KINDS[r.optimizer].states
    master = FP32 * part if stage3 else _buffer(FP32 * part, r)
    return Term(
        "optimizer",
        master + FP32 * count * part,
        "{0:,} parameters of the shard: fp32 master {1:,} B + {2} fp32 state(s) x {3} B",
        (part, master, count, FP32),
        STAGE3 if stage3 else STAGE2,
    )


def _gradients(model: ModelSpec, r: Resolved, part: int, width: int, *, stage3: bool) -> Term:
    """Return the fp32 gradients that the step reads, and those as they arrive."""
    if stage3:
        wide = sum(_buffer(FP32 * group, r) for group in _groups(model, r, part))
        arriving = _buffer(width * part, r)
    else:
        wide = _buffer(FP32 * part, r)
        arriving = width * part if r.grad_accum > 1 else 0  # accumulated_grads_in_cpu
    return Term(
        "gradients",
        wide + arriving,
        "{0:,} parameters of the shard: fp32 {1:,} B + as they arrive {2:,} B",
        (part, wide, arriving),
        STAGE3 if stage3 else STAGE2,
    )


def _swapped(model: ModelSpec, r: Resolved, part: int, width: int) -> Iterator[Term]:
    """Yield the buffers through which a step's states come from the disk and go back."""
    group = min(_sub_group(model, r), part)
    buffers = SWAP_BUFFERS * pinned(FP32 * group, r)
    disk = FP32 * part * (2 + KINDS[r.optimizer].states)
    yield Term(
        "optimizer",
        buffers,
        "{0} pinned swap buffers of {1:,} elements x {2} B; on the disk {3:,} B a rank",
        (SWAP_BUFFERS, group, FP32, disk),
        "DeepSpeed swap_tensor/optimizer_utils.py: SwapBufferManager; offload_config.py",
    )
    yield Term(
        "gradients",
        FP32 * group + _buffer(width * part, r),
        "fp32 of one group {0:,} x {1} B + as they arrive {2:,} x {3} B",
        (group, FP32, part, width),
        STAGE3,
    )


def _parameters(model: ModelSpec, r: Resolved, part: int) -> Term:
    """Return one rank's share of the weights as they are computed with."""
    width = element_bytes(r.dtype)
    size = -(-base_weights(model, r).total // r.placement.weight_shards)
    if r.offload.device == "nvme":
        kept = width * min(MAX_IN_CPU, part)
        pool = PARAMETER_BUFFERS * pinned(width * PARAMETER_BUFFER, r)
        return Term(
            "weights",
            min(size, kept) + pool,
            "{0:,} B stay + {1} pinned buffers of {2:,} elements; the others on the disk",
            (min(size, kept), PARAMETER_BUFFERS, PARAMETER_BUFFER),
            "DeepSpeed offload_config.py: max_in_cpu, buffer_count, buffer_size",
        )
    return Term(
        "weights",
        pinned(size, r) if r.offload.pinned is not False else size,
        "the shard of {0:,} B, pinned",
        (size,),
        "DeepSpeed stage3.py: _create_param_groups_fp16_flat_cpu_memory",
    )


def _fsdp(model: ModelSpec, r: Resolved, states: Term) -> Iterator[Term]:
    """Yield a rank's shards, their gradients and the states of an optimizer on the host."""
    if r.placement.flat_buffers:
        yield from _fsdp2(model, r, states)
        return
    full = r.method is Method.FULL
    width = trained_width(r) if full else element_bytes(r.dtype)
    base = base_weights(model, r)
    total = base.total if base.quantized else model.parameters * width
    shards = [_shard(total, part, model, r) for part in flat_units(model)]
    yield Term(
        "weights",
        sum(shards),
        "{0} flat shards of {1:,} B over {2} rank(s), pinned: each a power of two",
        (len(shards), total, r.placement.weight_shards),
        FSDP,
    )
    if full:
        yield Term(
            "gradients",
            sum(
                _shard(model.parameters * gradient_width(r), part, model, r)
                for part in flat_units(model)
            ),
            "{0:,} parameters x {1} B over {2} rank(s), pinned as the weights",
            (model.parameters, gradient_width(r), r.placement.gradient_shards),
            FSDP,
        )
    yield states


def _fsdp2(model: ModelSpec, r: Resolved, states: Term) -> Iterator[Term]:
    """Yield what CPUOffloadPolicy keeps: each parameter's shard pinned, gradients, states of the shard."""
    shards, template = r.placement.weight_shards, "{0:,} B on one of {1} rank(s)"
    full = r.method is Method.FULL
    width = trained_width(r) if full else rest_width(r)
    sizes = [*tensor_shards(model, r, width, shards)]
    if not full:
        adapter = element_bytes(r.adapter_dtype)
        sizes += [
            (-(-rows // shards) * columns * adapter, count)
            for rows, columns, count in adapters(model, r).matrices
        ]
    if r.offload.pinned is not False:
        sizes = [(pinned(size, r), count) for size, count in sizes]
    held = sum(size * count for size, count in sizes)
    yield Term("weights", held, template, (held, shards), FSDP2)
    share = trained_share(model, r, shards)
    made = ceil(trained_parameters(model, r) * gradient_width(r) * share)
    yield Term("gradients", made, template, (made, shards), FSDP2)
    yield states


def _shard(total: int, parameters: int, model: ModelSpec, r: Resolved) -> int:
    size = -(-total * parameters // (model.parameters * r.placement.weight_shards))
    return pinned(size, r) if r.offload.pinned is not False else size
