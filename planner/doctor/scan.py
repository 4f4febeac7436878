"""From a log of any size to events: messages, refusals and the lines that led to them."""

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from planner.doctor.anchors import speaks
from planner.doctor.cuda_message import CONTEXT_LINES, START, parse_cuda
from planner.doctor.event import MAX_DESCRIPTION, NOTICES, Event, Facts
from planner.doctor.events import match_event, may_wrap
from planner.doctor.exceptions import other_error
from planner.doctor.reading import Line, read_lines, redact
from planner.doctor.series import Growth, Series
from planner.doctor.vllm_log import VllmLog, read_vllm_line

_WORKER = re.compile(
    r"Worker_(?:DP\d+_)?(?:PP(?P<pipeline_parallel_size>\d{1,3})_?)?(?:TP(?P<tensor_parallel_size>\d{1,3}))?"
)
_HELD = re.compile(
    r"(?:used|allocated|\bMA|mem(?:ory)?(?: usage)?)[^\d\n]{1,12}(\d{1,3}\.?\d{0,3})(?: ?Gi?B\b|(?<=\d)(?=[,\s]|$))",
    re.IGNORECASE,
)
STACK_LINES = 160
MAX_EVENTS = 400
MAX_NOTICES = 40
"""Usage reports and sleep lines of one kind that are kept."""
MAX_RANKS = 4096
MAX_WRAPPED = 4
"""Lines that a wrapped refusal may take before its numbers are complete."""
MAX_OTHERS = 8
MAX_PROSE = 400_000
"""Characters of a log's beginning that are read for settings (model, batch, lengths)."""


@dataclass
class Scan:
    """Everything a log says about memory."""

    events: list[Event] = field(default_factory=list)
    vllm: VllmLog = field(default_factory=VllmLog)
    prose: str = ""
    """The beginning of the text: settings and description are looked for here."""
    lines: int = 0
    dropped_events: int = 0
    ranks: set[int] = field(default_factory=set)
    """Ranks whose lines were seen."""
    others: list[Event] = field(default_factory=list)
    """Exceptions that are no memory errors, the first of each rank's kind first."""
    held: dict[int, float] = field(default_factory=dict)
    """The most GB that a rank's own lines say it uses."""
    growth: Growth | None = None
    """How the log's own memory figures move."""
    wrapping: dict[str, int] = field(default_factory=dict)
    """Streams with a refusal that may be broken over lines -> lines since it began."""

    @property
    def errors(self) -> list[Event]:
        """Events that ended the run, first cause first."""
        return [event for event in self.events if event.is_error]


@dataclass
class _Pending:
    """A message being collected: its line, what came before and what follows in its stream."""

    line: Line
    stack: tuple[str, ...]
    body: list[str]


def scan(source: BinaryIO | str) -> Scan:
    """Read a log or a pasted text; memory use does not grow with its size."""
    result = Scan()
    history: dict[str, deque[str]] = {}
    pending: dict[str, _Pending] = {}
    prose: list[str] = []
    room = MAX_PROSE
    last = ""
    series = Series()
    workers: dict[str, int] = {}
    for line in read_lines(source, series.feed):
        result.lines = line.number
        if line.rank.isdigit() and int(line.rank) < MAX_RANKS:
            result.ranks.add(int(line.rank))
        _of_rank(result, line, workers)
        if room > 0:
            prose.append(line.text)
            room -= len(line.text) + 1
        line = _continued(line, last, history, pending)
        _take(result, line, history.setdefault(line.rank, deque(maxlen=STACK_LINES)), pending)
        last = line.rank
        if len(history) > 512:  # a log whose every line looks like another rank
            history.clear()
    for waiting in pending.values():
        _finish(result, waiting)
    result.events.sort(key=lambda event: event.line)
    result.prose = redact("\n".join(prose))
    if len(result.prose) < MAX_DESCRIPTION:
        series.prose(result.prose)
    result.growth = series.growth()
    if result.vllm.started:
        said = {name: str(count) for name, count in workers.items() if count > 1}
        result.vllm = replace(result.vllm, settings={**said, **result.vllm.settings})
    return result


def _of_rank(result: Scan, line: Line, workers: dict[str, int]) -> None:
    """Note what a line tells of its rank: how much it holds, or which of an engine's workers it is."""
    if line.rank.isdigit() and int(line.rank) < MAX_RANKS and "ried to alloc" not in line.text:
        for used in _HELD.findall(line.text):
            rank = int(line.rank)
            result.held[rank] = max(result.held.get(rank, 0.0), float(used))
    elif line.rank.startswith("Worker_") and (match := _WORKER.match(line.rank)):
        for name, number in match.groupdict().items():
            if number is not None:
                workers[name] = max(workers.get(name, 0), int(number) + 1)


def _continued(
    line: Line, last: str, history: dict[str, deque[str]], pending: dict[str, "_Pending"]
) -> Line:
    """Return an unprefixed line as the continuation of the stream before it, if that waits for one."""
    if line.rank or not last:
        return line
    before = history.get(last)
    waits = last in pending or (before and may_wrap(before[-1]))
    return Line(line.number, last, line.text) if waits else line


