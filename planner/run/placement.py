"""What each rank holds of weights, gradients and states: decided here once, the terms read it.

A rank is one process on one GPU. The next ways to divide a run (data_replicate, tensor, sequence, pipeline,
context, expert) belong here as further fields: a term asks how many shards its tensor has, never by
which scheme.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from planner.run.recipe import Method, Sharding


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
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Shares of one rank. A divisor of 1 means the whole."""

    ranks: int
    """Processes of the run."""
    weight_shards: int
    gradient_shards: int
    state_shards: int
    gradient_copies: int
    """2 under DDP, which keeps its reduction buckets beside the gradients."""
    reduces: bool
    """Ranks reduce gradients: a parameter's own is written into a bucket or gone after its hook."""
    gathered_layers: int
    """Layers that are whole beside the root unit while one runs: 1, for with checkpointing the
    prefetch comes after the peak; 0 when weights are not divided."""
    fp32_shards: bool
    """FSDP under mixed precision holds trained weights in fp32 and gathers them in 16 bits."""
    holds_frozen_inputs: bool
    """FSDP1 watches a frozen unit's inputs with register_multi_grad_hook, which holds every layer's
    input and the input's gradient until the backward ends."""
    loads_whole: bool
    """Every rank has the whole model in memory before it is divided."""

    @property
    def gathers(self) -> bool:
        """True when weights are divided and made whole unit by unit."""
        return self.weight_shards > 1


@cache
def place(
    sharding: Sharding,
    ranks: int,
    *,
    method: Method,
    quantized: bool,
    autocast: bool,
    loads_whole: bool,
) -> Placement:
    """Return what each of `ranks` holds.

    `quantized`: of the base; `loads_whole`: the framework's loader does not divide.
    """
    divided = DIVIDES[sharding]
    fsdp, several = sharding is Sharding.FSDP, ranks > 1
    # adapters of another dtype than the quantised base stay outside FSDP
    trained_outside = fsdp and quantized
    return Placement(
        ranks=ranks,
        weight_shards=ranks if divided.weights else 1,
        gradient_shards=ranks if divided.gradients and not trained_outside else 1,
        state_shards=ranks if divided.states and not trained_outside else 1,
        gradient_copies=2 if sharding is Sharding.DDP and several else 1,
        reduces=several and sharding is not Sharding.NONE,
        gathered_layers=1 if divided.weights and several else 0,
        fp32_shards=fsdp and several and autocast,
        holds_frozen_inputs=fsdp and several and method is not Method.FULL,
        loads_whole=fsdp and several and loads_whole,
    )
