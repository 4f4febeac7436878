"""LLaMA-Factory YAML, both schemas (0.9.5: src/llamafactory/hparams, model/{loader,adapter,patcher}.py)."""

from pathlib import Path
from typing import Any

from planner.importers import words
from planner.importers.fsdp_config import fsdp_setting
from planner.importers.image_limits import image_limit
from planner.importers.launch import (
    apply_launch,
    finish_sharding,
    from_words,
    launched,
    set_degrees,
)
from planner.importers.names import quantization_in_name
from planner.importers.settings import Imported, Settings, as_names
from planner.importers.spread import Launch
from planner.run.recipe import Checkpointing, Loss, Method, Optimizer, Sharding, Task

VERSION = "0.9.5"
_STAGES = {
    "pt": Task.SFT,
    "sft": Task.SFT,
    "rm": Task.REWARD,
    "ppo": Task.PPO,
    "dpo": Task.DPO,
    "kto": Task.KTO,
}
_OWN_TASKS = {"orpo": Task.ORPO, "simpo": Task.SIMPO}
"""pref_loss of stage dpo that compares with no reference."""


def read(
    values: dict[str, Any],
    *,
    version: str | None = None,
    base: Path | None = None,
    text: str = "",
    launch: Launch | None = None,
) -> Imported:
    """Return a LLaMA-Factory config as a run; `text` holds the words that start it."""
    settings = Settings(
        values, tool="llamafactory", version=version or VERSION, assumed=version is None
    )
    if not {"model_name_or_path", "finetuning_type"} & set(values):
        return _read_v1(settings)
    recipe: dict[str, Any] = {"framework": settings.framework("llamafactory")}
    model = str(settings.raw("model_name_or_path", to="model", default=""))
    stage = str(settings.raw("stage", to="task", default="sft"))
    recipe["task"] = _STAGES.get(stage, Task.SFT)
    if stage not in _STAGES:
        settings.unread("stage", stage, "planned as SFT")
    method = _method(settings, recipe, model)
    _precision(settings, recipe, method)
    words.hf_batch(settings, recipe, default=8)
    recipe["context"] = settings.count("cutoff_len", to="context", default=2048)
    recipe["packing"] = settings.flag(
        "packing", to="packing", default=stage == "pt"
    ) or settings.flag("neat_packing")
    _compute(settings, recipe, stage)
    gpus = _sharding(settings, recipe, base, text, launch)
    _special_optimizers(settings, recipe)
    _preferences(settings, recipe, method)
    image_limit(settings, recipe, model, "image_max_pixels")
    settings.raw("image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps")
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector"):
        if settings.raw(key) is not None and not settings.flag(key, default=True):
            settings.effect(
                f"{key} false: that part's gradients and activations come on top of the text's"
            )
    if settings.flag("freeze_language_model", default=False):
        settings.effect(
            "freeze_language_model true: the text's weights are not trained: their gradients and states are planned"
            " all the same, an upper bound"
        )
    return settings.finish(model, recipe=recipe, lora=_lora(settings, method), engine={}, gpus=gpus)


def _preferences(settings: Settings, recipe: dict[str, Any], method: Method) -> None:
    """Read what stages with a second model or pairs have."""
    if recipe["task"] in (Task.DPO, Task.KTO):
        recipe["beta"] = settings.number("pref_beta", to="beta", default=0.1)
        loss = str(settings.raw("pref_loss", to="algorithm", default="sigmoid"))
        if recipe["task"] is Task.DPO:
            recipe["task"] = _OWN_TASKS.get(loss, Task.DPO)
        if recipe["task"] in (Task.DPO, Task.KTO):
            recipe["reference"] = words.reference(method, needed=True)
    if recipe["task"] is Task.PPO:
        recipe["completion_length"] = settings.count(
            "max_new_tokens", to="completion_length", default=1024
        )
        recipe["prompt_length"], recipe["context"] = recipe["context"], None
        judge = str(settings.raw("reward_model", to="reward_model", default=""))
        kind = settings.raw("reward_model_type", to="reward_model", default="lora")
        if str(kind) == "full" and judge:
            recipe["reward_model"] = judge
        elif str(kind) in ("lora", "api"):
            recipe["reward_model"] = "none"  # an adapter of the policy's own base, or a server
        recipe["reference"] = words.reference(method, needed=True)
        settings.effect(
            "the critic is a value head on the policy itself: planned as a model of its own, an upper bound"
        )
    settings.raw("ref_model", "ref_model_adapters", "ref_model_quantization_bit")


