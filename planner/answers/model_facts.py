"""What a model is, for people and programs: `vramwise models NAME`."""

from typing import Any

from planner.dtypes import element_bytes
from planner.models.catalogue import load_catalogue
from planner.models.spec import ModelSpec
from planner.quant.table import canonical, scheme_table, stored_bytes
from planner.quant.training import Held
from planner.terms.kv_cache import bytes_per_token, state_bytes


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    """Return what `vramwise models NAME` prints: counts by module, cache, layers, dtype, sources.

    The cache is in bf16 and, for one more token, while no window is full.
    """
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
    facts |= stored_weights(spec)
    for key in ("published_parameters", "agreement", "license", "gated", "notes"):
        if entry.get(key) not in (None, ""):
            facts[key] = entry[key]
    if entry:
        facts["config_source"] = entry["source"]
        facts["retrieved"] = entry["retrieved"]
    return facts


def stored_weights(spec: ModelSpec) -> dict[str, Any]:
    """Return the checkpoint's bytes as stored, and as a trainer holds them (None: nothing trains it)."""
    published = canonical(spec.checkpoint_quantization)
    if not published:
        size = spec.parameters * element_bytes(spec.checkpoint_dtype)
        return {"weight_bytes": size, "trained_weight_bytes": size}
    # a quantised file that names no dtype keeps the rest in 16 bits: its kernels compute in them
    width = 2 if spec.checkpoint_dtype in ("fp8", "fp32") else element_bytes(spec.checkpoint_dtype)
    table = scheme_table(spec, published)
    size, how = stored_bytes(spec, table, width), table.training
    assert how is not None
    held = {Held.STORED: size, Held.HALF: 2 * spec.parameters, Held.NOTHING: None}[how.held]
    facts = {"weight_bytes": size, "trained_weight_bytes": held, "training": how.how}
    return facts | ({"quantization_notes": list(table.notes)} if table.notes else {})
