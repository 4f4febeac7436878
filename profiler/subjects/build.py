"""Builds a transformers model on the meta device: base, quantised linears, adapters, checkpointing."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.models.lora_rest import EMBEDDINGS
from planner.run.recipe import Attention, Checkpointing, Method
from profiler.cuda_attention import flash_attention_2
from profiler.subjects.experts import FALLBACK, LOOP, register
from profiler.subjects.older_versions import cast_all_but_norms
from profiler.subjects.options import StepOptions
from profiler.subjects.selective import contexts, keep_whole

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLASH = "vramwise_fa2"
TASK_TYPES = {"vocabulary": "CAUSAL_LM", "score": "SEQ_CLS", "none": "FEATURE_EXTRACTION"}
"""PEFT's; a sequence classifier's score is trained whole (modules_to_save)."""
NF4_BLOCK = 64
ABSMAX_BLOCK = 256


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of bf16, fp16 or fp32."""
    if name not in DTYPES:
        raise UsageError(f"dtype: {name[:20]!r} cannot be traced", hint="bf16, fp16 or fp32")
    return DTYPES[name]


def build(options: StepOptions) -> torch.nn.Module:
    """Return the model of `options` on the meta device, ready to train.

    Raises UnsupportedError when transformers has no causal LM for the config.
    """
    with torch.device("meta"), quiet():
        model: Any = base_model(options)
        if options.method is Method.QLORA:
            quantise(model, options)
        if options.method is not Method.FULL:
            model = add_adapters(model, options)
    if options.checkpointing is not Checkpointing.NONE:
        how: dict[str, Any] = {"use_reentrant": options.reentrant}
        if options.checkpointing is Checkpointing.SELECTIVE_OP:
            how = {"use_reentrant": False, "context_fn": contexts}
        model.gradient_checkpointing_enable(how)
        if options.checkpointing is Checkpointing.SELECTIVE_LAYER:
            keep_whole(model, options.checkpoint_every)
        if options.method is not Method.FULL:
            model.enable_input_require_grads()
    trained: torch.nn.Module = model.train()
    return trained


def base_model(options: StepOptions) -> Any:
    """Return the plain causal LM on the meta device."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.modeling_utils import AttentionInterface

    config = transformers_config(options.config, layers=options.layers)
    attention = {
        Attention.EAGER: "eager",
        Attention.SDPA: "sdpa",
        Attention.FLASH: FLASH,
    }[options.attention]
    if attention == FLASH:
        from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

        AttentionInterface.register(FLASH, flash_attention_2)
        AttentionMaskInterface.register(FLASH, flash_attention_mask)
    kind = type(config)
    families: list[Any] = [
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    ]
    known = [each for each in families[options.multimodal :] if kind in each._model_mapping]
    family: Any = known[0] if known else AutoModelForImageTextToText
    if options.head == "score":
        family, config.num_labels, config.pad_token_id = AutoModelForSequenceClassification, 1, 0
    elif options.head == "none":
        family = AutoModel
    settings = {"dtype": torch_dtype(options.dtype), "attn_implementation": attention}
    settings |= _experts(options)
    try:
        try:
            return family.from_config(config, **settings)
        except ValueError as error:
            # As transformers itself does when nobody asked: no SDPA means eager.
            if options.attention is not Attention.SDPA or "scaled_dot_product" not in str(error):
                raise
            return family.from_config(config, **settings | {"attn_implementation": "eager"})
    except (ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"transformers cannot build {config.model_type!r} as a causal LM: {first[:160]}"
        ) from error


def _experts(options: StepOptions) -> dict[str, str]:
    """Return transformers' setting for the experts; those that read values run as stated ones."""
    if options.experts not in ("eager", "fallback"):
        return {"experts_implementation": options.experts} if options.experts else {}
    model = model_spec_from_config(options.config)
    register(model, imbalance=options.imbalance, capacity=options.expert_capacity)
    return {"experts_implementation": LOOP if options.experts == "eager" else FALLBACK}


