"""The model that somebody typed: a path, a name in any spelling, a hub id, a fine-tune of known shapes, GGUF files."""

from dataclasses import dataclass, replace
from pathlib import Path

from planner.errors import UnknownNameError, UsageError, VramwiseError
from planner.importers.names import resolve_model, resolve_name
from planner.models.catalogue import model_names, models_like
from planner.models.gguf import GgufRepository, look
from planner.models.hub import find_model
from planner.models.spec import ModelSpec
from planner.names import without_file_kind
from planner.units import format_bytes

SHOWN = 6
"""Files of a GGUF repository, and models that a name could mean, in one line."""


@dataclass(frozen=True, slots=True)
class Typed:
    """The model of what was typed."""

    model: ModelSpec
    said: str = ""
    """What was made of the name, for the person who typed it; empty when there is nothing to say."""
    gguf: GgufRepository | None = None


def typed_model(
    text: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    timeout_s: float = 10,
) -> Typed:
    """Return the model somebody means; nothing is asked of the hub for what is known here.

    Raises UnknownNameError with near matches, UsageError when several models could be meant, and what
    find_model raises.
    """
    name = text.strip()
    known = name.lower() in model_names() and revision is None
    if known or _is_path(name):
        return Typed(find_model(name, revision=revision, offline=offline))
    if "/" not in name:
        return _by_words(name, offline)
    if name.lower().endswith("gguf"):
        return _gguf(name, revision=revision, token=token, offline=offline, timeout_s=timeout_s)
    if offline:
        return _offline(name, revision)
    try:
        return Typed(find_model(name, revision=revision, token=token, timeout_s=timeout_s))
    except UnknownNameError:
        raise
    except UsageError as error:
        if "has no config.json" not in error.message:
            raise
        return _gguf(name, revision=revision, token=token, offline=offline, timeout_s=timeout_s)
    except VramwiseError as error:  # the hub is down or slow
        same = resolve_model(name)
        if same is None or revision is not None:
            raise
        return Typed(same, f"{name}: planned by the shapes of {same.name}, since {error.message}")


def _is_path(name: str) -> bool:
    return name.endswith(".json") or name.startswith((".", "/", "~")) or Path(name).is_dir()


def _by_words(name: str, offline: bool) -> Typed:
    like = models_like(name)
    if len(like) == 1:
        model = find_model(like[0])
        return Typed(model, f"{name!r} is {model.name}")
    same = resolve_name(name) or resolve_name(without_file_kind(name))
    if same is not None:
        model = find_model(same, offline=True)
        return Typed(model, f"{name!r} has the shapes of {model.name}")
    if like:
        raise UsageError(
            f"model: {name[:60]!r} could be several models",
            hint=f"say which: {', '.join(like[:SHOWN])}",
        )
    return Typed(find_model(name, offline=offline))


def _offline(name: str, revision: str | None) -> Typed:
    try:
        return Typed(find_model(name, revision=revision, offline=True))
    except VramwiseError:
        same = resolve_model(name)
        if same is None or revision is not None:
            raise
    return Typed(same, f"{name} has the shapes of {same.name}")


def _gguf(
    name: str, *, revision: str | None, token: str | None, offline: bool, timeout_s: float
) -> Typed:
    """Return the model that a repository's GGUF files were made of, and the files."""
    found, error = None, None
    if not offline:
        try:
            found = look(name, revision=revision, token=token, timeout_s=timeout_s)
        except VramwiseError as failed:
            error = failed
    if found is None and error is None and not offline:
        raise UsageError(
            f"{name!r} has neither a config.json nor GGUF files",
            hint="name a repository of a transformers model",
        )
    base = found.base_model if found else ""
    same = resolve_model(base) if base else None
    same = same or resolve_model(name)
    if same is None and base:
        same = find_model(base, token=token, offline=offline, timeout_s=timeout_s)
    if same is None:
        if error is not None:
            raise error
        raise UsageError(
            f"{name!r} holds GGUF files, and which model they were made of is not said",
            hint="plan that model: vramwise plan OWNER/MODEL",
        )
    sizes = [
        f"{each.kind or each.name} {format_bytes(each.size_bytes)}"
        for each in (found.files if found else ())
    ]
    more = f" and {len(sizes) - SHOWN} more" if len(sizes) > SHOWN else ""
    listed = f"; its files: {', '.join(sizes[:SHOWN])}{more}" if sizes else ""
    said = f"{name} holds GGUF files of {base or same.name}, which is what is planned{listed}"
    return Typed(replace(same, hub_id=base or same.hub_id), said, found)
