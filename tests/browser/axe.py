"""What axe-core finds on a page: WCAG 2.2 A and AA."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
ASK = "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})"


@cache
def _script() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    assert found
    assert found.origin
    return Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8")


def violations(page: Any) -> list[str]:
    """Return a line for every element that breaks a rule."""
    page.evaluate(_script())
    return [
        f"{broken['id']}: {node['html'][:160]}"
        for broken in page.evaluate(ASK, list(RULES))["violations"]
        for node in broken["nodes"]
    ]
