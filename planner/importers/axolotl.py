"""axolotl YAML (schema of 0.19.0: src/axolotl/utils/schemas, loaders/model.py, loaders/adapter.py)."""

from pathlib import Path
from typing import Any

from planner.importers import words
from planner.importers.fsdp_config import fsdp_setting
from planner.importers.launch import (
    apply_launch,
    deepspeed_setting,
    finish_sharding,
    from_words,
    set_degrees,
)
from planner.importers.names import quantization_in_name
from planner.importers.settings import Imported, Settings, as_names
from planner.run.recipe import Checkpointing, EngineKind, Loss, Method, Reference, Task

VERSION = "0.19.0"
_TASKS = {
    "grpo": Task.GRPO,
    "gdpo": Task.GRPO,
    "dpo": Task.DPO,
    "ipo": Task.DPO,
    "kto": Task.KTO,
    "simpo": Task.SIMPO,
    "orpo": Task.ORPO,
}


def read(
    values: dict[str, Any], *, version: str | None = None, base: Path | None = None, text: str = ""
) -> Imported:
    """Return an axolotl config as a run; `base` is its path, for the DeepSpeed file it names."""
    settings = Settings(values, tool="axolotl", version=version or VERSION, assumed=version is None)
    recipe: dict[str, Any] = {"framework": settings.framework("axolotl")}
    engine: dict[str, Any] = {}
    model = str(settings.raw("base_model", to="model"))
    kind = settings.raw("rl", to="task")
    recipe["task"] = _TASKS.get(str(kind), Task.SFT) if kind else Task.SFT
    if kind and recipe["task"] in (Task.DPO, Task.GRPO):
        recipe["algorithm"] = str(kind)
    if settings.flag("reward_model", to="task"):
        recipe["task"] = Task.REWARD
    if settings.flag("process_reward_model", to="task"):
        settings.effect("a process reward model labels tokens: planned as SFT with its logits")
    method = _method(settings, recipe, model)
    _precision(settings, recipe, method)
    _batch(settings, recipe)
    _activations(settings, recipe, method)
    gpus = _sharding(settings, recipe, base, text)
    if kind:
        _reinforcement(settings, recipe, engine, method, str(kind))
    lora = _lora(settings, method)
    optimizer = settings.raw("optimizer", to="optimizer", default="adamw_torch_fused")
    words.low_rank(settings, optimizer)
    recipe["optimizer"] = words.optimizer(settings, optimizer)
    recipe["compile"] = settings.flag("torch_compile", to="compile")
    return settings.finish(model, recipe=recipe, lora=lora, engine=engine, gpus=gpus)


def _method(settings: Settings, recipe: dict[str, Any], model: str) -> Method:
    adapter = settings.raw("adapter", to="method")
    four, eight = settings.flag("load_in_4bit"), settings.flag("load_in_8bit")
    if adapter is None:
        settings.defaulted("method", "full")
        recipe["method"] = Method.FULL
        return Method.FULL
    method = Method.QLORA if str(adapter) == "qlora" else Method.LORA
    recipe["method"] = method
    named = quantization_in_name(model)
    if method is Method.QLORA:
        recipe["quantization"], recipe["double_quant"] = named or "nf4", True
        if not four and not named:
            settings.effect("adapter qlora without load_in_4bit: axolotl refuses this")
    elif eight:
        recipe["quantization"] = "int8"
    elif four:
        settings.effect(
            "load_in_4bit with adapter lora does not build the 4-bit config: planned as 16-bit"
        )
    return method


def _precision(settings: Settings, recipe: dict[str, Any], method: Method) -> None:
    bf16 = settings.raw("bf16", "bfloat16", to="dtype", default="auto")
    fp16 = settings.flag("fp16", "float16")
    on = str(bf16).lower() in ("true", "auto", "full")
    recipe["dtype"] = "bf16" if on else "fp16" if fp16 else "fp32"
    recipe["mixed_precision"] = "bf16" if on else "fp16" if fp16 else "none"
    settings.raw("tf32")
    if method is Method.FULL and on:
        settings.effect(
            "bf16 full fine-tuning has bf16 weights, gradients and Adam states and no fp32 master (except under FSDP or DeepSpeed)"
        )


