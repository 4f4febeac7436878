"""TRL: TrlParser YAML (also alignment-handbook and open-r1), `trl sft|grpo|dpo` lines, scripts by AST.

A version's defaults are those of its law in data/frameworks.
"""

import re
from pathlib import Path
from typing import Any

from planner.importers import words
from planner.importers.fsdp_config import fsdp_setting
from planner.importers.launch import apply_launch, finish_sharding, launched
from planner.importers.names import quantization_in_name, resolve_model
from planner.importers.settings import Imported, Settings, Taken, as_names
from planner.importers.spread import Launch
from planner.importers.trl_versions import infer
from planner.run.recipe import INITS, EngineKind, Loss, Method, Reference, Sharding, Task

VERSION = "1.16.0"
OPEN_R1_VERSION = "0.18.0"
HANDBOOK_VERSION = "0.19.1"
ASSUMED = {"open-r1": OPEN_R1_VERSION, "alignment-handbook": HANDBOOK_VERSION}
"""Releases that those recipes are written for."""
_OPTIM = {"adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused"}
_INNER = "model_init_kwargs."
"""What from_pretrained is given beside, and before, the keys of the file itself."""
_SFT_LOSSES = ("nll", "chunked_nll", "dft")
RENAMED = ("torch_dtype", "max_seq_length", "max_prompt_length")
"""Keys of older releases; from 1.0 on the scripts ignore them silently."""


