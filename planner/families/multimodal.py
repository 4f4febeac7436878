"""Multimodal models: the text part by its own family, the towers counted beside it."""

from collections.abc import Callable
from dataclasses import replace

from planner.families import build_text
from planner.families.audio import VOXTRAL_TEXT, audio_spec, audio_towers
from planner.families.fields import ConfigFields
from planner.families.gemma_towers import gemma4_towers
from planner.families.llava import idefics3, internvl, llava
from planner.families.towers import VISION, Modules, minimax_m3, pixtral, pixtral_vision
from planner.families.vision import vision_spec
from planner.models.spec import ModelSpec

_TEXT = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "glm4v_moe": "glm4v_moe_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "minimax_m3_vl": "minimax_m3_vl_text",
}
MISTRAL3_TEXT = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "vocab_size": 131072,
}
"""What Mistral3Config builds without a text_config."""
_AUTO_TEXT = {
    "mistral3": "mistral",
    "kimi_k25": "deepseek_v3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "internvl": "qwen2",
    "idefics3": "llama",
    "smolvlm": "llama",
    "qwen2_audio": "qwen2",
    "voxtral": "llama",
}
"""Families whose text_config names its own model_type, with the type of one that does not."""


_OWN_TOWERS: dict[str, Callable[[ConfigFields, int], Modules]] = {
    "gemma4": gemma4_towers,
    "llava": llava,
    "llava_next": llava,
    "llava_onevision": llava,
    "internvl": internvl,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "qwen2_audio": audio_towers,
    "voxtral": audio_towers,
}
"""Families whose towers read the outer config too."""


def text_fields(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the text part; Qwen2-VL's old configs keep them at the top level."""
    given = fields.config.get("text_config")
    kind = _TEXT.get(fields.model_type, "")
    if given is None and fields.model_type in ("qwen2_vl", "qwen2_5_vl"):
        return ConfigFields(fields.config, kind)
    if kind:
        return fields.sub("text_config", kind)
    if given is None and fields.model_type == "mistral3":
        return ConfigFields(MISTRAL3_TEXT, "mistral")
    text = fields.sub("text_config")
    usual = _AUTO_TEXT[fields.model_type]
    filled = {**VOXTRAL_TEXT, **text.config} if fields.model_type == "voxtral" else text.config
    return ConfigFields(filled, text.model_type or usual, path=text.path)


def is_tied(fields: ConfigFields, text: ConfigFields, spec: ModelSpec) -> bool:
    """Say whether the head is tied: the outer config decides, but for the families below."""
    if fields.model_type == "llama4":
        return spec.tied
    if fields.model_type == "mllama":
        return False
    outer = fields.flag("tie_word_embeddings", fields.defaults.get("tie_word_embeddings", False))
    if fields.model_type in ("llava", "llava_onevision"):
        return outer or spec.tied
    if fields.model_type in ("qwen2_vl", "qwen2_5_vl", "minimax_m3_vl"):
        return outer or text.config.get("tie_word_embeddings") is True
    return outer


def towers(fields: ConfigFields, text_hidden: int) -> Modules:
    """Return the towers and projectors of the config."""
    if fields.model_type == "gemma3n":
        # its vision tower is a timm network that the config only names
        return ()
    if fields.model_type in _OWN_TOWERS:
        return _OWN_TOWERS[fields.model_type](fields, text_hidden)
    if fields.model_type == "mistral3":
        vision = pixtral_vision(fields)
        merge, bias = fields.integer("spatial_merge_size"), fields.flag("multimodal_projector_bias")
        return pixtral(vision, text_hidden, merge=merge, bias=bias)
    if fields.model_type == "minimax_m3_vl":
        vision = fields.sub("vision_config", "minimax_m3_vl_vision")
        return minimax_m3(vision, text_hidden, project=fields.integer("projector_hidden_size"))
    vision = fields.sub("vision_config", fields.sub_types["vision_config"])
    return VISION[fields.model_type](vision, text_hidden)


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a multimodal model."""
    text = text_fields(fields)
    spec = build_text(text)
    return replace(
        spec,
        model_type=fields.model_type,
        architecture=fields.architecture,
        tied=is_tied(fields, text, spec),
        towers=towers(fields, spec.hidden),
        vision=vision_spec(fields, spec.hidden),
        audio=audio_spec(fields, spec.hidden),
    )
