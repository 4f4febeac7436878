"""Turns a Hugging Face config into a ModelSpec, exact to the last parameter.

Each family group is one small module with `build(fields) -> ModelSpec`; this registry picks it
by model_type. An architecture that no module knows is an error, never a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from planner.errors import MissingExtraError, UnknownNameError, UnsupportedError, UsageError
from planner.families.fields import ConfigFields
from planner.families.rope import first_positions, is_yarn, scaled_positions
from planner.models.quantization import TEXT_ONLY, quantization_name
from planner.models.spec import ModelSpec

_FAMILIES: dict[str, str] = {
    "dense": (
        "llama mistral ministral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 "
        "starcoder2 granite smollm3 olmo olmo2 olmo3 glm glm4 seed_oss qwen2_vl_text "
        "qwen2_5_vl_text qwen3_vl_text"
    ),
    "experts": (
        "mixtral qwen2_moe qwen3_moe qwen3_vl_moe_text olmoe granitemoe granitemoeshared gpt_oss "
        "glm4_moe glm4v_moe_text minimax_m2 phimoe"
    ),
    "lightning": "minimax",
    "mamba": "mamba mamba2 falcon_mamba",
    "hybrid": "jamba falcon_h1 granitemoehybrid",
    "nemotron": "nemotron_h",
    "gated_delta": "qwen3_next qwen3_5_text qwen3_5_moe_text",
    "classic": "gpt2 gpt_bigcode gptj gpt_neox opt bloom falcon stablelm RefinedWebModel RefinedWeb",
    "gemma_next": "gemma3n_text gemma4_text",
    "llama_next": "llama4_text mllama_text_model",
    "multimodal": (
        "qwen2_vl glm4v_moe qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe mistral3 gemma3 gemma3n gemma4 "
        "llama4 mllama kimi_k25 minimax_m3_vl llava llava_next llava_onevision internvl idefics3 "
        "smolvlm qwen2_audio voxtral"
    ),
    "kimi": "kimi_linear kimi_k3",
    "lfm2": "lfm2",
    "remote": "internlm2 baichuan",
    "sparse": "deepseek_v4 minimax_m3 minimax_m3_vl_text",
    "mla": "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite glm_moe_dsa",
}
_MODULE_OF = {kind: module for module, kinds in _FAMILIES.items() for kind in kinds.split()}
outside_builder: Callable[[Mapping[str, Any]], ModelSpec] | None = None
"""Plans an architecture that no family knows; the application sets it, the planner never does."""
_DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
}


def supported_model_types() -> list[str]:
    """Return every model_type that can be planned."""
    return sorted(_MODULE_OF)


@cache
def _builder(module: str) -> Any:
    return import_module(f"planner.families.{module}").build


def build_text(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a (sub-)config by its model_type; raises UnsupportedError if unknown."""
    module = _MODULE_OF.get(fields.model_type)
    if module is None:
        raise unknown_architecture(fields.config, fields.model_type)
    spec: ModelSpec = _builder(module)(fields)
    return spec


def model_spec_from_config(
    config: Mapping[str, Any], *, name: str = "", source: str = ""
) -> ModelSpec:
    """Return the ModelSpec that a config.json describes.

    Raises UsageError naming the field, its value and what is allowed, and UnsupportedError for
    an architecture that is not known.
    """
    fields = ConfigFields(config, "")
    model_type = fields.text("model_type", "")
    if not model_type:
        raise UsageError(
            "config.json: model_type is missing",
            hint="take the whole config.json from the model's repository",
        )
    fields = ConfigFields(config, model_type)
    spec = build_text(fields) if model_type in _MODULE_OF else _build_outside(config, model_type)
    quantization = _quantization_config(fields)
    scaled = scaled_positions(fields.config, spec.max_position)
    return replace(
        spec,
        name=name or spec.name,
        source=source,
        architecture=_architecture(fields) or spec.architecture,
        checkpoint_dtype=_dtype(fields),
        rope_scaled_position=scaled,
        rope_first_position=first_positions(fields.config),
        yarn=is_yarn(fields.config),
        quantization_config=quantization,
        checkpoint_quantization=quantization_name(
            quantization, experts=str(config.get("expert_dtype", ""))
        ),
    )


def _build_outside(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """Return what the application's builder makes of an unknown architecture, if it can."""
    if outside_builder is not None:
        try:
            return outside_builder(config)
        except (MissingExtraError, UnknownNameError):
            pass
    raise unknown_architecture(config, model_type)


def unknown_architecture(config: Mapping[str, Any], model_type: str) -> UnsupportedError:
    """Return the error for a model_type that no family covers, with the fields it lacks."""
    wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    lacking = [field for field in wanted if field not in config]
    lacks = f"; it lacks {', '.join(lacking)}" if lacking else ""
    return UnsupportedError(
        f"model_type {model_type[:60]!r} is not an architecture that the planner knows{lacks}",
        hint="with the train extra installed the vramwise command plans it from transformers' own "
        "module tree (in Python: profiler.meta_model.model_spec_from_transformers)",
    )


def _architecture(fields: ConfigFields) -> str:
    names = fields.items("architectures", None)
    return names[0] if names and isinstance(names[0], str) else ""


def _dtype(fields: ConfigFields) -> str:
    for config in (fields.config, fields.config.get("text_config")):
        if not isinstance(config, Mapping):
            continue
        value = config.get("dtype") or config.get("torch_dtype")
        if value is not None:
            text = str(value).removeprefix("torch.")
            if text not in _DTYPES:
                raise UsageError(
                    f"torch_dtype: {text[:40]!r} is not allowed",
                    hint=f"one of {', '.join(sorted(_DTYPES))}",
                )
            return _DTYPES[text]
    return "fp32"


def _quantization_config(fields: ConfigFields) -> dict[str, Any]:
    for config in (fields.config, fields.config.get("text_config")):
        if isinstance(config, Mapping) and config.get("quantization_config") is not None:
            value = config["quantization_config"]
            if not isinstance(value, Mapping):
                raise UsageError("quantization_config: expected an object of fields")
            inside = {} if config is fields.config else {TEXT_ONLY: True}
            return {**value, **inside}
    return {}