def version_tuple(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version; what cannot be read counts as new."""
    match = re.match(r"\D*(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (1, 16)


def read(
    values: dict[str, Any],
    *,
    task: Task | None = None,
    version: str | None = None,
    assumed: str = VERSION,
    tool: str = "trl",
    launch: Launch | None = None,
    is_script: bool = False,
    trainer_keys: tuple[str, ...] = (),
    loaded: bool = False,
    base: Path | None = None,
) -> Imported:
    """Return TRL settings as a run.

    `assumed` is the version to read defaults of when `version` is not given. `is_script`:
    the settings come from Python keyword arguments, where a model object keeps its dtype and
    unknown names would raise instead of being ignored. `trainer_keys`: the names that the
    trainer's own call uses. `loaded`: the script loads the model by from_pretrained itself.
    `base`: the file's path, for the DeepSpeed file it names.
    """
    found = infer(task or _task_of(values), values, trainer_keys) if version is None else None
    why = ""
    if found is not None and version_tuple(found.version) < version_tuple(assumed):
        assumed, why = found
    inner = {key: value for key, value in values.items() if key.startswith(_INNER)}
    values = {**values, **{key.removeprefix(_INNER): value for key, value in inner.items()}}
    settings = Settings(
        values, tool=tool, version=version or assumed, assumed=version is None, why=why
    )
    settings.used.update(inner)
    at = version_tuple(settings.report.version)
    task = task or _task_of(values)
    recipe: dict[str, Any] = {"framework": settings.framework("trl"), "task": task}
    usual = settings.law("trl").task_defaults(task.value)
    model = str(settings.raw("model_name_or_path", "model_name", "model", to="model", default=""))
    method = _method(settings, recipe, model)
    _precision(settings, recipe, at, is_script, usual)
    if loaded:
        _loaded_dtype(settings, recipe, at, model)
    words.hf_batch(settings, recipe, default=8, optim=_OPTIM[usual["optimizer"]])
    _lengths(settings, recipe, task, at, is_script, usual)
    _compute(settings, recipe, at, usual)
    engine = _engine(settings, recipe, method, at, usual) if task is Task.GRPO else {}
    if task in (Task.DPO, Task.KTO):
        recipe["beta"] = settings.number("beta", to="beta", default=0.1)
        precomputed = settings.flag("precompute_ref_log_probs")
        recipe["reference"] = words.reference(method, needed=True)
        if precomputed and method is Method.FULL:
            recipe["reference"] = Reference.PRECOMPUTED
    if task is Task.PPO:
        _ppo(settings, recipe, method)
    gpus = _sharding(settings, recipe, method, launch, base)
    return settings.finish(
        model, recipe=recipe, lora=_lora(settings, method, is_script), engine=engine, gpus=gpus
    )


def _compute(
    settings: Settings, recipe: dict[str, Any], at: tuple[int, int], usual: dict[str, Any]
) -> None:
    on = settings.flag(
        "gradient_checkpointing",
        "activation_checkpointing",
        to="checkpointing",
        default=usual["checkpointing"] == "full",
    )
    settings.raw("gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs.use_reentrant")
    offload = settings.flag("activation_offloading")
    recipe["compile"] = settings.flag("torch_compile", to="compile")
    recipe["checkpointing"] = words.checkpointing(on, offload=offload)
    flash = settings.flag("use_flash_attention_2")  # before attn_implementation
    recipe["attention"] = words.attention(
        settings.raw("attn_implementation", to="attention", default="flash" if flash else "sdpa")
    )
    liger = settings.flag("use_liger_kernel", "use_liger", "use_liger_loss", to="loss")
    kind = settings.raw("loss_type", to="loss") if recipe["task"] is Task.SFT else None
    # from 1.15 on every SFT loss goes through the fused head
    default = usual["loss"] == "chunked" and (kind is None or at >= (1, 15))
    recipe["loss"] = Loss.CHUNKED if liger or default or kind == "chunked_nll" else Loss.FULL
    if not liger and kind is None:
        settings.defaulted("loss", recipe["loss"].value)


def _ppo(settings: Settings, recipe: dict[str, Any], method: Method) -> None:
    """Read PPOConfig: a value model like the reward model is trained beside the policy."""
    recipe["completion_length"] = settings.count(
        "response_length", to="completion_length", default=53
    )
    recipe["prompt_length"], recipe["context"] = recipe.get("context"), None
    recipe["beta"] = settings.number("kl_coef", to="beta", default=0.05)
    recipe["reference"] = words.reference(method, needed=True)
    judge = settings.raw("reward_model_path", to="reward_model")
    if isinstance(judge, str) and judge:
        recipe["reward_model"] = recipe["value_model"] = judge
    settings.raw("sft_model_path", "num_ppo_epochs", "num_mini_batches", "total_episodes")


def _sharding(
    settings: Settings,
    recipe: dict[str, Any],
    method: Method,
    launch: Launch | None,
    base: Path | None,
) -> int | None:
    gpus = launched(settings, recipe, launch, base)
    if fsdp := fsdp_setting(settings):
        apply_launch(settings, recipe, fsdp)
    if recipe.get("sharding") in (Sharding.FSDP, Sharding.FSDP2) and method is Method.FULL:
        settings.effect(
            "FSDP with mixed precision keeps trainable parameters in fp32: 16 B/parameter divided by the GPUs"
        )
    return finish_sharding(settings, recipe, gpus)


def _task_of(values: dict[str, Any]) -> Task:
    def has(*keys: str) -> bool:
        return any(values.get(key) is not None for key in keys)

    if has("response_length", "reward_model_path", "num_ppo_epochs"):
        return Task.PPO
    if has("num_generations", "max_completion_length", "use_vllm", "reward_funcs"):
        return Task.GRPO
    likelihood = values.get("loss_type") in _SFT_LOSSES
    if has("beta", "precompute_ref_log_probs", "loss_type") and not likelihood:
        return Task.DPO
    return Task.SFT


def _method(settings: Settings, recipe: dict[str, Any], model: str) -> Method:
    peft = settings.flag("use_peft", to="method")
    four, eight = settings.flag("load_in_4bit"), settings.flag("load_in_8bit")
    named = quantization_in_name(model)
    method = (
        Method.FULL if not peft else Method.QLORA if four or (named and not eight) else Method.LORA
    )
    if method is Method.QLORA:
        kind = str(settings.raw("bnb_4bit_quant_type", to="quantization", default="nf4")).lower()
        recipe["quantization"] = named or (kind if kind in ("nf4", "fp4") else "nf4")
        recipe["double_quant"] = settings.flag(
            "use_bnb_nested_quant", "bnb_4bit_use_double_quant", to="double_quant"
        )
    elif eight:
        recipe["quantization"] = "int8"
    settings.raw("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    recipe["method"] = method
    return method


def _precision(
    settings: Settings,
    recipe: dict[str, Any],
    at: tuple[int, int],
    is_script: bool,
    usual: dict[str, Any],
) -> None:
    new = at >= (1, 0)
    given = (
        settings.raw("dtype", to="dtype")
        if new or is_script
        else settings.raw("dtype", "torch_dtype", to="dtype")
    )
    if given is None and settings.has("torch_dtype") and new and not is_script:
        value = settings.raw("torch_dtype")
        settings.unread(
            "torch_dtype",
            value,
            f"TRL {settings.report.version} does not know this key and ignores it: weights load in fp32",
        )
    elif given is None:
        given = settings.raw("torch_dtype", to="dtype")
    default = str(usual["dtype"])
    recipe["dtype"] = words.dtype(given) or ("bf16" if given == "auto" else default)
    if given is None:
        settings.defaulted("dtype", default)
    fp16 = settings.flag("fp16")
    bf16 = settings.flag(
        "bf16", to="mixed_precision", default=not fp16 and usual["mixed_precision"] == "bf16"
    )
    recipe["mixed_precision"] = "bf16" if bf16 else "fp16" if fp16 else "none"
    if recipe["dtype"] == "fp32" and recipe["mixed_precision"] != "none":
        settings.effect(
            "weights stay in fp32 under autocast: 4 B/parameter for a frozen base, 16 in full fine-tuning; dtype: bfloat16 halves both"
        )


def _loaded_dtype(
    settings: Settings, recipe: dict[str, Any], at: tuple[int, int], model: str
) -> None:
    """Settle the dtype of a model that the script loads itself without saying one.

    transformers 5 takes the checkpoint's, 4 took fp32, and fp16 beside bitsandbytes' 4 or 8 bit
    (quantizers/quantizer_bnb_4bit.py update_torch_dtype). TRL before 0.24 runs on transformers 4.
    """
    if settings.has("dtype", "torch_dtype"):
        return
    if at >= (1, 0):
        spec = resolve_model(model) if model else None
        dtype, why = (
            (spec.checkpoint_dtype if spec else "bf16"),
            "the checkpoint's (transformers 5)",
        )
    elif recipe.get("quantization"):
        dtype, why = "fp16", "what bitsandbytes leaves in 16 bit (transformers 4)"
    else:
        return
    recipe["dtype"] = dtype
    settings.report.defaulted = [row for row in settings.report.defaulted if row.field != "dtype"]
    settings.defaulted("dtype", f"{dtype}: {why}")
    settings.report.effects = [
        sentence for sentence in settings.report.effects if not sentence.startswith("weights stay")
    ]


def _lengths(
    settings: Settings,
    recipe: dict[str, Any],
    task: Task,
    at: tuple[int, int],
    is_script: bool,
    usual: dict[str, Any],
) -> None:
    if task is Task.GRPO:
        recipe["completion_length"] = settings.count(
            "max_completion_length", to="completion_length", default=usual["completion_length"]
        )
        if at >= (0, 28):
            if settings.has("max_prompt_length") and not is_script:
                settings.unread(
                    "max_prompt_length",
                    settings.raw("max_prompt_length"),
                    "gone from TRL 0.28 on: prompts are not truncated",
                )
            else:
                recipe["prompt_length"] = settings.count("max_prompt_length", to="prompt_length")
            settings.effect(
                "prompts are not truncated: the longest prompt of the data set decides (planned with 512 unless given)"
            )
        else:
            recipe["prompt_length"] = settings.count(
                "max_prompt_length", to="prompt_length", default=usual["prompt_length"]
            )
        recipe["num_generations"] = settings.count(
            "num_generations", to="num_generations", default=usual["num_generations"]
        )
        return
    keys = ["max_length"]
    if at < (0, 20) or is_script:
        keys.append("max_seq_length")
    elif settings.has("max_seq_length"):
        settings.unread(
            "max_seq_length",
            settings.raw("max_seq_length"),
            f"TRL {settings.report.version} does not know this key and ignores it: max_length is 1024",
        )
    recipe["context"] = settings.count(*keys, to="context", default=usual.get("context", 1024))
    settings.raw("max_prompt_length")
    recipe["packing"] = settings.flag("packing", to="packing") or settings.flag("padding_free")


def _engine(
    settings: Settings,
    recipe: dict[str, Any],
    method: Method,
    at: tuple[int, int],
    usual: dict[str, Any],
) -> dict[str, Any]:
    beta = settings.number("beta", to="beta", default=usual["beta"])
    recipe["beta"] = beta
    recipe["algorithm"] = settings.raw(
        "loss_type", to="algorithm", default="dapo" if at >= (0, 22) else "bnpo"
    )
    if not beta:
        recipe["reference"] = Reference.NONE
    else:
        recipe["reference"] = (
            Reference.ADAPTER_OFF if method is not Method.FULL else Reference.SEPARATE
        )
    steps = settings.count("steps_per_generation", to="engine.max_num_seqs")
    if not settings.flag("use_vllm", to="engine.kind"):
        settings.effect("generation uses model.generate with a dense KV cache")
        return {"kind": EngineKind.TRANSFORMERS}
    device = settings.raw("vllm_device", to="engine.kind")
    usual_mode = "colocate" if at >= (1, 0) or device == "cuda:0" else "server"
    mode = str(settings.raw("vllm_mode", to="engine.kind", default=usual_mode))
    if device is not None and device != "cuda:0":
        settings.effect(f"vllm_device {device}: the engine is on another GPU than the training")
    rows = (recipe["micro_batch_size"] or 1) * (steps or recipe["gradient_accumulation"] or 1)
    if mode == "server":
        settings.raw(
            "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_len"
        )
        return {"kind": EngineKind.VLLM_SERVER}
    settings.effect("the engine holds a second copy of the weights")
    tensor_parallel = (
        settings.count("vllm_tensor_parallel_size", to="engine.tensor_parallel", default=1) or 1
    )
    return {
        "kind": EngineKind.VLLM_PUSH,
        "gpu_memory_utilization": settings.number(
            "vllm_gpu_memory_utilization",
            to="engine.gpu_memory_utilization",
            default=usual["gpu_memory_utilization"],
        ),
        "max_num_seqs": rows * tensor_parallel,
        "sleep_level": 2 if settings.flag("vllm_enable_sleep_mode") else 0,
        "tensor_parallel": tensor_parallel,
    }


def _lora(settings: Settings, method: Method, is_script: bool) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    named = settings.raw("lora_target_modules", "target_modules", to="lora.targets")
    if named is None:
        settings.defaulted("lora.targets", "q_proj, v_proj (PEFT's table)")
    settings.raw("lora_alpha", "lora_task_type", "task_type")
    bias, start = settings.raw("bias", to="lora.bias"), settings.raw("init_lora_weights")
    if start not in (None, True, "default"):
        start = str(start)
        if re.fullmatch(INITS, start):
            settings.report.taken.append(
                Taken(key="init_lora_weights", value=start, field="lora.init")
            )
        else:
            settings.unread("init_lora_weights", start, "adapters begin as usual")
            start = None
    return {
        "rank": settings.count("lora_r", "r", to="lora.rank", default=8 if is_script else 16),
        "targets": words.lora_targets(named) if named is not None else ("q_proj", "v_proj"),
        "dropout": settings.number(
            "lora_dropout", to="lora.dropout", default=0.0 if is_script else 0.05
        ),
        "dora": settings.flag("use_dora"),
        "use_rslora": settings.flag("use_rslora", to="lora.use_rslora"),
        "bias": bias if bias in ("none", "all", "lora_only") else None,
        "init": start if isinstance(start, str) else None,
        "target_parameters": as_names(
            settings.raw("lora_target_parameters", "target_parameters", to="lora.target_parameters")
        ),
        "modules_to_save": as_names(
            settings.raw("lora_modules_to_save", "modules_to_save", to="lora.modules_to_save")
        ),
    }
