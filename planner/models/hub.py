"""Finds a model: a catalogue name, a local folder or config.json, or a hub id.

Of a hub model only config.json and the safetensors header are read, never the weights.
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.datafiles import data_dir
from planner.errors import UnknownNameError, UsageError
from planner.families import model_spec_from_config
from planner.models.spec import ModelSpec
from planner.models.safetensors_header import checkpoint_dtype, folder_header

MAX_CONFIG_BYTES = 16 * 1024 * 1024
"""No model's config.json comes near this; a larger file is refused unread."""
_WHOLE = "take the whole config.json from the model's repository"


@lru_cache(maxsize=1)
def load_catalogue() -> dict[str, dict[str, Any]]:
    """Return every catalogue entry by its short name: config, exact count, aliases, sources."""
    text = (data_dir() / "models" / "catalogue.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    return {entry["name"]: entry for entry in entries}


def catalogue_names() -> list[str]:
    """Return the short names of the catalogue, in its order."""
    return list(load_catalogue())


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    """Every spelling, in lower case, to its short name; short names win over aliases."""
    names: dict[str, str] = {}
    for name, entry in load_catalogue().items():
        for spelling in (*entry["aliases"], entry["hub_id"]):
            names[spelling.lower()] = name
            owner = entry["hub_id"].split("/")[0]
            names[f"{owner}/{spelling}".lower()] = name
    return names | {name: name for name in load_catalogue()}


@lru_cache(maxsize=512)
def catalogue_model(name: str) -> ModelSpec:
    """Return the catalogue's model of this short name."""
    entry = load_catalogue()[name]
    spec = model_spec_from_config(entry["config"], name=name, source="catalogue")
    return replace(spec, hub_id=entry["hub_id"])


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
    known = _names().get(text.lower())
    if known and revision is None:
        return catalogue_model(known)
    path = Path(text).expanduser()
    if text.endswith(".json") or text.startswith((".", "/", "~")) or path.is_dir():
        return read_model(path)
    if _is_hub_id(text):
        from planner.models.hub_remote import fetch_model

        return fetch_model(
            text, revision=revision, token=token, offline=offline, timeout_s=timeout_s
        )
    raise UnknownNameError(
        "model",
        name_or_path,
        _names(),
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


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    """Return what `vramwise models NAME` prints: counts by module, cache, layers, dtype, sources.

    The cache is in bf16 and, for one more token, while no window is full.
    """
    from planner.terms.kv_cache import bytes_per_token, state_bytes

    entry = load_catalogue().get(spec.name, {}) if spec.source == "catalogue" else {}
    mixers: dict[str, int] = {}
    for layer in spec.layers:
        kind = layer.mixer.kind.value
        window = f":{layer.mixer.window}" if layer.mixer.window else ""
        mixers[kind + window] = mixers.get(kind + window, 0) + layer.count
    facts = {
        "name": spec.name,
        "hub_id": spec.hub_id,
        "model_type": spec.model_type,
        "architecture": spec.architecture,
        "parameters": spec.parameters,
        "text_parameters": spec.text_parameters,
        "active_parameters": spec.active_parameters,
        "mtp_parameters": sum(module.parameters for module in spec.extra)
        or entry.get("parameters_mtp", 0),
        "kv_bytes_per_token": bytes_per_token(spec),
        "state_bytes_per_sequence": state_bytes(spec),
        "parameters_by_module": dict(spec.parameters_by_module),
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocab,
        "tied_head": spec.tied,
        "max_position": spec.max_position,
        "layers": spec.num_layers,
        "layers_by_mixer": mixers,
        "checkpoint_dtype": spec.checkpoint_dtype,
        "checkpoint_quantization": spec.checkpoint_quantization,
        "source": spec.source,
    }
    for key in ("published_parameters", "agreement", "license", "gated", "notes"):
        if entry.get(key) not in (None, ""):
            facts[key] = entry[key]
    if entry:
        facts["config_source"] = entry["source"]
        facts["retrieved"] = entry["retrieved"]
    return facts
