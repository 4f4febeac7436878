"""Seconds of a pass: the device's time by class of operation, against the host's for starting them.

Products read and write their matrices and compute: both times are added, so that a product of few
rows reaches little of a large one's speed without a number of its own for every shape. Pointwise
operations take what their bytes take. The host starts kernels while earlier ones run: a pass takes the
longer of the two.
"""

from typing import NamedTuple

from planner.speed.cards import CPU, TERA, CardSpeed
from planner.speed.parameters import Parameters
from planner.speed.work import Pass

COMPUTE, BANDWIDTH, LINK, LAUNCHES, HOST = "compute", "bandwidth", "link", "launches", "host"


class Seconds(NamedTuple):
    """How long a pass takes, and what bounds it."""

    seconds: float
    bound_by: str


SHEET_SHARE = 4 / 5
"""The best matmul of a card on which none was measured, of its sheet's peak: the middle of the cards of
data/speed/matmul.csv is 0.82 (a test holds it)."""


class Rates(NamedTuple):
    """What a card does a second, in one dtype."""

    products: float
    wide: float
    """In fp32."""
    narrow: float
    """In float8."""
    attention: float
    bandwidth: float
    packed: float
    """Elements dequantised of 4- and 8-bit floats."""
    integer: float
    """And of packed integers."""
    waits: bool = False
    """The host computes itself: what starting an operation takes comes on top."""


LINK_SHARE = 4 / 5
"""What collectives and pinned copies reach of a link's one-way bandwidth: data/speed/links.csv has 235 of 300
GB/s (A100, 8 GPUs), 376 to 396 of 450 (H100, H200), 25 to 27 of 31.5 (PCIe 4), 55 to 57 of 63 (PCIe 5)."""


def rates(card: CardSpeed, dtype: str, p: Parameters, *, newest: bool = False) -> Rates:
    """Return what a card reaches; `newest`: attention of kernels made for it, like FlashAttention 3."""
    best, known = card.ceiling(dtype)
    best *= 1.0 if known else SHEET_SHARE
    wide, known = card.ceiling("fp32")
    wide *= 1.0 if known else SHEET_SHARE
    cores = card.peaks.get("fp32") or card.bandwidth
    narrow = card.peaks.get("fp8", 0.0) * SHEET_SHARE or best
    return Rates(
        products=best * p.product,
        wide=wide * p.product,
        narrow=narrow * p.product,
        attention=best * p.attention
        if newest
        else min(best * p.attention, p.attention_tflops * TERA),
        bandwidth=card.bandwidth * p.bandwidth,
        packed=cores * p.unpack,
        integer=cores * p.unpack_integer,
        waits=card.id == CPU,
    )


def seconds(work: Pass, speed: Rates, p: Parameters) -> Seconds:
    """Return how long a pass takes on a card of these rates."""
    computing = work.flops / speed.products + work.attention_flops / speed.attention
    computing += work.wide_flops / speed.wide + work.narrow_flops / speed.narrow
    moving = (work.product_bytes + work.moved_bytes) / speed.bandwidth
    moving += work.packed / speed.packed + work.integer / speed.integer
    starting = work.launches * p.launch_s + work.units * p.unit_s
    if speed.waits:
        moving += starting
    if starting > computing + moving:
        return Seconds(starting, LAUNCHES)
    return Seconds(computing + moving, COMPUTE if computing >= moving else BANDWIDTH)