def _compute(settings: Settings, recipe: dict[str, Any], stage: str) -> None:
    off = settings.flag("disable_gradient_checkpointing", to="checkpointing")
    recipe["compile"] = settings.flag("torch_compile", to="compile")
    recipe["checkpointing"] = words.checkpointing(
        not off, offload=settings.flag("use_unsloth_gc") and not off
    )
    if settings.raw("gradient_checkpointing") is not None:
        settings.effect(
            "gradient_checkpointing is not the switch here: disable_gradient_checkpointing is"
        )
    chosen = settings.raw("flash_attn", to="attention", default="auto")
    recipe["attention"] = words.attention(chosen) or "sdpa"
    liger = settings.flag("enable_liger_kernel", to="loss")
    recipe["loss"] = Loss.CHUNKED if liger and stage in ("pt", "sft") else Loss.FULL
    if settings.flag("upcast_lmhead_output"):
        settings.effect("upcast_lmhead_output: logits in fp32, 4 B more for each")
    settings.raw("upcast_layernorm", "rope_scaling", "use_unsloth", "shift_attn", "resize_vocab")
    if liger and stage not in ("pt", "sft"):
        settings.effect("Liger's fused loss works for stages pt and sft only: logits stay whole")


def _method(settings: Settings, recipe: dict[str, Any], model: str) -> Method:
    kind = str(settings.raw("finetuning_type", to="method", default="lora"))
    bits = settings.count("quantization_bit", to="quantization", off=True)
    kernels = str(settings.raw("quantization_method", default="bnb"))
    if bits and kernels.lower() not in ("bnb", "bitsandbytes"):
        settings.effect(
            f"quantization_method {kernels}: its {bits}-bit weights are planned as bitsandbytes'"
        )
    named = quantization_in_name(model)
    if kind == "full":
        method = Method.FULL
    elif bits == 8:
        method, recipe["quantization"] = Method.LORA, "int8"
    elif bits or named:
        method = Method.QLORA
        recipe["quantization"] = named or "nf4"
        recipe["double_quant"] = settings.flag("double_quantization", default=True)
    else:
        method = Method.LORA
    if kind not in ("full", "lora"):
        settings.unread("finetuning_type", kind, "planned as LoRA")
    recipe["method"] = method
    return method


def _precision(settings: Settings, recipe: dict[str, Any], method: Method) -> None:
    pure, bf16, fp16 = (
        settings.flag(key, to="dtype" if key == "pure_bf16" else "")
        for key in ("pure_bf16", "bf16", "fp16")
    )
    word = "bf16" if bf16 or pure else "fp16" if fp16 else None
    recipe["dtype"] = "bf16"
    recipe["mixed_precision"] = "none" if pure or word is None else word
    if word is None:
        settings.effect(
            "neither bf16 nor fp16 is set: mixed precision is off, only a warning is printed"
        )
    if method is Method.FULL and not pure and not settings.flag("use_badam"):
        recipe["dtype"] = "fp32"
        settings.effect(
            "trainable parameters are cast to fp32 (16 B/parameter in full fine-tuning); pure_bf16: true halves that"
        )


def _special_optimizers(settings: Settings, recipe: dict[str, Any]) -> None:
    for key in ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"):
        if settings.flag(key):
            if key == "use_muon":
                recipe["optimizer"] = Optimizer.MUON
            else:
                settings.effect(
                    f"{key[4:]}: its reduced optimizer state is not modelled; AdamW is planned, an upper bound"
                )
    for key in list(settings.values):
        if key.startswith(("galore_", "apollo_", "badam_")):
            settings.used.add(key)


