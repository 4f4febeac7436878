"""One published figure: a CSV row of any of the three column sets, read by column meaning."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from pathlib import Path

from planner.errors import UsageError
from planner.units import GB, GiB, MiB

MAX_CSV_BYTES = 64 * MiB
MIN_CONFIDENCE = 0.8


class Layout(StrEnum):
    """Which column set a file has."""

    SFT = "sft"
    RL = "rl"
    VLLM = "vllm"
    THROUGHPUT = "throughput"
    """Step times and tokens a second of training."""
    DECODE = "decode"
    """Rates of generation."""


_REQUIRED: dict[Layout, frozenset[str]] = {
    Layout.SFT: frozenset({"id", "group", "source_family", "quantity", "value", "confidence"}),
    Layout.RL: frozenset({"id", "source_title", "quantity_measured", "value", "confidence"}),
    Layout.VLLM: frozenset({"id", "record_id", "quantity", "value", "confidence"}),
    Layout.DECODE: frozenset({"id", "engine", "concurrency", "output_len", "quantity", "value"}),
    Layout.THROUGHPUT: frozenset({"id", "framework", "tokens_known", "quantity", "value", "unit"}),
}
_UNIT_BYTES = {
    "bytes": 1,
    "GiB": GiB,
    "MiB": MiB,
    "GB(=GiB)": GiB,
    "MB(=MiB)": MiB,
    "GB(1e9)": GB,
    "GB(1e9 probable)": GB,
    "GB": GB,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure with all its columns; a missing column reads as ""."""

    layout: Layout
    fields: dict[str, str]
    peers: dict[str, float] = field(default_factory=dict)
    """The other figures of the same run, by quantity, in bytes or their own unit."""

    def __getitem__(self, column: str) -> str:
        return self.fields.get(column, "").strip()

    def changed(self, **fields: str) -> "Row":
        """Return the row with other cells."""
        return replace(self, fields={**self.fields, **fields})

    @property
    def id(self) -> str:
        """The row's own id."""
        return self["id"]

    @property
    def run(self) -> str:
        """What ties the figures of one run together."""
        return self["group"] or self["record_id"] or self["source_url_or_repo"] or self["id"]

    @property
    def quantity(self) -> str:
        """The kind of figure as the file names it."""
        return self["quantity"] or self["quantity_measured"]

    @property
    def source(self) -> str:
        """A short name of where the figure comes from, for statistics per source."""
        if self.layout is Layout.SFT:
            return self["source_family"]
        if self.layout is Layout.VLLM:
            return "vllm-logs"
        if self.layout in (Layout.THROUGHPUT, Layout.DECODE):
            return self["source"]
        return self["source_title"].split(":")[0].split("(")[0].strip()

    @property
    def confidence(self) -> float:
        """How sure the collector is, 0 to 1."""
        return self.number("confidence") or 0.0

    @property
    def is_law(self) -> bool:
        """The row measures one kernel or loss head, no run: benchmarks/laws scores it."""
        name, quantity = self["model"], self.quantity
        return name.startswith(("kernel ", "lm_head")) or quantity.startswith(
            ("component:logprob_", "oom_alloc", "component:entropy_", "component:loss_")
        )

    @property
    def is_estimate(self) -> bool:
        """The row is a vendor's own arithmetic, no measurement: `published` takes such tables apart."""
        if self.layout is not Layout.RL:
            return False
        published = (
            "training",
            "grpo_logits",
            "inference_weights",
            "kv_cache",
            "logits",
            "weights",
        )
        return self.quantity.startswith("vendor_estimate") or self.quantity in {
            f"component:{name}" for name in published
        }

    @property
    def failed(self) -> bool:
        """The run ran out of memory, or printed a KV pool of no bytes: its value is no measurement."""
        if self.quantity in {"kv_cache_memory", "kv_cache_memory_exact"}:
            value = self.number("value")
            if value is not None and value <= 0:
                return True
        return self["oom"] in {"1", "true", "True"} or self.quantity in {"oom", "oom_gt"}

    @property
    def refused(self) -> bool:
        """The log's pool does not hold one request of the full length: the engine did not start."""
        length, fits = self.number("max_model_len"), self.peers.get("max_concurrency")
        tokens = self.peers.get("kv_cache_tokens_printed")
        short = length is not None and tokens is not None and tokens < length
        return short or (fits is not None and fits < 1) or "still fails" in self["notes"]

    def number(self, column: str) -> float | None:
        """Return a column as a number, or None when it is empty or not one number."""
        try:
            value = float(self[column])
        except ValueError:
            return None
        return value if isfinite(value) else None

    def integer(self, column: str) -> int | None:
        """Return a column as a positive whole number, or None."""
        value = self.number(column)
        return int(value) if value is not None and value >= 1 and value == int(value) else None

    def _decimal(self) -> bool:
        return "decimal" in self["notes"] or "OpenRLHF" in self["source_title"]

    def truth(self) -> float | None:
        """Return the figure in bytes (or in its own unit: tokens, blocks, x)."""
        if self.layout is Layout.SFT and self["value_bytes"]:
            return self.number("value_bytes")
        value, unit = self.number("value"), self["unit_printed"] or self["unit"]
        if self.layout is Layout.RL and unit == "GB" and not self._decimal():
            unit = "GiB"  # Unsloth, TRL, verl and Hugging Face print GiB and call it GB
        if value is None or "unclear" in unit:
            return None
        return value * _UNIT_BYTES.get(unit, 1)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file; raises UsageError when its columns are not known."""
    rows = list(_iterate(path))
    runs: dict[str, dict[str, float]] = {}
    for row in rows:
        value = row.truth()
        if value is not None:
            runs.setdefault(row.run, {})[row.quantity] = value
    return [replace(row, peers=runs.get(row.run, {})) for row in rows]


def _iterate(path: Path) -> Iterator[Row]:
    try:
        if path.stat().st_size > MAX_CSV_BYTES:
            raise UsageError(f"csv: {path.name} is larger than {MAX_CSV_BYTES // MiB} MiB")
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            layout = _layout(path, reader.fieldnames or [])
            for fields in reader:
                yield Row(layout, {key: value or "" for key, value in fields.items() if key})
    except OSError as error:
        raise UsageError(f"csv: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"csv: {path.name} is not a CSV text file ({error})") from error


def _layout(path: Path, columns: Sequence[str]) -> Layout:
    present = set(columns)
    for layout, required in _REQUIRED.items():
        if required <= present:
            return layout
    missing = sorted(_REQUIRED[Layout.SFT] - present)
    raise UsageError(
        f"csv: {path.name} lacks the columns {', '.join(missing)[:120]}",
        hint="use the columns of data/measurements/sft.csv, rl.csv or vllm.csv",
    )
