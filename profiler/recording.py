"""Recording: phases x terms, measured, with the environment it was taken in. No torch here."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import UsageError

MAX_FILE_BYTES = 1024**3
"""A larger file is refused unread: the longest event list of a trace stays far below."""
SCHEMA_VERSION = 1
TERMS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "kv_cache",
    "engine",
    "overhead",
)
PHASES = ("load", "rollout", "score", "forward", "loss", "backward", "step")


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


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A measured run."""

    source: str
    """trace, torch, nvml, snapshot or vllm-log."""
    subject: str
    """What ran: "hf-sft", "trl-grpo", "vramwise-grpo", a command line ..."""
    environment: dict[str, Any]
    """torch, driver, gpu, python, command, taken_at, host ..."""
    phases: tuple[PhaseRecord, ...]
    peak_bytes: int
    peak_phase: str
    peak_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None
    host_peak_bytes: int | None = None
    peak_op: str = ""
    peak_module: str = ""
    largest: tuple[LiveTensor, ...] = ()
    events: tuple[Event, ...] = ()
    timeline: tuple[dict[str, Any], ...] = ()
    """Samples of a live recording: {"t_s", "phase", "allocated_bytes", "reserved_bytes", ...}."""
    partial: bool = False
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_dict(self, *, events: bool = True) -> dict[str, Any]:
        """Return a JSON-ready dict; `events=False` leaves out the event list."""
        document = asdict(self)
        if not events:
            document["events"] = []
        return document

    def save(self, path: Path) -> None:
        """Write JSON atomically: a reader never sees half a file."""
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def from_dict(cls, document: Any, *, label: str = "recording") -> "Recording":
        """Return the Recording that `document` (parsed JSON) describes.

        Raises UsageError naming `label`, the field and what is allowed; unknown fields are refused.
        """
        from profiler.recording_reader import Reader

        recording: Recording = Reader(label).recording(document)
        return recording

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Read a file written by `save`. Raises UsageError if it is missing, cut short or foreign."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(f"{path}: larger than a recording can be (1 GiB)")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read as a recording: {error}") from error
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}: not JSON, or cut short: {str(error)[:120]}",
                hint="write it again with `vramwise trace --save` or `vramwise profile run`",
            ) from error
        return cls.from_dict(document, label=str(path))
