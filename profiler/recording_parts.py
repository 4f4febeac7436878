"""What a Recording is made of: a phase, a tensor alive at the peak, an event. No torch here."""

from dataclasses import dataclass, field

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTensor:
    """One storage alive at the peak."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    term: str
    module: str
    op: str
    phase: str
    """Phase it was allocated in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord:
    """What was alive when a phase was at its largest."""

    name: str
    peak_bytes: int
    """Allocated bytes at the phase's peak: the sum of `terms_bytes`."""
    terms_bytes: dict[str, int]
    modules_bytes: dict[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """What NVML said for the process; None = unknown."""
    host_bytes: int | None = None
    peak_op: str = ""
    peak_module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One allocation or free, for replay."""

    kind: str
    """"alloc" or "free"."""
    block: int
    """Identifies the storage; a free names the block of its alloc."""
    bytes: int
    phase: str
    op: str = ""
    module: str = ""
    term: str = ""
    stream: int = 0
    """Whose pool it is from: 0 = the stream that computes."""
