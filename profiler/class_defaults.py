"""The defaults of transformers' configuration classes, as data/models/class_defaults.json keeps them.

The planner reads the file and never transformers; a test compares the two. After a transformers
upgrade, `python -m profiler.class_defaults` writes the file anew.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from planner.families.fields import known_model_types

_LEFT_OUT = re.compile(
    r"_token_id|_token_index|_token|initializer|_eps$|^use_cache$|^rope|rope_(theta|scaling|param|inter)"
    r"|rotary_(pct|base)|rotary_emb_base|_coef$|scoring|norm_topk|topk_group|n_group$|topk_method"
    r"|aux_loss|^output_(attentions|hidden|scores|router)|^return_dict|summary|pretraining_tp"
    r"|time_step_(min|max|floor|limit|init|scale)|ep_size|_std$|_factor$|multiplier|dtype"
)
"""Fields that move no byte."""
_KEPT = {
    "logits_scaling",
    "embedding_multiplier",
    "mamba_ssm_cache_dtype",
    "tie_word_embeddings",
    "router_aux_loss_coef",
    "output_router_logits",
}
_REMOTE: dict[str, dict[str, Any]] = {
    "internlm2": {
        "config_class": "",
        "architecture": "InternLM2ForCausalLM",
        "aliases": {},
        "sub_configs": {},
        "defaults": {
            "num_key_value_heads": None,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "bias": True,
            "tie_word_embeddings": False,
        },
    },
    "baichuan": {
        "config_class": "",
        "architecture": "BaichuanForCausalLM",
        "aliases": {},
        "sub_configs": {},
        "defaults": {
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
    },
}
"""Models whose configuration class is in their own repository."""


def class_entry(model_type: str) -> dict[str, Any]:
    """Return the entry of one model type: class, architecture, old spellings, field defaults."""
    if model_type in _REMOTE:
        return _REMOTE[model_type]
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    defaults = {}
    for field in dataclasses.fields(config_class):
        left_out = _LEFT_OUT.search(field.name) or field.name in common
        if field.name.startswith("_") or (left_out and field.name not in _KEPT):
            continue
        value = _default(field)
        if value is not dataclasses.MISSING:
            defaults[field.name] = list(value) if isinstance(value, tuple) else value
    spellings = getattr(config_class, "attribute_map", None) or {}
    parts = getattr(config_class, "sub_configs", None) or {}
    return {
        "config_class": config_class.__name__,
        "architecture": _architecture(model_type),
        "aliases": {
            key: name for key, name in spellings.items() if not re.search("token_(id|index)", name)
        },
        "sub_configs": {key: getattr(part, "model_type", "") for key, part in parts.items()},
        "defaults": defaults,
    }


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _architecture(model_type: str) -> str:
    from transformers.models.auto import modeling_auto

    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ):
        name = mapping.get(model_type)
        if name:
            return name if isinstance(name, str) else str(name[0])
    return ""


def main() -> None:
    """Write data/models/class_defaults.json for the model types it has."""
    import transformers

    entries = {kind: class_entry(kind) for kind in known_model_types()}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in entries)
    source = f"transformers {transformers.__version__}, the fields of each configuration class"
    head = f' "source": {json.dumps(source)},\n "retrieved": "2026-11-29",\n'
    path = Path(__file__).parents[1] / "data" / "models" / "class_defaults.json"
    path.write_text(f'{{\n{head} "model_types": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
