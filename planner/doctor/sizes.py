"""Sizes as logs print them, and how PyTorch's allocator rounds what it prints."""

import re
from decimal import ROUND_HALF_UP, Decimal

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

SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
MIN_LARGE = 10 * MiB
STEP = 2 * MiB


def size_bytes(number: str, unit: str) -> int:
    """Return the bytes of a printed size."""
    amount = Decimal(number) * _UNITS[unit]
    return int(amount.quantize(Decimal(1), rounding=ROUND_HALF_UP))


def parse_size(text: str) -> int | None:
    """Return the bytes of the first size in `text`, or None."""
    match = _SIZE.search(text)
    return size_bytes(match.group(1), match.group(2)) if match else None


def segment_bytes(request: int, *, power2_divisions: bool = False) -> int:
    """Return the segment the CUDA caching allocator asks the driver for.

    Source: c10/cuda/CUDACachingAllocator.cpp get_allocation_size: up to 1 MiB a 2 MiB
    segment, up to 10 MiB a 20 MiB one, larger requests round up to 2 MiB.
    `power2_divisions`: sizes are first rounded as under
    roundup_power2_divisions:[32:256,64:128,256:64,>:32].
    """
    size = max(512, -(-request // 512) * 512)
    if power2_divisions:
        size = _power2_rounded(size)
    if size <= MiB:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // STEP) * STEP


def _power2_rounded(size: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if floor == size:
        return size
    divisions = (
        256 if size <= 32 * MiB else 128 if size <= 64 * MiB else 64 if size <= 256 * MiB else 32
    )
    step = max(512, floor // divisions)
    return -(-size // step) * step


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
