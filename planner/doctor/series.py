"""A log's own memory figures from step to step: a leak, long samples, or fragmentation.

Three shapes tell them apart. A leak adds about the same to what tensors hold at every step. Long
samples raise it where the batch is longer, so memory follows the length the log prints beside it,
or sets ever fewer records. Fragmentation leaves what tensors hold as it is while the reserve grows.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log

from planner.doctor.fits import MAX_POINTS, Thinned, line_fit
from planner.units import GB, GiB, MiB

MAX_LINE = 4096
MAX_NAMES = 16
MAX_BLOCK_LINES = 64
MIN_POINTS = 3
MIN_RECORDS = 8
"""Figures below which a few jumps say nothing."""
RISE = 0.1
"""Share of the first figure that memory must have grown by; less is ordinary unevenness."""
STEADY = 0.8
"""Share of the steps that must add, and of the variance that a straight line must explain."""

_UNIT = {"gb": GB, "gib": GiB, "g": GiB, "mb": 10**6, "mib": MiB, "m": MiB}
_FIGURE = re.compile(
    rb"(?:mem|MEM|Mem|alloc|reserved|VRAM|vram|max_active|\bMA(?= \d))(?P<rest>[\w/.():-]{0,24}(?: ?\(\w{1,4}\)| used| usage| allocated)?)"
    rb"['\"]?\s{0,3}[:= ]\s{0,3}(?:cuda:\d+ )?['\"]?(?P<value>\d{1,6}(?:\.\d{1,6})?) ?(?P<unit>[GMgm]i?[Bb])?(?![\w.])"
)
_BEFORE = re.compile(rb"[\w/.-]{0,40}$")
_LENGTH = re.compile(
    rb"(?P<key>(?:seq_?len|sequence_length|num_tokens|response_length/max|prompt_length/max|total_length/max"
    rb"|completions/max_length|max_length|max_size:\w+|tokens|global_seqlen/max|longest)\w{0,16})"
    rb"['\"]?\s{0,3}[:= ]\s{0,3}['\"]?(?P<value>\d{1,8}(?:\.\d{1,4})?)(?![\w.])"
)
_LENGTHS = (b"len", b"tokens", b"max_size:", b"longest")
"""What each of its names has: a cheap test."""
_CHAIN = re.compile(
    r"\d{1,5}(?:\.\d{1,3})? ?(?:Gi?B|G)?(?: ?(?:->|=>|\u2192) ?\d{1,5}(?:\.\d{1,3})? ?(?:Gi?B|G)?){2,}",
    re.IGNORECASE,
)
_WORDS = (b"mem", b"Mem", b"MEM", b"alloc", b"VRAM", b"vram", b" MA ")
_TOLD = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch)s?[ #:=]{1,3}(\d{1,6})\b[^\n\d]{0,40}?(\d{1,3}(?:\.\d{1,2})?) ?(?:Gi?B|G)\b",
    re.IGNORECASE,
)
_OUTSIDE = (
    b"ried to allocate",
    b"Memory on the node",
    b"KV cache",
    b"CPU Virtual",
    b"Load weight",
    b"took",
)
_RESERVED = re.compile(rb"reserv|cached", re.IGNORECASE)
_HOST = re.compile(rb"cpu|host|rss|ram\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What the figures show."""

    kind: str
    """leak, length, records (a peak that rises in ever fewer jumps), reserve, unclear."""
    first_bytes: int
    last_bytes: int
    points: int
    per_step_bytes: int
    host: bool = False
    """The figures are of host memory."""

    def sentence(self) -> str:
        """Return the fit in words."""
        first, last = (f"{size / GiB:.1f}" for size in (self.first_bytes, self.last_bytes))
        each = f"{self.per_step_bytes / GiB:.2g}"
        return f"{self.points} figures, {first} to {last} GiB: {each} GiB a step"

    def cannot_tell(self) -> str:
        """Return that the figures grow without a shape, and what would tell."""
        where = "host memory" if self.host else "memory"
        return (
            f"the log's own {where} figures grow ({self.points} figures, {self.first_bytes / GiB:.1f} to {self.last_bytes / GiB:.1f} GiB), but neither"
            " evenly nor with a printed length nor in the reserve alone: a leak, long samples and fragmentation cannot be told apart by them"
        )


