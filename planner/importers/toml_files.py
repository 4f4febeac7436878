"""TOML configs: torchtitan's and prime-rl's, told apart by their sections."""

import re
import tomllib
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.importers import supervised, torchtitan

_TABLE = re.compile(r"^\s*\[{1,2}[\w.\"' -]+\]{1,2}\s*(?:#.*)?$", re.MULTILINE)
_PAIR = re.compile(r"^\s*[\w.\"'-]+\s*=\s*\S", re.MULTILINE)


def load_toml(text: str, *, named: bool) -> dict[str, Any] | None:
    """Return a TOML document, None for a text that is none; `named`: the file's name says that it is."""
    if not named and not (_TABLE.search(text) and _PAIR.search(text)):
        return None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if named or torchtitan.load(text) is not None:
            raise UsageError(f"toml: {str(error)[:160]}") from None
        return None


def tool_of_toml(document: dict[str, Any]) -> str:
    """Return the tool of a TOML document. Raises UnsupportedError for one that no importer reads."""
    if set(document) >= torchtitan.SECTIONS:
        return "torchtitan"
    if supervised.is_prime(document):
        return "prime-rl"
    model = document.get("model")
    if isinstance(model, dict) and "name" in model and "optim" in document:
        raise UsageError(
            "config: a prime-rl trainer without [data] or [orchestrator]: it has no lengths and no batch",
            hint="give the run's one file, with [orchestrator] and [inference]",
        )
    raise UnsupportedError(
        "config: this TOML file is of no tool that is read",
        hint="torchtitan and prime-rl have TOML configs",
    )
