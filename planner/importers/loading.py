"""Reads foreign files without running anything: size limits, safe YAML, JSON, notebooks."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from planner.errors import UsageError
from planner.importers.pasted import decode

MAX_BYTES = 16 * 1024 * 1024
MAX_ALIASES = 64
MAX_DEPTH = 60


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses alias bombs and deep nesting, and keeps dates as text."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.aliases = 0
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count aliases and depth on the way."""
        if self.check_event(yaml.events.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                raise UsageError(
                    f"yaml: more than {MAX_ALIASES} aliases",
                    hint="no tool's config needs them; expand them first",
                )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UsageError(f"yaml: nested deeper than {MAX_DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_text(path_or_text: Path | str) -> tuple[str, Path | None]:
    """Return the text of a file, or the text itself, and the path it came from."""
    if isinstance(path_or_text, str) and ("\n" in path_or_text or len(path_or_text) > 1000):
        return path_or_text, None
    path = Path(path_or_text)
    try:
        if not path.is_file():
            if isinstance(path_or_text, str) and any(mark in path_or_text for mark in " ={(:"):
                return path_or_text, None
            raise UsageError(f"config: no file {str(path_or_text)[:200]!r}")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"config: {path.name} is larger than {MAX_BYTES // 2**20} MiB",
                hint="a config is small; a log goes to `vramwise explain`",
            )
        return decode(path.read_bytes()), path
    except OSError as error:
        raise UsageError(
            f"config: cannot read {str(path_or_text)[:200]!r} ({error.strerror})"
        ) from None


def load_yaml(text: str) -> Any:
    """Return the first YAML document of `text`; raises UsageError with line and column."""
    try:
        loader = _Loader(text)
        try:
            return _first(loader)
        finally:
            loader.dispose()
    except RecursionError:
        raise UsageError("yaml: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(
            f"yaml: {getattr(error, 'problem', None) or 'cannot be read'}{where}"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"yaml: {str(error)[:120]}") from None


def load_yaml_all(text: str, *, most: int = 50) -> list[Any]:
    """Return every YAML document of `text` (--- between them), `most` at most."""
    parts = re.split(r"^---(?:\s.*)?$", text, flags=re.MULTILINE)
    return [load_yaml(part) for part in parts[:most] if part.strip()]


def _first(loader: _Loader) -> Any:
    return loader.get_data() if loader.check_data() else None  # type: ignore[no-untyped-call]


def load_json(text: str) -> Any:
    """Return the JSON document; raises UsageError with line and column."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError("json: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"json: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None


def notebook_source(document: dict[str, Any]) -> str:
    """Return the Python of a notebook's code cells; magics and shell lines become comments."""
    lines: list[str] = []
    cells = document.get("cells")
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            text = "".join(map(str, source)) if isinstance(source, list) else str(source)
            magic = re.match(r"\s*%%(\w+)", text)
            if magic and magic.group(1) == "writefile":
                continue  # notebook_files has it
            if magic and magic.group(1) in ("bash", "sh", "shell", "script"):
                lines += [f"# !{line}" for line in text.split("\n")[1:]]
                continue
            lines += _commented(text)
    return "\n".join(lines)


def _commented(text: str) -> list[str]:
    """Return a cell's lines with magics, and shell lines with their continuations, as comments."""
    found, goes_on, opened = [], False, False
    for line in text.split("\n"):
        shell = goes_on or line.lstrip().startswith(("%", "!"))
        if shell and opened and not goes_on:  # the only statement of its block, as far as is known
            found.append(f"{line[: len(line) - len(line.lstrip())]}pass")
        goes_on = shell and line.rstrip().endswith("\\")
        found.append(f"# {line}" if shell else line)
        if shell or (line.strip() and not line.lstrip().startswith("#")):
            opened = not shell and re.sub(r"#.*", "", line).rstrip().endswith(":")
    return found


def notebook_files(document: dict[str, Any]) -> dict[str, str]:
    """Return the files that a notebook's cells write by %%writefile, by name."""
    found = {}
    cells = document.get("cells")
    for cell in cells if isinstance(cells, list) else []:
        source = cell.get("source", "") if isinstance(cell, dict) else ""
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        if match := re.match(r"\s*%%writefile(?:\s+-a)?\s+(\S+)[^\n]*\n", text):
            found[match.group(1)] = text[match.end() :]
    return found


def flatten(values: dict[Any, Any], *, depth: int = 0) -> dict[str, Any]:
    """Return nested mappings as dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            flat.update(
                {f"{key}.{inner}": item for inner, item in flatten(value, depth=depth + 1).items()}
            )
        else:
            flat[str(key)] = value
    return flat
