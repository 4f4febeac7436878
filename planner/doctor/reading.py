"""Reads logs of any size line by line: ANSI colours, progress bars and rank prefixes removed."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK_BYTES = 1 << 18
MAX_LINE = 16_384
"""Characters of one line that are looked at; a message is never longer."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIXES = (
    re.compile(r"^\s*\[(?:default)?(?:rank)?\s?(?P<rank>\d{1,4})\]:?\s", re.IGNORECASE),
    re.compile(r"^\s*rank:?\s{0,3}(?P<rank>\d{1,4})\s?[:|]\s?", re.IGNORECASE),
    re.compile(
        r"^\s*\((?P<rank>[A-Za-z_]\w{2,40}(?:[ _]?(?:rank|TP|DP|PP)\S*)*(?:,? (?:pid|ip)=\S+?)+)\)\s?"
    ),
    re.compile(r"^\s*(?P<rank>\d{1,4}):\s(?=\S)"),
)
_VLLM_STAMP = re.compile(
    r"^\s*(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]{1,60}\] ?|\S{1,60}\] ?)"
)
_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|xox[a-z]-[\w-]{10,})|(?i:(?:api[_-]?key|token|secret|password)\s*[=:]\s*)\S+"
)

ANCHORS = (
    b"out of memory",
    b"outofmemory",
    b"oom-kill",
    b"oom_kill",
    b"cuda failure",
    b"tried to allocate",
    b"unable to allocate",
    b"bad_alloc",
    b"memoryerror",
    b"memory on the node",
    b"cpu virtual memory",
    b"max seq len",
    b"desired gpu memory",
    b"oom killer",
    b"would exceed allowed memory",
    b"alloc_failed",
    b"cudaerrormemoryallocation",
    b"kv cache",
    b"cache blocks",
    b"gpu memory utilization",
    b"free memory on device",
    b"sleep mode freed",
    b"can't allocate memory",
    b"killed",
    b"exitcode",
    b"exit code",
    b"sigkill",
    b"model loading took",
    b"loading model weights took",
    b"memory profiling",
    b"gpu blocks",
    b"graph captur",
    b"capturing",
    b"max_ma",
    b"maximum concurrency",
    b"llm engine (",
    b"non-default args",
    b"available kv",
)
"""What a line worth reading contains, in lower case; blocks without any are skipped whole."""


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
    text = _ANSI.sub("", raw[:MAX_LINE]).rstrip("\r\n")
    if "\r" in text:
        text = text.rsplit("\r", 1)[-1]
    rank = ""
    for pattern in _PREFIXES:
        if match := pattern.match(text):
            rank, text = match.group("rank"), text[match.end() :]
            break
    return Line(number, rank, _VLLM_STAMP.sub("", text))


def read_lines(
    source: BinaryIO | str, watch: Callable[[bytes], None] | None = None
) -> Iterator[Line]:
    """Yield every line near something of interest, and the first MiB whole; `watch` sees every block.

    A file is read in blocks, so memory stays bounded; a block in which no anchor occurs is
    counted and dropped, but its tail is kept as the context of the next one. Line numbers
    are those of the file.
    """
    if isinstance(source, str):
        if watch is not None:
            watch(source.encode("utf-8", "replace"))
        yield from (clean(number, raw) for number, raw in enumerate(source.split("\n"), 1))
        return
    number, held, held_wanted = 1, b"", True
    seen_bytes = 0
    for block in _blocks(source):
        if watch is not None:
            watch(block)
        wanted = seen_bytes < 4 * BLOCK_BYTES or is_interesting(block)
        seen_bytes += len(block)
        if wanted or held_wanted:
            yield from _numbered(number, held)
        number += held.count(b"\n")
        held, held_wanted = block, wanted
    yield from _numbered(number, held)


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    """Yield blocks that end at line ends, save for lines longer than a block."""
    rest = b""
    while chunk := source.read(BLOCK_BYTES):
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1
        if not cut and len(chunk) < 8 * BLOCK_BYTES:
            rest = chunk
            continue
        cut = cut or len(chunk)
        yield chunk[:cut]
        rest = chunk[cut:]
    if rest:
        yield rest


def is_interesting(block: bytes) -> bool:
    """Return whether a block may hold something worth reading."""
    lowered = block.lower()
    return any(anchor in lowered for anchor in ANCHORS)


def _numbered(first: int, block: bytes) -> Iterator[Line]:
    if not block:
        return
    lines = block.decode("utf-8", errors="replace").split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    yield from (clean(first + offset, raw) for offset, raw in enumerate(lines))
