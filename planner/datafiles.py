"""Finds the shipped data: inside the wheel, or the repository's data/ in a checkout."""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


@cache
def data_dir() -> Traversable:
    """Return the data folder, whichever way vramwise was installed."""
    installed = files("planner") / "_data"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "data"
