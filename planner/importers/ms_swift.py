"""ms-swift shell scripts and YAML (4.6.0: swift/arguments, swift/trainers, swift/config)."""

from math import ceil
from pathlib import Path
from typing import Any

from planner.importers import words
from planner.importers.fsdp_config import fsdp_setting
from planner.importers.image_limits import image_limit
from planner.importers.launch import (
    apply_launch,
    deepspeed_setting,
    set_degrees,
    visible_devices,
)
from planner.importers.launchers import started
from planner.importers.names import quantization_in_name, resolve_model
from planner.importers.settings import Imported, Settings, as_int, as_names
from planner.importers.shell import Script, flags
from planner.run.recipe import Checkpointing, EngineKind, Loss, Method, Reference, Sharding, Task

VERSION = "4.6.0"
_TASKS = {
    "grpo": Task.GRPO,
    "dpo": Task.DPO,
    "kto": Task.KTO,
    "simpo": Task.SIMPO,
    "orpo": Task.ORPO,
    "cpo": Task.ORPO,  # pairs and their likelihood, no reference
    "rm": Task.REWARD,
    "ppo": Task.PPO,
    "gkd": Task.DISTILL,
}


def read_script(script: Script, *, version: str | None = None) -> Imported | None:
    """Return the run of the first `swift sft|pt|rlhf` command, or None."""
    for command, environment in zip(script.commands, script.prefixes, strict=True):
        names = [Path(word).name for word in command]
        if "megatron" in names:  # megatron_flags.py reads those
            continue
        for verb in ("sft", "pt", "rlhf"):
            own = [  # ms-swift 1's scripts, and those that `swift VERB` starts
                place
                for place, word in enumerate(command)
                if names[place] == f"llm_{verb}.py" or word.endswith(f"swift/cli/{verb}.py")
            ]
            if own or (
                verb in names[:4]
                and ("swift" in names or any(f"{verb}.py" in name for name in names))
            ):
                values = flags(command[(own[0] if own else names.index(verb)) + 1 :])
                program = started(command, environment) if own else None
                if program is not None and program.processes:
                    environment = {**environment, "NPROC_PER_NODE": str(program.processes)}
                return read({**values, "verb": verb}, environment=environment, version=version)
    return None


def read(
    values: dict[str, Any], *, environment: dict[str, str] | None = None, version: str | None = None
) -> Imported:
    """Return ms-swift arguments as a run; the environment gives the GPUs."""
    release, why = _by_keys(values)
    settings = Settings(
        values,
        tool="ms-swift",
        version=version or release,
        assumed=version is None,
        why=why if version is None else "",
    )
    inside = {key: value for key, value in settings.values.items() if key[:4].upper() == "ENV."}
    environment = {**(environment or {}), **{key[4:]: str(value) for key, value in inside.items()}}
    settings.used.update({"verb", *inside})
    model = str(settings.raw("model", "model_id_or_path", to="model", default=""))
    kind = str(
        settings.raw("rlhf_type", to="task", default="dpo" if values.get("verb") == "rlhf" else "")
    )
    task = _TASKS.get(kind, Task.SFT)
    what = str(settings.raw("task_type", to="task", default="causal_lm"))
    task = {"embedding": Task.EMBED, "reranker": Task.RERANK}.get(what, task)
    recipe: dict[str, Any] = {"framework": settings.framework("ms-swift"), "task": task}
    if kind and kind not in _TASKS:
        settings.unread("rlhf_type", kind, "planned as SFT")
    method = _method(settings, recipe, model)
    _precision(settings, recipe, model)
    gpus = _gpus(settings, recipe, environment)
    micro = (
        settings.count(
            "per_device_train_batch_size", "batch_size", to="micro_batch_size", default=1
        )
        or 1
    )
    recipe["micro_batch_size"] = micro
    default = 1 if task is Task.GRPO else ceil(16 / micro / (gpus or 1))
    recipe["gradient_accumulation"] = settings.count(
        "gradient_accumulation_steps", to="gradient_accumulation", default=default
    )
    settings.raw("per_device_eval_batch_size")
    _lengths(settings, recipe, task, model)
    _activations(settings, recipe)
    _towers(settings)
    recipe["optimizer"] = words.optimizer(
        settings, settings.raw("optim", "optimizer", to="optimizer", default="adamw_torch_fused")
    )
    engine = _reinforcement(settings, recipe, method, kind) if kind else {}
    gpus = set_degrees(
        settings,
        recipe,
        gpus,
        context=settings.count("sequence_parallel_size", to="parallel.context", off=True),
        context_kind="ulysses",
    )
    pixels = environment.get("MAX_PIXELS")
    image_limit(settings, recipe, model, *(() if pixels else ("max_pixels",)), word=pixels)
    return settings.finish(
        model, recipe=recipe, lora=_lora(settings, method), engine=engine, gpus=gpus
    )


