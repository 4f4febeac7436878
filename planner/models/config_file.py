"""Reads a config.json: bounded, UTF-8, one JSON object, or one clear error."""

import json
from pathlib import Path
from typing import Any

from planner.errors import UsageError

MAX_CONFIG_BYTES = 16 * 1024 * 1024
"""No model's config.json comes near this; a larger file is refused unread."""
_WHOLE = "take the whole config.json from the model's repository"


def names_dtype(config: dict[str, Any]) -> bool:
    """Say whether the config names the dtype of its weights."""
    text = config.get("text_config")
    configs = (config, text if isinstance(text, dict) else {})
    return any(part.get("dtype") or part.get("torch_dtype") for part in configs)


def read_config(file: Path) -> dict[str, Any]:
    """Return the object in a config.json; raises UsageError for anything else."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror or error}",
            hint="give a folder with a config.json, or the file itself",
        ) from None
    if not file.is_file():
        raise UsageError(f"{file}: is not a file")
    if size > MAX_CONFIG_BYTES:
        raise UsageError(
            f"{file}: {size} bytes is too large for a config.json",
            hint=f"at most {MAX_CONFIG_BYTES} bytes are read",
        )
    return parse_config(file.read_bytes(), label=str(file))


def parse_config(content: bytes, *, label: str) -> dict[str, Any]:
    """Return the JSON object in `content`; raises UsageError that names `label`."""
    try:
        config = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{label}: is not UTF-8 text", hint=_WHOLE) from None
    except RecursionError:
        raise UsageError(f"{label}: is nested too deeply for a config.json", hint=_WHOLE) from None
    except ValueError as error:
        raise UsageError(f"{label}: is not valid JSON ({str(error)[:80]})", hint=_WHOLE) from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{label}: expected an object of fields, got {type(config).__name__}", hint=_WHOLE
        )
    return config
