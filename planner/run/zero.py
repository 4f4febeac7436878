"""DeepSpeed ZeRO's buffers: what a recipe, a framework's own configs and DeepSpeed itself say of them.

Sizes are in elements. DeepSpeed 0.19.6, runtime/zero/config.py (defaults), stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py; transformers 5.19, integrations/deepspeed.py (what "auto" becomes).
"""

from collections.abc import Mapping
from typing import NamedTuple

from planner.errors import UsageError
from planner.run.recipe import BucketsSection, Sharding

REDUCE = ALLGATHER = 500_000_000
PREFETCH = 50_000_000
LIVE = REUSE = SUB_GROUP = 1_000_000_000
PERSISTENCE = 100_000
AUTO_PREFETCH_TENTHS, AUTO_PERSISTENCE_ROWS = 9, 10
"""transformers: prefetch 0.9 x hidden x hidden, persistence 10 x hidden."""
STAGES: Mapping[Sharding, int] = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}
WINDOW_ONLY = ("prefetch", "live", "reuse", "persistence", "sub_group")


class Zero(NamedTuple):
    """The buffers of one rank, in elements."""

    partitions_gradients: bool
    """From stage 2 on a gradient leaves as soon as its bucket is full."""
    window: bool
    """Stage 3: weights are made whole tensor by tensor, up to `live` of them; the bucket and this
    rank's gradients are there from the start."""
    reduce: int
    buckets: int
    """Reduction buckets: two where they are filled while the other is reduced; 0 = none is made."""
    prefetch: int
    live: int
    reuse: int
    persistence: int
    sub_group: int
    dtype: str
    """In which gradients are reduced; "" = the weights'."""


def zero(
    sharding: Sharding,
    section: BucketsSection,
    preset: BucketsSection,
    hidden: int,
) -> Zero | None:
    """Return a scheme's buffers; None for one that is not DeepSpeed's.

    `preset`: what the framework's own DeepSpeed configs say, for what `section` leaves open.
    """
    stage = STAGES.get(sharding)
    if stage is None:
        return None
    autos = {
        "reduce": hidden * hidden,
        "prefetch": AUTO_PREFETCH_TENTHS * hidden * hidden // 10,
        "persistence": AUTO_PERSISTENCE_ROWS * hidden,
    }

    def elements(name: str, usual: int) -> int:
        for said in (getattr(section, name), getattr(preset, name)):
            if said == "auto":
                return autos[name]
            if said is not None:
                return int(said)
        return usual

    def flag(name: str, usual: bool) -> bool:
        found = [getattr(section, name), getattr(preset, name)]
        return next((bool(said) for said in found if said is not None), usual)

    window = stage == STAGES[Sharding.ZERO3]
    doubled = flag("overlap", usual=window) and not window
    copies = 2 if doubled else 1
    return Zero(
        partitions_gradients=stage > 1,
        window=window,
        reduce=elements("reduce", REDUCE),
        buckets=copies if flag("contiguous", usual=True) else 0,
        prefetch=elements("prefetch", PREFETCH),
        live=elements("live", LIVE),
        reuse=elements("reuse", REUSE),
        persistence=elements("persistence", PERSISTENCE),
        sub_group=elements("sub_group", SUB_GROUP),
        dtype=section.dtype or preset.dtype or "",
    )


def check(sharding: Sharding, section: BucketsSection) -> None:
    """Refuse what the scheme has no buffer for; raises UsageError naming the field."""
    said = [name for name in type(section).model_fields if getattr(section, name) is not None]
    if not said:
        return
    stage = STAGES.get(sharding)
    if stage is None:
        raise UsageError(
            f"buckets.{said[0]}: {sharding.value} is not DeepSpeed's", hint="zero1, zero2 or zero3"
        )
    wrong = [name for name in said if name in WINDOW_ONLY]
    if wrong and stage != STAGES[Sharding.ZERO3]:
        raise UsageError(
            f"buckets.{wrong[0]}: {sharding.value} divides no weights", hint="zero3 does"
        )
