"""How far a config's rope scaling carries: vLLM 0.32's config/model.py, _get_and_verify_max_len."""

from collections.abc import Iterator, Mapping
from typing import Any

ALREADY_SCALED = frozenset({"su", "longrope", "llama3", "mrope", "default", "proportional"})
"""Kinds whose max_position_embeddings is what the scaling reaches already."""
MAX_FACTOR = 1_000_000


def scaled_positions(config: Mapping[str, Any], max_position: int) -> int:
    """Return the positions that rope scaling reaches; 0 when it changes nothing."""
    text = config.get("text_config")
    model_type = str(config.get("model_type", ""))
    if not max_position or model_type.startswith("gemma3"):
        return 0  # Gemma 3 says 131,072 with its factor counted in
    reached = max_position
    for rope in _scalings(text if isinstance(text, Mapping) else config):
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        factor = rope.get("factor", 1.0)
        if kind in ALREADY_SCALED or isinstance(factor, bool):
            continue
        if not isinstance(factor, int | float) or not 0 < factor <= MAX_FACTOR:
            continue
        original = rope.get("original_max_position_embeddings")
        if "yarn" in kind and isinstance(original, int) and not isinstance(original, bool):
            reached = max(reached, int(original * factor))
        else:
            reached = max(reached, int(max_position * factor))
    return reached if reached != max_position else 0


def first_positions(config: Mapping[str, Any]) -> int:
    """Return the positions of a long rope's short factors; 0 when there is one set for all."""
    text = config.get("text_config")
    settings = text if isinstance(text, Mapping) else config
    for rope in _scalings(settings):
        if str(rope.get("rope_type") or rope.get("type")) in {"longrope", "su"}:
            found = settings.get("original_max_position_embeddings")
            found = found or rope.get("original_max_position_embeddings")
            return found if isinstance(found, int) and not isinstance(found, bool) else 0
    return 0


def is_yarn(config: Mapping[str, Any]) -> bool:
    """Say whether the config scales its rotary positions by YaRN."""
    text = config.get("text_config")
    settings = _scalings(text if isinstance(text, Mapping) else config)
    return any("yarn" in str(rope.get("rope_type") or rope.get("type")) for rope in settings)


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield rope settings, of all layers or of each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if not isinstance(value, Mapping):
            continue
        inner = [item for item in value.values() if isinstance(item, Mapping)]
        yield from inner or [value]
