"""Finds the config.json behind a described run: the trace builds the model from it."""

from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.models.catalogue import load_catalogue
from planner.models.config_file import read_config
from planner.verbs.options import Described


def config_of(described: Described) -> dict[str, Any]:
    """Return the config.json of the run's model; raises UsageError if there is none to read."""
    entry = load_catalogue().get(described.model.name)
    if entry is not None and described.model.source == "catalogue":
        return dict(entry["config"])
    path = Path(described.run.model).expanduser()
    if path.is_dir():
        return read_config(path / "config.json")
    if path.is_file():
        return read_config(path)
    try:
        from huggingface_hub import hf_hub_download

        file = hf_hub_download(described.run.model, "config.json", revision=described.run.revision)
    except Exception as error:
        raise UsageError(
            f"model: no config.json for {described.run.model!r}: {str(error).splitlines()[0][:160]}"
        ) from error
    return read_config(Path(file))
