"""Reads logs of any size line by line: ANSI colours, progress bars and rank prefixes removed."""

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from typing import BinaryIO

from planner.doctor.anchors import DIGITS, NOTICES, shapes_of, spoken

BLOCK_BYTES = 1 << 18
WHOLE_BYTES = 2 * BLOCK_BYTES
"""How much of a log's beginning is read line by line: a run prints its settings there."""
BEFORE_BYTES, AFTER_BYTES = 32 << 10, 16 << 10
"""What is read around an anchor: a long traceback before it, the rest of a message behind it."""
MAX_WINDOWS = 32
"""Windows that are read around one anchor before its habits are trusted."""
MAX_SHAPES = 20_000
MAX_LINE = 16_384
"""Characters of one line that are looked at; a message is never longer."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIXES = (
    re.compile(
        r"^\s*\[(?:default)?(?:rank)?\s?(?P<rank>\d{1,4})\]:?(?:\s|(?=\[(?:rank|default)\d))",
        re.IGNORECASE,
    ),
    re.compile(r"^\s*rank:?\s{0,3}(?P<rank>\d{1,4})\s?[:|]\s?", re.IGNORECASE),
    re.compile(
        r"^\s*\((?P<rank>[A-Za-z_]\w{2,40}(?:[ _]?(?:rank|TP|DP|PP)\S*)*(?:,? (?:pid|ip)=\S+?)+)\)\s?"
    ),
    re.compile(r"^\s*(?P<rank>\d{1,4}):\s(?=\S)"),
)
_PREFIXED = 3
"""How many prefixes one line may have: a launcher's, Ray's and torch's own."""
_STARTS = tuple("[(rR0123456789")
"""How a rank's prefix begins."""
_STAMP = re.compile(r"\[?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,\d]{0,12}(?:Z|[+-]\d\d:?\d\d)\]?\s")
"""What GitHub, kubectl and Buildkite put before every line."""
_WRITTEN_ANSI = re.compile(r"(?:\\u001b|\\x1b|\\033|\^\[)\[[0-9;]{0,12}m")
"""Colours as a notebook's JSON, a repr or a pager writes them."""
_TAG = re.compile(
    r"</?(?:span|pre|div|code|br|p|b|strong|font|td|tr|li|a)(?:\s[^<>]{0,200})?/?>", re.IGNORECASE
)
"""A notebook's output saved as HTML; `<module>` of a frame stays."""
_SERVICE = re.compile(r"stderr: |stdout: |[a-z][\w-]{1,30}(?:-\d{1,3})?\s{1,16}\| (?! )")
"""What accelerate and docker compose put before every line."""
_VLLM_STAMP = re.compile(
    r"^\s*(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]{1,60}\] ?|\S{1,60}\] ?)"
)
_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}|xox[a-z]-[\w-]{10,})"
    r"|(?i:bearer\s+)[\w.~+/-]{16,}=*|(?<=://)[^/\s:@]{1,64}:[^/\s@]{1,128}(?=@)"
    r"|(?i:(?:api[_-]?key|(?<![a-z])token|_token|secret|password|passwd)['\"]?\s*[=:]\s*)(?!\d{1,12}(?:[\s,;}\])]|$))\S+"
    r"|(?i:--[\w-]*(?:token|api-key|password|secret)\s+)(?!\d{1,12}(?:[\s,;}\])]|$))\S+"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One cleaned line and the stream (rank or worker) it came from."""

    number: int
    rank: str
    text: str


def redact(text: str) -> str:
    """Return `text` with access tokens and passwords blanked."""
    return _SECRET.sub("[secret removed]", text)


def clean(number: int, raw: str) -> Line:
    """Return the line without colours, carriage-return overprints and rank prefix."""
    text = raw.rstrip("\r\n")
    if "\r" in text:
        text = text.rsplit("\r", 1)[-1]
    text = text[:MAX_LINE]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "1b[" in text or "33[" in text or "^[[" in text:
        text = _WRITTEN_ANSI.sub("", text)
    if "</" in text or "&lt;" in text or "<br" in text:
        text = unescape(_TAG.sub("", text))
    text = text.removeprefix("> ")
    if "T" in text[:13] and (match := _STAMP.match(text)):
        text = text[match.end() :]
    if match := _SERVICE.match(text):
        text = text[match.end() :]
    rank = ""
    for _ in range(_PREFIXED):
        if text.lstrip()[:1] not in _STARTS:
            break
        match = next((match for pattern in _PREFIXES if (match := pattern.match(text))), None)
        if match is None or (rank and not match.group("rank").isdigit()):
            break
        rank, text = match.group("rank"), text[match.end() :]
    if " " in text[:12]:
        text = _VLLM_STAMP.sub("", text)
    return Line(number, rank, text)


def read_lines(
    source: BinaryIO | str, watch: Callable[[bytes], None] | None = None
) -> Iterator[Line]:
    """Yield the beginning whole and every line near something of interest; `watch` sees every block.

    A file is read in blocks, so memory stays bounded. Far from any anchor lines are counted and
    dropped; near one, what stands before and behind it is read too. Of an anchor that comes again
    and again in lines of the same shape only the last line of a block is read, until the file's
    end. Line numbers are the file's.
    """
    if isinstance(source, str):
        if watch is not None:
            watch(source.encode("utf-8", "replace"))
        yield from (clean(number, raw) for number, raw in enumerate(source.split("\n"), 1))
        return
    number, tail, left, seen = 1, b"", 0, 0
    habits = _Habits()
    for block, last_block in _marked(_blocks(source)):
        if watch is not None:
            watch(block)
        whole, seen = seen < WHOLE_BYTES, seen + len(block)
        if whole:
            yield from _numbered(number, block)
            number += block.count(b"\n")
            continue
        buffer = tail + block
        hits = _hits(buffer, len(tail), None if last_block else habits)
        spans = _spans(buffer, len(tail), left, hits)
        done = 0
        for start, end in spans:
            number += buffer.count(b"\n", done, start)
            yield from _numbered(number, buffer[start:end])
            number += buffer.count(b"\n", start, end)
            done = end
        left = max(0, max((last for _, last in hits), default=0) - len(buffer))
        keep = buffer.rfind(b"\n", 0, max(done, len(buffer) - BEFORE_BYTES)) + 1
        keep = max(done, keep, len(buffer) - 2 * BEFORE_BYTES)  # within a line without an end
        number += buffer.count(b"\n", done, keep)
        tail = buffer[keep:]


def _spans(
    buffer: bytes, fresh: int, left: int, hits: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return what of a buffer is read, as (start, end) at line ends: around hits, and what is `left` of one."""
    wanted = [(fresh, fresh + left)] if left else []
    wanted += hits
    spans: list[tuple[int, int]] = []
    for first, last in sorted(wanted):
        start = buffer.rfind(b"\n", 0, first) + 1
        end = buffer.find(b"\n", last) + 1 if last < len(buffer) else 0
        end = end or len(buffer)
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


