"""Turns a tracker's events into phases x terms, the peak and what was alive there.

A block's term is decided once, from the whole run: a buffer that ends as `.grad` was a gradient
from its first byte, whoever allocated it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from profiler.recording import PHASES
from profiler.recording_parts import Event, LiveTensor, PhaseRecord
from profiler.storages import DEVICE, HOST, Block, BlockEvent

ROUND_BYTES = 512
"""CUDA's allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
LARGEST = 10


@dataclass(slots=True)
class _Peak:
    total: int = -1
    index: int = -1
    host: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the events say."""

    phases: tuple[PhaseRecord, ...]
    peak_bytes: int
    peak_phase: str
    peak_op: str
    peak_module: str
    host_peak_bytes: int
    largest: tuple[LiveTensor, ...]


def rounded(num_bytes: int) -> int:
    """Return what the allocator counts for a request of `num_bytes`."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES


def assign_terms(
    events: Sequence[BlockEvent], *, vocab: int, embedding: tuple[int, ...] = ()
) -> None:
    """Give every block without a known role its term.

    Logits: what phase loss allocates (logits, tiles of them, a chunked head's buffers), and any
    tensor whose last dimension is the vocabulary. Gradients: also the parts of a tied embedding's
    gradient (`embedding` is its shape when it is trained) before autograd sums them.
    Optimizer: whatever the step allocates. Overhead: what loading needs for a moment. Everything else is an activation.
    """
    for event in events:
        block = event.block
        if not event.alloc or block.term:
            continue
        if block.phase == "step":
            block.term = "optimizer"
        elif block.phase == "load":
            block.term = "overhead"
        elif block.phase == "rollout":
            block.term = "kv_cache" if block.op.startswith("aten.cat") else "activations"
        elif embedding and block.shape == embedding and block.phase in ("loss", "backward"):
            block.term = "gradients"
        elif block.phase == "loss" or (block.shape and block.shape[-1] == vocab):
            block.term = "logits"
        else:
            block.term = "activations"


def summarise(events: Sequence[BlockEvent]) -> Summary:
    """Return phases, peak and the largest blocks alive at it. Terms must be assigned."""
    peaks = _find_peaks(events)
    best = max(peaks, key=lambda name: peaks[name].total)
    alive = _snapshots(events, peaks)
    phases = tuple(
        _phase(name, peaks[name], events[peaks[name].index])
        for name in sorted(peaks, key=lambda name: PHASES.index(name) if name in PHASES else 99)
    )
    at_peak = events[peaks[best].index]
    largest = sorted(alive[best], key=lambda block: -block.bytes)[:LARGEST]
    return Summary(
        phases=phases,
        peak_bytes=peaks[best].total,
        peak_phase=best,
        peak_op=at_peak.op,
        peak_module=at_peak.module,
        host_peak_bytes=max(peak.host for peak in peaks.values()),
        largest=tuple(_tensor(block) for block in largest),
    )


def to_events(events: Sequence[BlockEvent]) -> tuple[Event, ...]:
    """Return the device's events in the recording's form."""
    return tuple(
        Event(
            kind="alloc" if event.alloc else "free",
            block=event.block.number,
            bytes=event.block.bytes,
            phase=event.phase,
            op=event.op,
            module=event.module,
            term=event.block.term,
            stream=event.block.stream,
        )
        for event in events
        if event.block.place == DEVICE
    )


def _find_peaks(events: Sequence[BlockEvent]) -> dict[str, _Peak]:
    peaks: dict[str, _Peak] = defaultdict(_Peak)
    total = host = 0
    for index, event in enumerate(events):
        change = rounded(event.block.bytes) if event.alloc else -rounded(event.block.bytes)
        peak = peaks[event.phase]
        if event.block.place == HOST:
            host += change
            peak.host = max(peak.host, host)
        else:
            total += change
        if total > peak.total:
            peak.total, peak.index = total, index
    return {name: peak for name, peak in peaks.items() if peak.index >= 0}


def _snapshots(events: Sequence[BlockEvent], peaks: dict[str, _Peak]) -> dict[str, list[Block]]:
    """Replay once more, filling terms and modules of every phase's peak."""
    wanted = {peak.index: name for name, peak in peaks.items()}
    live: dict[int, Block] = {}
    alive: dict[str, list[Block]] = {}
    for index, event in enumerate(events):
        if event.block.place == DEVICE:
            if event.alloc:
                live[event.block.number] = event.block
            else:
                live.pop(event.block.number, None)
        name = wanted.get(index)
        if name is not None:
            alive[name] = list(live.values())
            _fill(peaks[name], alive[name])
    return alive


def _fill(peak: _Peak, blocks: Sequence[Block]) -> None:
    terms: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    for block in blocks:
        size = rounded(block.bytes)
        terms[block.term] += size
        modules[block.module] += size
    peak.terms = dict(terms)
    peak.modules = dict(sorted(modules.items(), key=lambda item: -item[1]))


def _phase(name: str, peak: _Peak, event: BlockEvent) -> PhaseRecord:
    return PhaseRecord(
        name=name,
        peak_bytes=peak.total,
        terms_bytes=peak.terms,
        modules_bytes=peak.modules,
        host_bytes=peak.host,
        peak_op=event.op,
        peak_module=event.module,
    )


def _tensor(block: Block) -> LiveTensor:
    return LiveTensor(
        bytes=block.bytes,
        shape=block.shape,
        dtype=block.dtype,
        term=block.term,
        module=block.module,
        op=block.op,
        phase=block.phase,
    )