def _by_keys(values: dict[str, Any]) -> tuple[str, str]:
    """Return the newest release that names the tuner as the file does (sft_, train_, tuner_type), and why."""
    for key in ("sft_type", "model_id_or_path"):
        if key in values:
            return "2.6", f"{key} is ms-swift 2's name"
    if "train_type" in values:
        return "3.12", "train_type is ms-swift 3's name, 4 says tuner_type"
    return VERSION, ""


def _method(settings: Settings, recipe: dict[str, Any], model: str) -> Method:
    kind = str(settings.raw("tuner_type", "train_type", "sft_type", to="method", default="lora"))
    quantized = settings.raw("quant_method", to="quantization")
    # releases 1 and 2: the bits alone say that it is quantised, by bitsandbytes
    old = settings.count("quantization_bit", to="quantization", off=True)
    quantized = quantized or ("bnb" if old else None)
    bits = settings.count("quant_bits", to="quantization", off=True) or old or 4
    named = quantization_in_name(model)
    if kind == "full":
        method = Method.FULL
    elif quantized and bits == 8:
        method, recipe["quantization"] = Method.LORA, "int8"
    elif quantized or named:
        method, recipe["quantization"] = Method.QLORA, named or "nf4"
        recipe["double_quant"] = settings.flag("bnb_4bit_use_double_quant", default=True)
    else:
        method = Method.LORA
    if kind not in ("full", "lora"):
        settings.unread("tuner_type", kind, "planned as LoRA")
    settings.raw(
        *("template_type", "gradient_checkpointing_kwargs", "num_iterations"),
        "bnb_4bit_comp_dtype",
        "bnb_4bit_quant_type",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "bnb_4bit_use_double_quant",
    )
    recipe["method"] = method
    return method


def _precision(settings: Settings, recipe: dict[str, Any], model: str) -> None:
    given = settings.raw("torch_dtype", "dtype", to="dtype")
    spec = resolve_model(model) if given is None and model else None
    dtype = words.dtype(given) or (spec.checkpoint_dtype if spec else "bf16")
    if given is None:
        settings.defaulted("dtype", f"{dtype} (the checkpoint's)")
    recipe["dtype"] = dtype if dtype in ("bf16", "fp16", "fp32") else "bf16"
    recipe["mixed_precision"] = "bf16" if recipe["dtype"] == "bf16" else "fp16"


def _gpus(settings: Settings, recipe: dict[str, Any], environment: dict[str, str]) -> int | None:
    processes, visible = as_int(environment.get("NPROC_PER_NODE")), visible_devices(environment)
    nodes = as_int(environment.get("NNODES")) or 1
    if deepspeed := settings.mapping("deepspeed") or settings.raw("deepspeed", to="sharding"):
        apply_launch(settings, recipe, deepspeed_setting(settings, deepspeed, None))
    if str(settings.values.get("fsdp", "")) == "fsdp2":
        settings.raw("fsdp", to="sharding")
        recipe["sharding"] = Sharding.FSDP2
        settings.effect("the fsdp2 preset switches its own activation checkpointing on")
    elif fsdp := fsdp_setting(settings):
        apply_launch(settings, recipe, fsdp)
    gpus = processes or visible
    if processes is None and visible and visible > 1 and not recipe.get("sharding"):
        settings.effect(
            f"{visible} visible GPUs without NPROC_PER_NODE: ms-swift splits the layers over them (model parallel), planned as ZeRO-3 without gathers"
        )
        recipe["sharding"] = Sharding.ZERO3
    elif gpus and gpus > 1 and not recipe.get("sharding"):
        recipe["sharding"] = Sharding.DDP
    return gpus * nodes if gpus else None


def _lengths(settings: Settings, recipe: dict[str, Any], task: Task, model: str) -> None:
    given = settings.count("max_length", "packing_length", to="context")
    if given is None:
        spec = resolve_model(model) if model else None
        settings.defaulted(
            "context",
            f"the model's maximum ({spec.max_position if spec else 'unknown'}): nothing is truncated",
        )
        settings.effect(
            "max_length is not set: ms-swift truncates at the model's maximum only, the longest sample decides (planned at 2048; give --context)"
        )
    if task in (Task.GRPO, Task.PPO):
        keys = ("max_completion_length", "response_length")
        completion = settings.count(*keys, to="completion_length", default=512) or 512
        recipe["completion_length"] = completion
        recipe["prompt_length"] = (
            max(1, (given or completion + 512) - completion)
            if given and given > completion
            else given or 512
        )
        if task is Task.GRPO:
            recipe["num_generations"] = settings.count(
                "num_generations", to="num_generations", default=8
            )
    else:
        recipe["context"] = given or 2048
    recipe["packing"] = settings.flag("packing", to="packing") or settings.flag(
        "padding_free", to="packing"
    )


