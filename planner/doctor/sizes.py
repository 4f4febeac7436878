"""Sizes as logs print them, and how PyTorch's allocator rounds what it prints."""

import re
from decimal import ROUND_HALF_UP, Decimal
from functools import cache

from planner.allocator.caching import (
    AllocatorConfig,
    CachingAllocator,
    allocation_size,
    read_intervals,
)
from planner.units import GB, GiB, KiB, MiB, TiB

SIZE = r"(?<![\d.])(\d{1,20}(?:\.\d{1,9})?)\s{0,4}(bytes|B|[KMGT]i?B)(?![A-Za-z])"
_UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
    "KB": 1000,
    "MB": 1000**2,
    "GB": GB,
    "TB": 1000**4,
}
_SIZE = re.compile(SIZE)


def size_bytes(number: str, unit: str) -> int:
    """Return the bytes of a printed size."""
    amount = Decimal(number) * _UNITS[unit]
    return int(amount.quantize(Decimal(1), rounding=ROUND_HALF_UP))


def parse_size(text: str) -> int | None:
    """Return the bytes of the first size in `text`, or None."""
    match = _SIZE.search(text)
    return size_bytes(match.group(1), match.group(2)) if match else None


PLAIN = CachingAllocator()
"""The allocator without any setting."""


def segment_bytes(request: int, allocator: CachingAllocator = PLAIN) -> int:
    """Return the segment that torch's allocator, as configured, asks the driver for when nothing it has fits."""
    return allocation_size(allocator.round_size(request))


@cache
def allocator_of(divisions: str) -> CachingAllocator:
    """Return the allocator of a framework that rounds blocks up by these divisions of a power of two."""
    return CachingAllocator(AllocatorConfig(interval_divisions=read_intervals(divisions)))


def printed(num_bytes: int) -> str:
    """Return `num_bytes` as PyTorch's format_size prints it."""
    if num_bytes <= KiB:
        return f"{num_bytes} bytes"
    for limit, unit, name in ((MiB, KiB, "KiB"), (GiB, MiB, "MiB")):
        if num_bytes <= limit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / GiB:.2f} GiB"


def printed_window(text: str) -> int:
    """Return how many bytes wide the last printed digit of a size is."""
    match = _SIZE.search(text)
    if match is None:
        return 0
    decimals = len(match.group(1).partition(".")[2])
    return max(1, int(_UNITS[match.group(2)] / 10**decimals))
