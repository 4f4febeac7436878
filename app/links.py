"""Share links: the state as query parameters, and the check of what a link says.

Nothing in a link is trusted: every value is parsed against what its setting allows, and what is
wrong is named in a notice and left out.
"""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from app import knobs
from app.knobs import BY_KEY
from app.runs import DEFAULTS, OWN_SIZE, Values, gpu_options, is_hub_id, known_name
from planner.machines.machine import MAX_GPUS
from planner.run.framework import frameworks


def link_parameters(values: Values) -> dict[str, str]:
    """Return settings as query parameters, defaults left out."""
    found = {}
    for key, default in DEFAULTS.items():
        value = values[key]
        if value in (None, "") or value == default:
            continue
        if key != "vram" or values["gpu"] == OWN_SIZE:
            found[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return found


def link(base: str, values: Values) -> str:
    """Return the address that restores some settings."""
    query = urlencode(link_parameters(values))
    return f"{base.split('?')[0]}?{query}" if query else base.split("?")[0]


def read_link(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that query parameters say; what is wrong stays at its default."""
    values = dict(DEFAULTS)
    for key, text in parameters.items():
        if key in DEFAULTS and not _problem(key, text):
            values[key] = (
                _CONVERT.get(key, str)(text) if key in _CHECKS else knobs.parse(BY_KEY[key], text)
            )
    return values


_CONVERT: dict[str, Callable[[str], Any]] = {"gpus": int, "nodes": int, "vram": float, "ram": float}
_CHECKS: dict[str, tuple[Callable[[str], bool], str]] = {
    "gpu": (lambda text: text in gpu_options(), "a GPU of the list"),
    "framework": (lambda text: text in frameworks(), "a framework of the list"),
    "gpus": (lambda text: text.isdigit() and 1 <= int(text[:9]) <= MAX_GPUS, f"1 to {MAX_GPUS:,}"),
    "nodes": (lambda text: text.isdigit() and 1 <= int(text[:9]) <= MAX_GPUS, f"1 to {MAX_GPUS:,}"),
    "vram": (lambda text: _is_size(text), "GiB, more than 0"),
    "ram": (lambda text: _is_size(text), "GiB, more than 0"),
    "model": (
        lambda text: is_hub_id(text) or known_name(text) is not None,
        "a model of the list or a Hugging Face id",
    ),
}
MAX_GIB = 1_000_000.0


def _is_size(text: str) -> bool:
    try:
        return 0 < float(text) <= MAX_GIB
    except ValueError:
        return False


def refused_keys(parameters: Mapping[str, str]) -> list[str]:
    """Return the settings of a link whose text is not allowed."""
    return [key for key, text in parameters.items() if key in DEFAULTS and _problem(key, text)]


def check_link(parameters: Mapping[str, str]) -> list[str]:
    """Return a sentence for every query parameter that is not taken, at most ten."""
    notices = []
    for key, text in parameters.items():
        problem = _problem(key, text)
        if problem:
            notices.append(f"`{_plain(key)}={_plain(text)}` is not used: {problem}.")
    return notices[:10]


def _problem(key: str, text: str) -> str:
    if key in _CHECKS:
        accepted, allowed = _CHECKS[key]
        return "" if len(text) <= 200 and accepted(text) else f"it must be {allowed}"
    knob = BY_KEY.get(key)
    if knob is None:
        return "" if key in PAGE_KEYS else "there is no such setting"
    try:
        knobs.parse(knob, text)
    except ValueError as error:
        return f"it must be {error}"
    return ""


PAGE_KEYS = frozenset(
    {
        "embed",
        "embed_options",
        "look_for",
        "least",
        "search",
        "source",
        "quantity",
        "compare",
        "frameworks",
        "pin",
    }
)
"""Query parameters of the pages other than "Will it fit?", and Streamlit's own."""


def _plain(text: str) -> str:
    """Return hostile text as it can stand between backticks."""
    shown = "".join(char for char in text if char.isprintable() and char not in "`\\")
    return shown if len(shown) <= 40 else shown[:39] + "..."
