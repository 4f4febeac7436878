"""Recording: phases x terms, measured, with the environment it was taken in. No torch here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from profiler.recording_parts import SCHEMA_VERSION, Event, LiveTensor, PhaseRecord
from profiler.recording_reader import Reader

MAX_FILE_BYTES = 1024**3
"""A larger file is refused unread: the longest event list of a trace stays far below."""
TERMS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "vision",
    "logits",
    "kv_cache",
    "engine",
    "overhead",
    "communication",
)
PHASES = (
    "load", "sync", "rollout", "score", "reference", "teacher", "reward", "critic",
    "forward", "loss", "backward", "step", "evaluation", "evaluate", "save", "resume",
)  # fmt: skip


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
        return Reader(label).recording(document, cls)

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
