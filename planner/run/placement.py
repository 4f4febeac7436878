"""What each rank holds of weights, gradients and states: decided here once, the terms read it.

A rank is one process on one GPU; the degrees of a layout come from planner/run/parallel.py. A term asks how
many shards its tensor has, never by which scheme.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from planner.run.parallel import ZERO
from planner.run.recipe import Method, Sharding
from planner.run.zero import Zero


class Divided(NamedTuple):
    """What a scheme divides among its ranks; the rest is on every one."""

    weights: bool
    gradients: bool
    states: bool


DIVIDES: Mapping[Sharding, Divided] = {
    Sharding.NONE: Divided(False, False, False),
    Sharding.DDP: Divided(False, False, False),
    Sharding.ZERO1: Divided(False, False, True),
    Sharding.ZERO2: Divided(False, True, True),
    Sharding.ZERO3: Divided(True, True, True),
    Sharding.FSDP: Divided(True, True, True),
    Sharding.FSDP2: Divided(True, True, True),
    Sharding.MEGATRON: Divided(False, False, True),
}


class Offload(NamedTuple):
    """What is in host memory between uses."""

    by: str
    """Whose code puts it there: zero (stages 1 and 2), zero3, fsdp, own; "" = nothing is."""
    weights: bool
    gradients: bool
    states: bool


NOTHING = Offload("", weights=False, gradients=False, states=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Shares of one rank. A divisor of 1 means the whole."""

    ranks: int
    """Processes of the run."""
    weight_shards: int
    gradient_shards: int
    state_shards: int
    buckets: bool
    """DDP's reduction buckets, as large as all gradients, are there from its construction on."""
    bucket_views: bool
    """Gradients are views of the buckets: no memory of their own."""
    reduces: bool
    """Ranks reduce gradients: a parameter's own is written into a bucket or gone after its hook."""
    replicas: int
    """Groups that hold the same shards: reduced gradients are summed over them."""
    keeps_over: int
    """Ranks over which FSDP2 divides a layer between its forward and its backward where those are fewer
    than all that shard: 1 = it stays whole, 0 = all."""
    gathered_layers: int
    """Layers that are whole beside the root unit while one runs: 1, for with checkpointing the
    prefetch comes after the peak; 0 when weights are not divided."""
    fp32_shards: bool
    """FSDP under mixed precision holds trained weights in fp32 and gathers them in 16 bits."""
    holds_frozen_inputs: bool
    """FSDP1 watches a frozen unit's inputs with register_multi_grad_hook, which holds every layer's
    input and the input's gradient until the backward ends."""
    flat_buffers: bool
    """FSDP2 gathers a unit through a flat buffer and copies it out, one allocation a parameter."""
    divides_adapters: bool
    """Adapters are units' parameters like any other: FSDP2 shards them, whatever the base."""
    loads_whole: bool
    """Every rank has the whole model in memory before it is divided."""
    offload: Offload
    """What waits in host memory."""
    zero: Zero | None
    """DeepSpeed's buffers; None where it is not at work."""

    @property
    def window(self) -> bool:
        """True when weights are made whole tensor by tensor, many at a time, not unit by unit."""
        return self.zero is not None and self.zero.window

    @property
    def gathers(self) -> bool:
        """True when weights are elsewhere in part, or of another dtype, and made whole unit by unit."""
        return self.weight_shards > 1 or self.offload.weights or self.flat_buffers


@cache
def place(
    sharding: Sharding,
    ranks: int,
    *,
    shards: int,
    replicas: int = 1,
    reshard: bool | int = True,
    method: Method,
    quantized: bool,
    autocast: bool,
    loads_whole: bool,
    bucket_views: bool = False,
    replicates_by_fsdp2: bool = False,
    offload: Offload = NOTHING,
    zero: Zero | None = None,
) -> Placement:
    """Return what each of `ranks` holds; groups of `shards` of them divide what the scheme divides.

    `replicas`: such groups; `reshard`: what FSDP2 does to a layer after its forward; `quantized`: of the
    base; `loads_whole`: the framework's loader does not divide.
    """
    divided = DIVIDES[sharding]
    fsdp, several = sharding is Sharding.FSDP, ranks > 1
    replicated = sharding is Sharding.DDP and several
    by_fsdp2 = sharding is Sharding.FSDP2 or (replicated and replicates_by_fsdp2)
    second = by_fsdp2 and several
    # adapters of another dtype than the quantised base stay outside FSDP
    trained_outside = fsdp and quantized
    return Placement(
        ranks=ranks,
        weight_shards=shards if divided.weights else 1,
        gradient_shards=shards if divided.gradients and not trained_outside else 1,
        state_shards=shards if divided.states and not trained_outside else 1,
        buckets=replicated and not by_fsdp2,
        bucket_views=replicated and not by_fsdp2 and bucket_views,
        replicas=replicas if second else 1,
        keeps_over=0 if not second or reshard is True or reshard == shards else int(reshard) or 1,
        reduces=(several and sharding is not Sharding.NONE) or offload.gradients,
        gathered_layers=1 if second or (divided.weights and (several or offload.weights)) else 0,
        fp32_shards=(fsdp or second) and several and autocast,
        holds_frozen_inputs=fsdp and several and method is not Method.FULL,
        flat_buffers=second,
        divides_adapters=second,
        loads_whole=fsdp and several and loads_whole,
        offload=offload,
        zero=zero if several or offload.by.startswith("zero") else None,
    )


@cache
def offloaded(
    sharding: Sharding, *, optimizer: bool, parameters: bool, quantized: bool, by: str
) -> Offload:
    """Return what a run keeps on the host.

    `optimizer`, `parameters`: what the recipe asks for; `by`: whose code keeps states there when no
    engine divides them. FSDP offloads a shard with its gradient and states, all or nothing
    (CPUOffload(offload_params=True), CPUOffloadPolicy); DeepSpeed moves reduced gradients to the
    host with the optimizer from stage 2 on (stage_1_and_2.py, stage3.py).
    """
    if sharding is Sharding.FSDP and parameters:
        # adapters on a quantised base stay outside FSDP, with their gradients and states
        return Offload("fsdp", weights=True, gradients=not quantized, states=not quantized)
    if sharding is Sharding.FSDP2 and parameters:
        return Offload("fsdp", weights=True, gradients=True, states=True)
    if optimizer or parameters:
        deepspeed = sharding in ZERO or by == "deepspeed"
        engine = ("zero3" if sharding is Sharding.ZERO3 else "zero") if deepspeed else by
        moves = deepspeed and optimizer and sharding is not Sharding.ZERO1
        return Offload(engine, weights=parameters, gradients=moves, states=optimizer)
    return NOTHING