def transformers_config(config: dict[str, Any], *, layers: int | None = None) -> Any:
    """Return transformers' config object; `layers` cuts the decoder short, keeping its pattern."""
    from transformers import CONFIG_MAPPING

    fields = dict(config)
    kind = fields.pop("model_type", None)
    fields.pop("quantization_config", None)
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type {str(kind)[:60]!r} is not in this transformers: it cannot be traced"
        )
    if layers is not None:
        fields = shorten(fields, layers)
    try:
        result = CONFIG_MAPPING[kind](**fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"transformers refuses this {kind} config: {error}") from error
    result.use_cache = result.get_text_config().use_cache = False
    return result


def shorten(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the config with its first `layers` decoder layers."""
    short = dict(fields)
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if key in short:
            short[key] = layers
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == fields.get("num_hidden_layers"):
            short[key] = value[:layers]
    if isinstance(fields.get("linear_attn_config"), dict):  # Kimi lists its layers, counted from 1
        short["linear_attn_config"] = {
            key: [layer for layer in value if layer <= layers] if isinstance(value, list) else value
            for key, value in fields["linear_attn_config"].items()
        }
    if isinstance(fields.get("text_config"), dict):
        short["text_config"] = shorten(fields["text_config"], layers)
    return short


def quantise(model: Any, options: StepOptions) -> None:
    """Replace the linears that transformers would load in 4 bits; shapes as bitsandbytes stores them."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    compute = torch_dtype(options.autocast if options.autocast != "none" else options.dtype)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=options.double_quant,
        bnb_4bit_compute_dtype=compute,
    )
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), settings)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            _pack(module, torch_dtype(options.dtype), double_quant=options.double_quant)
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    model.quantization_method = "bitsandbytes"


def _pack(linear: Any, dtype: torch.dtype, *, double_quant: bool) -> None:
    """Give a Linear4bit its packed weight and quantisation state."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    elements = linear.in_features * linear.out_features
    blocks = -(-elements // NF4_BLOCK)
    state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8 if double_quant else torch.float32),
        shape=torch.Size((linear.out_features, linear.in_features)),
        code=torch.empty(16),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    if double_quant:
        state.offset = torch.empty(())
        state.state2 = QuantState(
            absmax=torch.empty(-(-blocks // ABSMAX_BLOCK)),
            code=torch.empty(256),
            blocksize=ABSMAX_BLOCK,
            dtype=torch.float32,
        )
        state.nested = True
    packed = torch.empty(((elements + 1) // 2, 1), dtype=torch.uint8)
    linear.weight = Params4bit(
        packed, requires_grad=False, quant_state=state, bnb_quantized=True, module=linear
    )
    linear.quant_state = state  # where it is found when a parameter was made anew: under FSDP2
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias.to(dtype), requires_grad=False)


def add_adapters(model: Any, options: StepOptions) -> Any:
    """Return the PEFT model, prepared for k-bit training where the options say so."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if options.method is Method.QLORA and options.prepare_kbit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if options.kbit_norms_only:
            cast_all_but_norms(model)
    targets = options.lora_targets
    try:
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=options.lora_rank,
                lora_alpha=options.lora_rank,
                lora_dropout=options.lora_dropout,
                use_dora=options.dora,
                modules_to_save=list(options.modules_to_save) or None,
                ensure_weight_tying=options.ties_saved_modules and _saves_tied(model, options),
                bias=options.lora_bias,  # type: ignore[arg-type]
                target_modules=targets if isinstance(targets, str) else list(targets),
                target_parameters=list(options.lora_target_parameters) or None,
                task_type=TASK_TYPES[options.head],
            ),
            autocast_adapter_dtype=options.adapter_dtype == "fp32",
        )
    except ValueError as error:
        raise UsageError(f"lora.targets: {str(error)[:200]}") from error
    # PEFT's own cast looks at the base layer's device, which is meta here.
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = parameter.data.to(torch_dtype(options.adapter_dtype))
    return adapted


def _saves_tied(model: Any, options: StepOptions) -> bool:
    """Say whether a tied embedding or its head is trained whole."""
    ends = (*EMBEDDINGS, "lm_head")
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    return tied and any(name.endswith(ends) for name in options.modules_to_save)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the advice that transformers and PEFT print about models without weights."""
    import warnings

    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
