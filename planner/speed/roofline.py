"""Seconds of a pass: the device's time by class of operation, against the host's for starting them.

Products read and write their matrices and compute: both times are added, so that a product of few
rows reaches little of a large one's speed without a number of its own for every shape. Pointwise
operations take what their bytes take. The host starts kernels while earlier ones run: a pass takes the
longer of the two.
"""

from typing import NamedTuple

from planner.speed.cards import CardSpeed
from planner.speed.parameters import Parameters
from planner.speed.work import Pass

COMPUTE, BANDWIDTH, LINK, LAUNCHES, HOST = "compute", "bandwidth", "link", "launches", "host"


class Seconds(NamedTuple):
    """How long a pass takes, and what bounds it."""

    seconds: float
    bound_by: str


class Rates(NamedTuple):
    """What a card does a second, in one dtype."""

    products: float
    wide: float
    """In fp32."""
    attention: float
    bandwidth: float
    packed: float


def rates(card: CardSpeed, dtype: str, p: Parameters) -> Rates:
    """Return what a card reaches."""
    best, known = card.ceiling(dtype)
    best *= 1.0 if known else p.sheet
    wide, known = card.ceiling("fp32")
    wide *= 1.0 if known else p.sheet
    return Rates(
        products=best * p.product,
        wide=wide * p.product,
        attention=best * p.attention,
        bandwidth=card.bandwidth * p.bandwidth,
        packed=card.bandwidth * p.unpack,
    )


def seconds(work: Pass, speed: Rates, p: Parameters) -> Seconds:
    """Return how long a pass takes on a card of these rates."""
    computing = work.flops / speed.products + work.attention_flops / speed.attention
    if work.wide_flops:
        computing += work.wide_flops / speed.wide
    moving = (work.product_bytes + work.moved_bytes) / speed.bandwidth
    moving += work.packed_bytes / speed.packed
    starting = work.launches * p.launch_s
    if starting > computing + moving:
        return Seconds(starting, LAUNCHES)
    return Seconds(computing + moving, COMPUTE if computing >= moving else BANDWIDTH)
