"""Finds a model: a catalogue name, a local folder or config.json, or a hub id.

Of a hub model only config.json and the safetensors header are read, never the weights.
"""

from dataclasses import replace
from pathlib import Path

from planner.errors import UnknownNameError
from planner.families import model_spec_from_config
from planner.models.catalogue import catalogue_model, model_names
from planner.models.config_file import names_dtype, read_config
from planner.models.hub_remote import fetch_model
from planner.models.safetensors_header import checkpoint_dtype, folder_header
from planner.models.spec import ModelSpec


def find_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    timeout_s: float = 10,
) -> ModelSpec:
    """Return the model a person names: catalogue name, folder or config.json, or hub id.

    A `revision` skips the catalogue. Raises UnknownNameError with near matches, and UsageError
    for a bad config; a hub that cannot answer is one VramwiseError that says why.
    """
    text = name_or_path.strip()
    known = model_names().get(text.lower())
    if known and revision is None:
        return catalogue_model(known)
    path = Path(text).expanduser()
    if text.endswith(".json") or text.startswith((".", "/", "~")) or path.is_dir():
        return read_model(path)
    if _is_hub_id(text):
        return fetch_model(
            text, revision=revision, token=token, offline=offline, timeout_s=timeout_s
        )
    raise UnknownNameError(
        "model",
        name_or_path,
        model_names(),
        hint="or give a folder with a config.json, or a hub id such as Qwen/Qwen2.5-0.5B",
    )


def _is_hub_id(text: str) -> bool:
    owner, slash, name = text.partition("/")
    allowed = set("-._")
    return bool(slash and owner and name) and all(
        part.isascii() and all(char.isalnum() or char in allowed for char in part)
        for part in (owner, name)
    )


def read_model(path: Path) -> ModelSpec:
    """Return the model of a folder with a config.json, or of the file itself."""
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    name = file.parent.name if file.name == "config.json" else file.stem
    spec = model_spec_from_config(config, name=name, source=str(file))
    header = folder_header(file.parent) if not names_dtype(config) else None
    return replace(spec, checkpoint_dtype=checkpoint_dtype(header)) if header else spec