def _lora(settings: Settings, method: Method) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    settings.raw("lora_alpha")
    return {
        "rank": settings.count("lora_rank", to="lora.rank", default=8),
        "targets": words.lora_targets(
            settings.raw("lora_target", to="lora.targets", default="all")
        ),
        "dropout": settings.number("lora_dropout", to="lora.dropout", default=0.0),
        "dora": settings.flag("use_dora"),
        "use_rslora": settings.flag("use_rslora", to="lora.use_rslora"),
        "modules_to_save": as_names(settings.raw("additional_target", to="lora.modules_to_save")),
    }


def _sharding(
    settings: Settings,
    recipe: dict[str, Any],
    base: Path | None,
    text: str,
    launch: Launch | None,
) -> int | None:
    gpus = launched(settings, recipe, launch, base)
    zero3 = recipe.get("sharding") is Sharding.ZERO3
    if zero3 and recipe["method"] is Method.FULL and recipe["mixed_precision"] != "none":
        recipe["dtype"], recipe["master_weights"] = "bf16", True  # no fp32 cast under ZeRO-3
    if fsdp := fsdp_setting(settings):
        apply_launch(settings, recipe, fsdp)
    # of forks with sequence parallelism, such as 360-LLaMA-Factory
    ranks = settings.count("sequence_parallel_size", "cp_size", to="parallel.context", off=True)
    gpus = set_degrees(settings, recipe, gpus, context=ranks, context_kind="ulysses")
    return finish_sharding(settings, recipe, gpus or from_words(text).gpus)


def _read_v1(settings: Settings) -> Imported:
    """The newer schema: model, micro_batch_size, peft_config, dist_config, quant_config."""
    recipe: dict[str, Any] = {"framework": settings.framework("llamafactory"), "task": Task.SFT}
    model = str(settings.raw("model", to="model"))
    peft = str(
        settings.raw("peft_config.name", "peft_config.type", to="method", default="none")
    ).lower()
    method = Method.LORA if "lora" in peft else Method.FULL
    if (
        settings.raw(
            "quant_config.name", "quant_config.quantization_bit", "quant_config", to="quantization"
        )
        and method is Method.LORA
    ):
        method, recipe["quantization"] = Method.QLORA, "nf4"
    recipe["method"] = method
    bf16 = settings.flag("bf16", to="dtype", default=True)
    recipe["dtype"], recipe["mixed_precision"] = (
        ("bf16" if bf16 else "fp32"),
        ("bf16" if bf16 else "none"),
    )
    micro = settings.count("micro_batch_size", to="micro_batch_size", default=1) or 1
    recipe["micro_batch_size"] = micro
    whole = settings.count("global_batch_size", to="gradient_accumulation")
    recipe["gradient_accumulation"] = max(1, (whole or micro) // micro)
    recipe["context"] = settings.count("cutoff_len", to="context", default=2048)
    on = settings.flag("enable_activation_checkpointing", to="checkpointing", default=True)
    recipe["checkpointing"] = Checkpointing.FULL if on else Checkpointing.NONE
    recipe["attention"] = words.attention(
        settings.raw("flash_attn", to="attention", default="sdpa")
    )
    recipe["optimizer"] = words.optimizer(
        settings, settings.raw("optim_config.name", to="optimizer", default="adamw")
    )
    dist = str(settings.raw("dist_config.name", to="sharding", default=""))
    if dist:
        recipe["sharding"] = Sharding.FSDP if "fsdp" in dist.lower() else from_words(dist).sharding
    settings.raw("peft_config.lora_alpha", "peft_config.alpha")
    lora = {
        "rank": settings.count(
            "peft_config.r", "peft_config.lora_rank", "peft_config.rank", to="lora.rank", default=8
        ),
        "targets": words.lora_targets(
            settings.raw("peft_config.target_modules", to="lora.targets", default="all")
        ),
    }
    gpus = finish_sharding(settings, recipe, None)
    return settings.finish(
        model, recipe=recipe, lora=lora if method is not Method.FULL else {}, engine={}, gpus=gpus
    )