def _batch(settings: Settings, recipe: dict[str, Any]) -> None:
    micro = settings.count("micro_batch_size", to="micro_batch_size", default=1)
    recipe["micro_batch_size"] = micro
    if settings.has("batch_size") and not settings.has("gradient_accumulation_steps"):
        whole = settings.count("batch_size", to="gradient_accumulation") or 1
        recipe["gradient_accumulation"] = max(1, whole // (micro or 1))
    else:
        recipe["gradient_accumulation"] = settings.count(
            "gradient_accumulation_steps", to="gradient_accumulation", default=1
        )
    recipe["context"] = settings.count("sequence_len", to="context", default=512)
    packing = settings.flag("sample_packing", to="packing")
    recipe["packing"] = packing
    settings.raw(
        "eval_sample_packing", "pad_to_multiple_of", "eval_batch_size", "eval_sequence_len"
    )
    padded = settings.flag("pad_to_sequence_len")
    if packing:
        settings.effect(
            "packing puts micro_batch_size x sequence_len tokens into one row: every micro-batch is full length"
        )
    elif not padded:
        settings.effect(
            "rows are padded to the longest of the batch: sequence_len is the worst case"
        )
    if settings.flag("batch_flattening"):
        recipe["packing"] = True


def _activations(settings: Settings, recipe: dict[str, Any], method: Method) -> None:
    checkpointing = settings.raw("gradient_checkpointing", to="checkpointing", default=False)
    offload = settings.raw("activation_offloading", to="checkpointing")
    settings.raw("gradient_checkpointing_kwargs")
    if str(checkpointing).startswith("offload") or (
        offload and str(offload).lower() not in ("false", "none")
    ):
        recipe["checkpointing"] = Checkpointing.OFFLOAD
    else:
        recipe["checkpointing"] = (
            Checkpointing.FULL if str(checkpointing).lower() == "true" else Checkpointing.NONE
        )
        if not settings.has("gradient_checkpointing"):
            settings.defaulted("checkpointing", "none")
    chosen = settings.raw("attn_implementation", to="attention")
    for key, name in (
        ("flash_attention", "flash"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
        ("xformers_attention", "flash"),
        ("flex_attention", "flash"),
    ):
        if settings.flag(key) and chosen is None:
            chosen = name
    recipe["attention"] = words.attention(chosen) if chosen else None
    plugins = " ".join(as_names(settings.raw("plugins") or ()))
    fused = (
        ("CutCrossEntropy" in plugins and settings.flag("cut_cross_entropy", default=True))
        or ("Liger" in plugins and settings.flag("liger_fused_linear_cross_entropy"))
        or settings.flag("chunked_cross_entropy")
    )
    recipe["loss"] = Loss.CHUNKED if fused else Loss.FULL
    if not fused:
        settings.defaulted("loss", "full (no fused loss in plugins)")
    settings.raw(
        "cut_cross_entropy",
        "liger_fused_linear_cross_entropy",
        "liger_rope",
        "liger_rms_norm",
        "liger_glu_activation",
        "liger_layer_norm",
        "liger_cross_entropy",
    )
    if settings.flag("tiled_mlp"):
        recipe["tiled_mlp"] = True
    kernels = [settings.raw(f"lora_{name}_kernel") for name in ("mlp", "qkv", "o", "embedding")]
    if method is not Method.FULL and all(kernel is None for kernel in kernels):
        settings.effect("fused LoRA kernels switch on by themselves: fewer saved activations")


def _lora(settings: Settings, method: Method) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    linear = settings.flag("lora_target_linear", to="lora.targets")
    named = settings.raw("lora_target_modules", to="lora.targets")
    if named is None and not linear:
        settings.effect(
            "neither lora_target_modules nor lora_target_linear is set: axolotl refuses this; planned as all-linear"
        )
    settings.raw("lora_alpha", "lora_model_dir", "lora_bias")
    return {
        "rank": settings.count("lora_r", to="lora.rank"),
        "targets": "all-linear" if linear or named is None else words.lora_targets(named),
        "dropout": settings.number("lora_dropout", to="lora.dropout", default=0.0),
        "dora": settings.flag("peft_use_dora"),
        "modules_to_save": as_names(
            settings.raw("lora_modules_to_save", to="lora.modules_to_save")
        ),
    }


def _sharding(
    settings: Settings, recipe: dict[str, Any], base: Path | None, text: str
) -> int | None:
    gpus = None
    value = settings.mapping("deepspeed") or settings.raw("deepspeed", to="sharding")
    if value:
        launch = deepspeed_setting(settings, value, base)
        if isinstance(value, str) and value.rstrip("/").endswith("zero2.json"):
            settings.effect("axolotl's own zero2.json offloads the optimizer to the CPU")
        gpus = apply_launch(settings, recipe, launch)
    fsdp = fsdp_setting(settings, version=settings.raw("fsdp_version"))
    if fsdp is not None:
        apply_launch(settings, recipe, fsdp)
        if recipe["method"] is Method.FULL and recipe["mixed_precision"] != "none":
            settings.effect(
                "FSDP with mixed precision casts trainable bf16 parameters to fp32: 16 B/parameter divided by the GPUs"
            )
    gpus = set_degrees(
        settings,
        recipe,
        _degrees(settings) or gpus or from_words(text).gpus,
        tensor=settings.count("tensor_parallel_size", to="parallel.tensor", off=True),
        context=settings.count(
            "context_parallel_size", "sequence_parallel_degree", to="parallel.context", off=True
        ),
        expert=settings.count("expert_parallel_size", to="parallel.expert", off=True),
    )
    return finish_sharding(settings, recipe, gpus)


def _degrees(settings: Settings) -> int | None:
    """Return the ranks of the device mesh, where the file states its shards."""
    shard, replicate = (
        settings.count(key, to="gpus", off=True) for key in ("dp_shard_size", "dp_replicate_size")
    )
    return (shard or 1) * (replicate or 1) if shard or replicate else None


def _reinforcement(
    settings: Settings, recipe: dict[str, Any], engine: dict[str, Any], method: Method, kind: str
) -> None:
    beta = settings.number(
        "trl.beta",
        "rl_beta",
        "dpo_beta",
        to="beta",
        default=0.0 if recipe["task"] is Task.GRPO else 0.1,
    )
    recipe["beta"] = beta
    if kind in ("orpo", "simpo"):
        recipe["reference"] = Reference.NONE
    elif method is not Method.FULL:
        recipe["reference"] = Reference.ADAPTER_OFF if beta else Reference.NONE
    elif kind not in ("orpo", "simpo"):
        recipe["reference"] = Reference.SEPARATE
        settings.effect("a second copy of the model is loaded for the reference")
    if recipe["task"] is not Task.GRPO:
        return
    recipe["num_generations"] = settings.count(
        "trl.num_generations", to="num_generations", default=8
    )
    completion = settings.count("trl.max_completion_length", to="completion_length")
    if completion:
        recipe["completion_length"] = completion
    if settings.flag("trl.use_vllm", to="engine"):
        # schemas/validation.py check_vllm_mode_set: unset is server, with a warning
        server = settings.raw("trl.vllm_mode", to="engine", default="server") == "server"
        engine["kind"] = EngineKind.VLLM_SERVER if server else EngineKind.VLLM_PUSH
        default = 0.9 if settings.has("trl.vllm_mode") else 0.3
        engine["gpu_memory_utilization"] = settings.number(
            "vllm.gpu_memory_utilization",
            "trl.vllm_gpu_memory_utilization",
            to="engine.gpu_memory_utilization",
            default=default,
        )
        parts = settings.count(
            "vllm.tensor_parallel_size",
            "trl.vllm_tensor_parallel_size",
            to="engine.tensor_parallel",
        )
        longest = settings.count("vllm.max_model_len", "trl.vllm_max_model_len", to="engine")
        if not server:
            engine["tensor_parallel"] = parts
            if longest:
                settings.effect(
                    f"vllm.max_model_len {longest:,}: planned with the recipe's lengths"
                )
        settings.quiet("=vllm.")
    else:
        engine["kind"] = EngineKind.TRANSFORMERS