def _activations(settings: Settings, recipe: dict[str, Any]) -> None:
    on = settings.flag("gradient_checkpointing", to="checkpointing", default=True)
    recipe["compile"] = settings.flag("torch_compile", to="compile")
    recipe["checkpointing"] = Checkpointing.FULL if on else Checkpointing.NONE
    recipe["attention"] = words.attention(settings.raw("attn_impl", to="attention", default="sdpa"))
    liger = settings.flag("use_liger_kernel", to="loss")
    recipe["loss"] = Loss.CHUNKED if liger else Loss.FULL
    if not liger:
        settings.effect(
            "logits are made for supervised tokens only (use_logits_to_keep): with short answers the loss head needs less than planned"
        )
    settings.raw(
        "use_logits_to_keep",
        "freeze_llm",
        "vit_gradient_checkpointing",
    )


def _towers(settings: Settings) -> None:
    """Say what of a multimodal model is trained beside its text."""
    for key in ("freeze_vit", "freeze_aligner"):
        if not settings.flag(key, default=True):
            settings.effect(
                f"{key} false: that part's gradients and activations come on top of the text's"
            )


def _lora(settings: Settings, method: Method) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    settings.raw("lora_alpha")
    return {
        "rank": settings.count("lora_rank", to="lora.rank", default=8),
        "targets": words.lora_targets(
            settings.raw(
                "target_modules", "lora_target_modules", to="lora.targets", default="all-linear"
            )
        ),
        "dropout": settings.number(
            "lora_dropout", "lora_dropout_p", to="lora.dropout", default=0.05
        ),
        "dtype": words.dtype(settings.raw("lora_dtype")),
        "dora": settings.flag("use_dora"),
        "modules_to_save": as_names(settings.raw("modules_to_save", to="lora.modules_to_save")),
    }


def _reinforcement(
    settings: Settings, recipe: dict[str, Any], method: Method, kind: str
) -> dict[str, Any]:
    beta = settings.number("beta", to="beta", default={"grpo": 0.04, "simpo": 2.0}.get(kind, 0.1))
    recipe["beta"] = beta
    if kind in ("dpo", "grpo"):
        recipe["algorithm"] = kind
    if kind == "gkd":
        recipe["teacher"] = str(settings.raw("teacher_model", to="teacher", default="")) or None
        if settings.flag("offload_teacher_model", to="teacher"):
            recipe["teacher_placement"] = "offloaded"
        settings.raw("lmbda", "seq_kd", "gkd_beta")
    if kind == "ppo":
        recipe["reward_model"] = (
            str(settings.raw("reward_model", to="reward_model", default="")) or None
        )
    free = kind in ("simpo", "orpo", "cpo", "rm", "gkd") or not beta
    recipe["reference"] = (
        Reference.NONE
        if free
        else Reference.ADAPTER_OFF
        if method is not Method.FULL
        else Reference.SEPARATE
    )
    if recipe["reference"] is Reference.SEPARATE:
        settings.effect("a second copy of the model is held as the reference")
    if kind in ("ppo", "gkd"):
        return {"kind": EngineKind.TRANSFORMERS} if kind == "ppo" else {}
    if kind != "grpo":
        return {}
    for key in ("offload_model", "offload_optimizer"):
        if settings.raw(key, to="engine") not in (None, "false", False):
            settings.effect(
                f"{key} moves memory between phases: rollout and update do not add up as planned"
            )
    if not settings.flag("use_vllm", to="engine.kind"):
        return {"kind": EngineKind.TRANSFORMERS}
    mode = settings.raw("vllm_mode", to="engine.kind")
    if mode is None:
        mode = "server" if settings.has("vllm_server_host", "vllm_server_base_url") else "colocate"
        settings.effect(
            f"use_vllm without vllm_mode: ms-swift {settings.report.version} has no default for it and stops; "
            f"planned as {mode}"
        )
    settings.raw("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
    server = mode == "server"
    sleep = settings.count("sleep_level", to="engine.sleep_level", off=True) or 0
    util = settings.number(
        "vllm_gpu_memory_utilization", to="engine.gpu_memory_utilization", default=0.9
    )
    if not server and not sleep:
        settings.effect(f"sleep_level 0: the engine keeps {util:g} of the card while training")
    settings.raw("vllm_max_model_len", to="engine")
    parts = settings.count("move_model_batches", to="engine.sync", off=True)
    return {
        **({"sync": parts} if parts else {}),
        "kind": EngineKind.VLLM_SERVER if server else EngineKind.VLLM_PUSH,
        "gpu_memory_utilization": util,
        "sleep_level": sleep,
        "tensor_parallel": settings.count(
            "vllm_tensor_parallel_size", to="engine.tensor_parallel", default=1
        ),
    }
