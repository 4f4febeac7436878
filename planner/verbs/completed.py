"""What a shell's completion offers: names of models, cards, frameworks and words of the flags."""

from collections.abc import Callable
from pathlib import Path

Complete = Callable[[str], list[str]]


def models(typed: str) -> list[str]:
    """Return catalogue models and run files that begin so."""
    from planner.models.catalogue import catalogue_names

    names = [name for name in catalogue_names() if name.startswith(typed.lower())]
    folder, _, start = typed.rpartition("/")
    here = Path(folder or ".").expanduser()
    found = here.glob(f"{start}*.y*ml") if here.is_dir() and "*" not in start else ()
    return names + sorted(str(Path(folder) / each.name) for each in found)


def gpus(typed: str) -> list[str]:
    """Return cards that begin so, or have it in their name."""
    from planner.machines.machine import gpu_catalogue

    ids = list(gpu_catalogue())
    plain = typed.lower()
    return [each for each in ids if each.startswith(plain)] or [e for e in ids if plain in e]


def frameworks(typed: str) -> list[str]:
    """Return framework families that begin so."""
    from planner.run.framework import families

    return [name for name in families() if name.startswith(typed.lower())]


def _words(name: str) -> Complete:
    def words(typed: str) -> list[str]:
        from planner.run import recipe

        return [each.value for each in getattr(recipe, name) if each.value.startswith(typed)]

    return words


COMPLETED: dict[str, Complete] = {
    "--gpu": gpus,
    "--framework": frameworks,
    "--task": _words("Task"),
    "--method": _words("Method"),
    "--optimizer": _words("Optimizer"),
    "--checkpointing": _words("Checkpointing"),
    "--attention": _words("Attention"),
    "--engine": _words("EngineKind"),
    "--shard": _words("Sharding"),
    "--model": models,
}
"""Flags whose values are known."""