class _Habits:
    """Which anchors a log repeats, and the shapes of the lines that hold them."""

    def __init__(self) -> None:
        self._windows: Counter[bytes] = Counter()
        self._shapes: set[bytes] = set()

    def tired_of(self, anchor: bytes) -> bool:
        """Return whether enough was read around an anchor."""
        return self._windows[anchor] >= MAX_WINDOWS

    def read(self, anchor: bytes) -> None:
        """Note that the text around an anchor is read."""
        self._windows[anchor] += 1

    def news(self, shapes: frozenset[bytes], anchors: Sequence[bytes]) -> bool:
        """Return whether a line with one of the anchors has a shape that was not seen before."""
        plain = [anchor.translate(None, DIGITS) for anchor in anchors]
        fresh = {
            shape for shape in shapes - self._shapes if any(word in shape.lower() for word in plain)
        }
        if len(self._shapes) + len(fresh) > MAX_SHAPES:
            self._shapes.clear()
            return False  # every line is another: nothing tells which is new
        self._shapes |= fresh
        return bool(fresh)


def _hits(buffer: bytes, fresh: int, habits: "_Habits | None") -> list[tuple[int, int]]:
    """Return what to read around the anchors: first and last byte of each; of a notice its own line.

    `habits` None: at the end of a file, where nothing is skipped for being frequent.
    """
    shapes = shapes_of(buffer[fresh:])
    anchors = spoken(shapes)
    if not anchors:
        return []
    tired = [
        anchor
        for anchor in anchors
        if habits is not None and anchor not in NOTICES and habits.tired_of(anchor)
    ]
    if tired and habits is not None and habits.news(shapes, tired):
        tired = []
    lowered = buffer.lower()
    found = []
    for anchor in anchors:
        if anchor in NOTICES or anchor in tired:
            at = lowered.rfind(anchor, fresh)
            found += [(at, at)] if at >= 0 else []
            continue
        at = lowered.find(anchor, fresh)
        while at >= 0:
            found.append((max(0, at - BEFORE_BYTES), at + AFTER_BYTES))
            if habits is not None:
                habits.read(anchor)
            at = lowered.find(anchor, at + AFTER_BYTES // 2)
    return found


def _marked(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield every block and whether it is the last one."""
    before: bytes | None = None
    for block in blocks:
        if before is not None:
            yield before, False
        before = block
    if before is not None:
        yield before, True


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    """Yield blocks that end at line ends, save for lines longer than a block."""
    rest, decoder = b"", None
    first = True
    while chunk := source.read(BLOCK_BYTES):
        if first:
            decoder = _wide(chunk)
        first = False
        if decoder is not None:
            chunk = decoder.decode(chunk).encode("utf-8", "replace")
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1 or chunk.rfind(b"\r") + 1  # a progress bar has no line ends
        if not cut and len(chunk) < 2 * BLOCK_BYTES:
            rest = chunk
            continue
        cut = cut or len(chunk)
        yield chunk[:cut]
        rest = chunk[cut:]
    if rest:
        yield rest


def _wide(chunk: bytes) -> codecs.IncrementalDecoder | None:
    """Return a decoder for UTF-16, which PowerShell writes; None for anything else."""
    for mark, name, zeros in ((b"\xff\xfe", "utf-16-le", 3), (b"\xfe\xff", "utf-16-be", 2)):
        sample = chunk[zeros:400:2]
        # without its mark (a piece of a file), hardly a letter may be wide
        least = len(sample) // 2 if chunk.startswith(mark) else len(sample) * 9 // 10
        if len(sample) > 1 and sample.count(0) > least and chunk[5 - zeros : 400 : 2].count(0) == 0:
            return codecs.getincrementaldecoder(name)(errors="replace")
    return None


def is_interesting(block: bytes) -> bool:
    """Return whether a block may hold something worth reading."""
    return bool(_hits(block, 0, None))


def _numbered(first: int, block: bytes) -> Iterator[Line]:
    if not block:
        return
    lines = block.decode("utf-8", errors="replace").split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    yield from (clean(first + offset, raw) for offset, raw in enumerate(lines))