@dataclass
class Series:
    """Collects the figures of a log block by block; memory stays bounded."""

    tracks: dict[bytes, Thinned[tuple[float, float | None]]] = field(default_factory=dict)
    """Name -> (bytes, the length printed beside it)."""
    chain: tuple[float, ...] = ()
    taken: int = 0
    """Lines that were read for figures."""

    def feed(self, block: bytes) -> None:
        """Take the figures of a block of whole lines, of the first lines with any."""
        most = MAX_BLOCK_LINES if self.taken < MAX_POINTS else MAX_BLOCK_LINES // 4
        starts = sorted({start for word in _WORDS for start in _lines_with(word, block, most)})
        for start in starts[:: 1 + len(starts) // most]:
            end = block.find(b"\n", start)
            line = block[start : end if end >= 0 else len(block)]
            if len(line) < MAX_LINE:
                self.taken += 1
                self._line(line)

    def _line(self, line: bytes) -> None:
        if any(word in line for word in _OUTSIDE):
            return
        length: float | None = None
        if any(word in line for word in _LENGTHS) and (found := _LENGTH.search(line)):
            length = float(found["value"])
        for match in _FIGURE.finditer(line):
            before = _BEFORE.search(line, max(0, match.start() - 40), match.start())
            whole = (before.group() if before else b"") + line[match.start() : match.end("rest")]
            unit = (match["unit"] or b"").decode().lower() or _unit_of(whole)
            key = _name(whole)
            if not unit or (key not in self.tracks and len(self.tracks) >= MAX_NAMES):
                continue
            value = float(match["value"]) * _UNIT[unit]
            self.tracks.setdefault(key, Thinned()).add((value, length))

    def prose(self, text: str) -> None:
        """Take a chain that a person wrote: 47 -> 67 -> 87 GB."""
        for match in _CHAIN.finditer(text):
            if "g" in match.group().lower():
                figures = re.findall(r"\d+(?:\.\d+)?", match.group())
                self.chain = tuple(float(figure) * GiB for figure in figures)
                return
        told = {int(step): float(size) * GiB for step, size in _TOLD.findall(text)}
        if len(told) >= MIN_POINTS and not self.tracks:
            self.chain = tuple(size for _, size in sorted(told.items()))

    def growth(self) -> Growth | None:
        """Return what the figures show, or None when they say nothing."""
        if self.chain:
            return _leak(self.chain, host=False)
        rows = [
            (key, track.points)
            for key, track in sorted(self.tracks.items(), key=lambda row: -row[1].seen)
            if len(track.points) >= MIN_POINTS
        ]
        held = [(key, points) for key, points in rows if not _RESERVED.search(key)]
        for key, points in held:
            values = [value for value, _ in points]
            lengths = [length for _, length in points if length is not None]
            if len(lengths) == len(values) and (found := _by_length(values, lengths)):
                return found
            if found := _leak(values, host=bool(_HOST.search(key))):
                return found
        for key, points in rows:
            if _RESERVED.search(key) and (
                found := _leak([value for value, _ in points], host=False)
            ):
                return replace(found, kind="reserve") if held else found
        for key, points in held:
            values = [value for value, _ in points]
            if found := _records(values) or _unclear(values, host=bool(_HOST.search(key))):
                return found
        return None


def _lines_with(word: bytes, block: bytes, most: int) -> Iterator[int]:
    """Yield where lines begin that hold the word; of very many, about `most` at even distances."""
    at = block.find(word)
    stride = len(block) // most if at >= 0 and block.count(word) > 4 * most else 0
    while at >= 0:
        yield block.rfind(b"\n", 0, at) + 1
        end = block.find(b"\n", max(at, min(at + stride, len(block) - 1)))
        at = block.find(word, end) if end >= 0 else -1


def _name(key: bytes) -> bytes:
    return re.sub(rb"[^A-Za-z]", b"", key)[-40:]


def _unit_of(key: bytes) -> str:
    found = re.search(rb"[_( /](gi?b|mi?b)\b", key, re.IGNORECASE)
    return found.group(1).decode().lower() if found else ""


def _leak(row: Sequence[float], *, host: bool) -> Growth | None:
    steps = [after - before for before, after in pairwise(row)]
    if row[0] <= 0 or len(row) < MIN_POINTS or row[-1] - row[0] < max(RISE * row[0], MiB):
        return None
    _, fit = line_fit([float(number) for number in range(len(row))], row)
    if sum(step > 0 for step in steps) < STEADY * len(steps) or fit < STEADY:
        return None
    return _plain("leak", row, host=host)


def _records(row: Sequence[float]) -> Growth | None:
    """Return a peak's growth in jumps: of n batches of any length about ln(n) are longer than all before."""
    rises = [number for number, (before, after) in enumerate(pairwise(row), 1) if after > before]
    never_falls = all(after >= before for before, after in pairwise(row))
    late = [
        number for number in rises if number > len(row) // 10
    ]  # the first steps allocate states
    if not never_falls or len(row) < MIN_RECORDS or len(late) < 2:
        return None
    if len(rises) > 1 + 2 * log(len(row)) or row[-1] - row[0] < max(RISE * row[0], MiB):
        return None
    return _plain("records", row, host=False)


def _unclear(row: Sequence[float], *, host: bool) -> Growth | None:
    """Return growth that has none of the shapes, None where nothing grows."""
    third = max(1, len(row) // 3)
    first, last = sorted(row[:third])[third // 2], sorted(row[-third:])[third // 2]
    if first <= 0 or last - first < max(RISE * first, MiB):
        return None
    return _plain("unclear", row, host=host)


def _plain(kind: str, row: Sequence[float], *, host: bool) -> Growth:
    slope, _ = line_fit([float(number) for number in range(len(row))], row)
    return Growth(
        kind=kind,
        first_bytes=int(row[0]),
        last_bytes=int(row[-1]),
        points=len(row),
        per_step_bytes=int(slope),
        host=host,
    )


def _by_length(row: Sequence[float], lengths: Sequence[float]) -> Growth | None:
    low, high = min(row), max(row)
    if high - low < max(RISE * low, MiB):
        return None
    slope, fit = line_fit(lengths, row)
    if slope <= 0 or fit < STEADY or line_fit(list(range(len(row))), row)[1] > fit:
        return None
    return Growth(
        kind="length",
        first_bytes=int(low),
        last_bytes=int(high),
        points=len(row),
        per_step_bytes=int(slope * (max(lengths) - min(lengths)) / len(row)),
    )
