"""Bytes in, bytes out: the only place in vramwise that knows what a GiB is."""

import re

from planner.errors import UsageError

KiB = 1024
MiB = 1024**2
GiB = 1024**3
TiB = 1024**4
GB = 1000**3
"""Decimal gigabyte: only to read or quote a source that prints it."""

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": GB,
    "tb": 1000**4,
    "k": KiB,
    "m": MiB,
    "g": GiB,
    "t": TiB,
}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")
MOST_GIB = 65536
"""A bare number up to here is of GiB where a memory is meant: nobody has a card of so few bytes."""
MAX_BYTES = 2**60
"""One EiB: nothing a planner is asked about is larger."""


def parse_bytes(text: str, *, field: str = "size") -> int:
    """Return the bytes that `text` says, for example "24GiB", "16 GB", "512MiB" or "1024".

    GiB/MiB are binary and GB/MB decimal; a bare letter (24G) is binary, as torch and
    nvidia-smi print it. Raises UsageError naming `field`, the value and what is allowed.
    """
    match = _PATTERN.match(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise UsageError(
            f"{field}: cannot read {text[:40]!r} as a size",
            hint="write a number and a unit, for example 24GiB, 80GB or 512MiB",
        )
    amount = float(match.group(1)) * _UNITS[unit]
    if not 0 < amount <= MAX_BYTES:
        raise UsageError(
            f"{field}: {text[:40]} is outside what is allowed", hint="more than 0 and at most 1 EiB"
        )
    return int(amount)


def parse_memory(text: str, *, field: str = "size") -> int:
    """Return the bytes of a card's or a host's memory: as parse_bytes, and a bare small number is GiB ("24")."""
    plain = text.strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", plain) and float(plain) <= MOST_GIB:
        plain += "GiB"
    return parse_bytes(plain, field=field)


def parse_count(text: str, *, field: str = "count") -> int:
    """Return a count as people type it: "8192", "8,192", "8k" (8,192), "128K", "1M"."""
    match = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    factor = {"": 1, "k": 1024, "m": 1024**2}
    amount = 0.0
    if match is not None:
        amount = float(re.sub("[_,]", "", match.group(1))) * factor[match.group(2).lower()]
    if match is None or amount != int(amount):
        raise UsageError(
            f"{field}: cannot read {text[:40]!r} as a whole number",
            hint="for example 8192 or 8k",
        )
    return int(amount)


def format_bytes(num_bytes: int, *, digits: int = 2) -> str:
    """Return `num_bytes` for a person: '14.96 GiB', '-3.2 MiB', '512 B'."""
    size = abs(num_bytes)
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        # TiB only from 10 TiB on: people compare cards in GiB
        if size >= (10 * unit if unit == TiB else unit):
            return f"{num_bytes / unit:.{digits}f} {name}"
    return f"{num_bytes} B"


def to_gib(num_bytes: int) -> float:
    """Return `num_bytes` in GiB, for tables and charts."""
    return num_bytes / GiB
