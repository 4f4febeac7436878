"""The published tables, reproduced line by line (being written)."""

from typing import Any

from planner.errors import UnknownNameError

TABLES: dict[str, str] = {}


def published(name: str) -> dict[str, Any]:
    """Return the JSON document of `vramwise published NAME`."""
    raise UnknownNameError("table", name, TABLES)


def render(document: dict[str, Any]) -> str:
    """Return a table document as text."""
    return str(document)