def _take(result: Scan, line: Line, past: deque[str], pending: dict[str, _Pending]) -> None:
    waiting = pending.get(line.rank)
    said = speaks(line.text)
    starts = said and START.search(line.text) is not None
    if waiting is not None:
        closes = (
            starts
            and parse_cuda(" ".join(waiting.body)) is not None
            and "Tried" not in line.text[:8]
        )
        if closes or len(waiting.body) > CONTEXT_LINES or line.text.startswith("Traceback"):
            _finish(result, pending.pop(line.rank))
            waiting = None
        else:
            waiting.body.append(line.text)
    special = match_event(line.text) if said else None
    if special is None and line.rank in result.wrapping:
        special = _unwrapped(past, line.text)
    if special is not None:
        kind, matched, facts = special
        _add(
            result,
            Event(
                kind=kind,
                line=line.number,
                rank=line.rank,
                text=redact(matched),
                facts=facts,
                stack=() if kind in NOTICES else tuple(past),
            ),
        )
    elif starts and waiting is None:
        pending[line.rank] = _Pending(line, tuple(past), [line.text])
    elif waiting is None and len(result.others) < MAX_OTHERS:
        _keep_exception(result, line, past)
    if said:
        result.vllm = read_vllm_line(result.vllm, line.text)
    past.append(line.text)
    if may_wrap(line.text):
        result.wrapping[line.rank] = 0
    elif line.rank in result.wrapping:
        result.wrapping[line.rank] += 1
        if result.wrapping[line.rank] > MAX_WRAPPED:
            del result.wrapping[line.rank]


def _keep_exception(result: Scan, line: Line, past: deque[str]) -> None:
    """Keep an exception that is none of memory, once."""
    said = other_error(line.text)
    if said is None:
        return
    text = redact(said.text)
    if any(other.text == text for other in result.others):
        return
    result.others.append(
        Event(
            kind="other_error",
            line=line.number,
            rank=line.rank,
            text=text,
            facts={"device": 1} if said.device else {},
            stack=tuple(past),
        )
    )


def _unwrapped(past: deque[str], text: str) -> tuple[str, str, Facts] | None:
    """Return the event of a message that a terminal broke over this and earlier lines."""
    for count in range(1, min(MAX_WRAPPED, len(past)) + 1):
        start = past[-count]
        if may_wrap(start):
            if match_event(start) is not None:
                return None
            lines = [past[-index] for index in range(count, 0, -1)] + [text]
            # a break inside a word, or at a blank that the terminal dropped
            return match_event("".join(lines)) or match_event(" ".join(lines))
    return None


def _finish(result: Scan, waiting: _Pending) -> None:
    message = parse_cuda(" ".join(" ".join(waiting.body).split()))
    if message is None:
        return
    kind = "cumem_oom" if message.backend == "cumem" else "cuda_oom"
    _add(
        result,
        Event(
            kind=kind,
            line=waiting.line.number,
            rank=waiting.line.rank,
            text=redact(message.text),
            facts=dict(message.facts),
            cuda=message,
            stack=(*waiting.stack, *waiting.body[:1]),
        ),
    )


def _add(result: Scan, event: Event) -> None:
    """Keep the event, merged with an equal one of another rank or of a retry."""
    last = len(result.events) - 1 if event.is_error else -1
    for index in range(last, max(-1, last - 64), -1):
        other = result.events[index]
        if _same(other, event):
            first, second = (other, event) if other.line <= event.line else (event, other)
            ranks = dict.fromkeys((*(other.ranks or (other.rank,)), event.rank))
            facts = {**second.facts, **first.facts}
            if first.is_weak and not second.is_weak:  # who says why wins over who only saw it
                first = replace(second, line=first.line, stack=first.stack)
                facts |= second.facts
            result.events[index] = replace(first, ranks=tuple(ranks), facts=facts)
            return
    alike = [index for index, other in enumerate(result.events) if other.kind == event.kind]
    if not event.is_error:
        if len(alike) >= MAX_NOTICES:  # the last ones stand nearest to the failure
            del result.events[alike[0]]
    elif len(alike) >= MAX_EVENTS:
        result.dropped_events += 1
        return
    result.events.append(event)


def _same(one: Event, two: Event) -> bool:
    if one.kind != two.kind or not one.is_error:
        return False
    if one.kind in ("host_killed", "killed", "worker_died", "host_shm", "hf_dispatch", "tms_oom"):
        return True
    if one.kind == "driver_refused":
        return one.facts.get("owner") == two.facts.get("owner")
    keys = ("tried_bytes", "max_seq_len", "needed_bytes", "wanted_bytes", "host_tried_bytes")
    if any(one.facts.get(key) != two.facts.get(key) for key in keys):
        return False
    return one.rank != two.rank or one.facts == two.facts
