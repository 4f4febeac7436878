"""Reads lengths: JSONL, Parquet, plain numbers, or a histogram of "length count" lines."""

import csv
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import MissingExtraError, UsageError

MAX_SAMPLES = 50_000_000
MAX_LINE = 64 * 1024 * 1024
NUMBER_KEYS = (
    "length",
    "num_tokens",
    "n_tokens",
    "token_count",
    "tokens_count",
    "len",
    "seq_len",
    "total_tokens",
)
TOKEN_KEYS = ("input_ids", "token_ids", "tokens")
PROMPT_KEYS = ("prompt", "question", "instruction", "input", "context")
ANSWER_KEYS = ("completion", "answer", "response", "output", "chosen", "text", "content")
MESSAGE_KEYS = ("messages", "conversations", "conversation")
CHARACTERS_PER_TOKEN = 4
"""Of English text under today's tokenizers (3.5-4.5); only used when a file holds text, not counts."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Token counts of a data set, in file order."""

    counts: array  # type: ignore[type-arg]
    """Unsigned 32-bit, one a sample."""
    source: str
    estimated: bool
    """True when they were estimated from characters."""


def read_lengths(path: Path) -> Lengths:
    """Return the lengths in a file; raises UsageError naming the line that cannot be read."""
    if not path.is_file():
        raise UsageError(f"lengths: no file {str(path)[:200]!r}")
    if path.suffix.lower() in (".parquet", ".pq"):
        return _collect(_parquet(path), path)
    if path.suffix.lower() == ".csv":
        return _collect(_csv(path), path)
    return _collect(_lines(path), path)


def _collect(values: Iterator[tuple[int, int, bool]], path: Path) -> Lengths:
    counts = array("I")
    estimated = False
    for length, times, guess in values:
        if not 0 <= length < 2**32:
            raise UsageError(f"lengths: {length} is not a token count")
        if len(counts) + times > MAX_SAMPLES:
            raise UsageError(
                f"lengths: more than {MAX_SAMPLES:,} samples", hint="give a histogram of a part"
            )
        counts.extend(array("I", [length]) * times)
        estimated = estimated or guess
    if not counts:
        raise UsageError(
            f"lengths: {path.name} holds no samples",
            hint="JSONL with length, input_ids, text or messages; numbers; or 'length count' lines",
        )
    return Lengths(counts=counts, source=path.name, estimated=estimated)


def _lines(path: Path) -> Iterator[tuple[int, int, bool]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(1)
        file.seek(0)
        if head == "[":
            yield from _json_array(file.read(), path)
            return
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), ""), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            if text[0] == "{":
                yield (*_of_row(_loads(text, number), number),)
                continue
            parts = text.replace(",", " ").replace(":", " ").split()
            if len(parts) > 2 or not all(part.isdigit() for part in parts):
                raise UsageError(
                    f"lengths: line {number}: cannot read {text[:60]!r}",
                    hint="a number, 'length count', or a JSON object a line",
                )
            yield int(parts[0]), int(parts[1]) if len(parts) == 2 else 1, False


def _json_array(text: str, path: Path) -> Iterator[tuple[int, int, bool]]:
    rows = _loads(text, 1)
    for number, row in enumerate(rows, 1):
        if isinstance(row, int):
            yield row, 1, False
        else:
            yield _of_row(row, number)


def _loads(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"lengths: line {number} is not JSON ({str(error)[:60]})") from None


def _of_row(row: Any, number: int) -> tuple[int, int, bool]:
    """Return (length, 1, estimated) of one sample."""
    if not isinstance(row, dict):
        raise UsageError(f"lengths: line {number}: expected an object, got {type(row).__name__}")
    for key in NUMBER_KEYS:
        if isinstance(row.get(key), int) and not isinstance(row[key], bool):
            return (
                row[key],
                int(row.get("count", 1))
                if key == "length" and isinstance(row.get("count"), int)
                else 1,
                False,
            )
    for key in TOKEN_KEYS:
        if isinstance(row.get(key), list):
            return len(row[key]), 1, False
    characters = sum(
        _characters(row[key]) for key in (*PROMPT_KEYS, *ANSWER_KEYS, *MESSAGE_KEYS) if key in row
    )
    if characters == 0 and not any(
        key in row for key in (*PROMPT_KEYS, *ANSWER_KEYS, *MESSAGE_KEYS)
    ):
        raise UsageError(
            f"lengths: line {number} has none of the known fields ({', '.join(list(row)[:6])})",
            hint=f"one of {', '.join((*NUMBER_KEYS[:3], *TOKEN_KEYS, *MESSAGE_KEYS[:1], 'prompt', 'text'))}",
        )
    return -(-characters // CHARACTERS_PER_TOKEN), 1, True


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(_characters(item) for item in value)
    if isinstance(value, dict):
        return sum(_characters(value[key]) for key in ("content", "value", "text") if key in value)
    return 0


def _csv(path: Path) -> Iterator[tuple[int, int, bool]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        first = next(reader, [])
        if first and all(cell.strip().isdigit() for cell in first):
            yield int(first[0]), int(first[1]) if len(first) > 1 else 1, False
            names: list[str] = []
        else:
            names = [cell.strip() for cell in first]
        for number, cells in enumerate(reader, 2):
            if not names:
                if cells and not all(cell.strip().isdigit() for cell in cells[:2]):
                    raise UsageError(f"lengths: line {number}: {cells[:2]} are not numbers")
                if cells:
                    yield int(cells[0]), int(cells[1]) if len(cells) > 1 else 1, False
                continue
            row: dict[str, Any] = dict(zip(names, cells, strict=False))
            yield _of_row(
                {key: int(cell) if str(cell).isdigit() else cell for key, cell in row.items()},
                number,
            )


def _parquet(path: Path) -> Iterator[tuple[int, int, bool]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("reading Parquet", "train") from None
    try:
        file = parquet.ParquetFile(path)
        wanted = [
            name
            for name in file.schema_arrow.names
            if name in (*NUMBER_KEYS, *TOKEN_KEYS, *PROMPT_KEYS, *ANSWER_KEYS, *MESSAGE_KEYS)
        ]
        if not wanted:
            raise UsageError(
                f"lengths: {path.name} has none of the known columns ({', '.join(file.schema_arrow.names[:6])})"
            )
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for number, row in enumerate(batch.to_pylist(), 1):
                yield _of_row(row, number)
    except (OSError, ValueError) as error:
        raise UsageError(f"lengths: {path.name} is not Parquet ({str(error)[:80]})") from None
