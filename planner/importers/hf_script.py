"""Plain Hugging Face Trainer: scripts by AST, and any script's command line whose flags are TrainingArguments'.

run_clm and its relatives (block_size), FastChat and alpaca (model_max_length), QLoRA (source_max_len).
"""

from pathlib import Path
from typing import Any

from planner.importers import words
from planner.importers.fsdp_config import fsdp_setting
from planner.importers.image_limits import image_limit
from planner.importers.launch import apply_launch, finish_sharding, launched
from planner.importers.names import quantization_in_name, resolve_model
from planner.importers.python_calls import UNKNOWN, Calls
from planner.importers.settings import Imported, Settings, as_names
from planner.importers.spread import Launch
from planner.importers.trl_script import arguments_of, checkpoints, constants
from planner.importers.versions import stated
from planner.run.recipe import Loss, Method, Sharding, Task

VERSION = "5.19"
TOOL = "hf-trainer"
LENGTHS = (
    "block_size",
    "model_max_length",
    "max_length",
    "max_seq_length",
    "max_seq_len",
    "max_source_length",
    "cutoff_len",
)
KEYS = frozenset(
    [
        "block_size",
        "model_max_length",
        "train_file",
        "data_path",
        "source_max_len",
        "config_name",
        "tokenizer_name",
        "do_train",
        "lazy_preprocess",
        "base_model",
        "evaluation_strategy",
        "bits",
        "use_lora",
        "lora_rank",
        "lora_enable",
        "q_lora",
        "full_finetune",
    ]
)
"""Flags of Hugging Face's own example scripts and their relatives, and not of TRL's."""
_GONE = {
    "evaluation_strategy": "4.57",
    "use_auth_token": "4.57",
    "per_gpu_train_batch_size": "4.57",
    "no_cuda": "4.57",
    "torch_dtype": "4.57",
}
"""Names that transformers 5 no longer has or renamed: a script that uses them runs on 4."""
_MODELS = (
    *("model_name_or_path", "base_model", "model_name", "model", "model_id", "model_path"),
    *("base_model_name_or_path", "pretrained_model_name_or_path"),
)
"""What people's own scripts call the model."""
_LOADERS = ("AutoModelForCausalLM.from_pretrained", "from_pretrained")


QLORA = {
    "bits": 4,
    "double_quant": True,
    "lora_r": 64,
    "lora_target_modules": "all-linear",
    "source_max_len": 1024,
    "target_max_len": 256,
    "gradient_checkpointing": True,
    "optim": "paged_adamw_32bit",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
}
"""What qlora.py sets where its command line does not (artidoro/qlora qlora.py, TrainingArguments)."""


_TRAINS = {
    *(
        "output_dir",
        "learning_rate",
        "num_train_epochs",
        "gradient_accumulation_steps",
        "bf16",
        "fp16",
    ),
    *("save_strategy", "save_steps", "warmup_ratio", "lr_scheduler_type", "logging_steps"),
}


def is_hugging_face(values: dict[str, Any]) -> bool:
    """Return whether flags are a Trainer's: a model's name beside TrainingArguments'."""
    named = "model_name_or_path" in values or "base_model" in values
    trains = {"per_device_train_batch_size", "output_dir"} & set(values)
    own = bool(set(_MODELS) & set(values)) and {
        "per_device_train_batch_size",
        "learning_rate",
    } <= set(values)
    # the model is in the program: only a Trainer has so many of these
    many = "per_device_train_batch_size" in values and len(_TRAINS & set(values)) >= 2
    return (named and bool(trains)) or own or many


def read(
    values: dict[str, Any],
    *,
    version: str | None = None,
    launch: Launch | None = None,
    base: Path | None = None,
    script: str = "",
) -> Imported:
    """Return a Trainer's settings as a run."""
    old = next((key for key in _GONE if values.get(key) is not None), None)
    why = f"{old} is a name of transformers 4" if old and version is None else ""
    qlora = {"source_max_len", "bits", "double_quant"} & set(values) or script == "qlora.py"
    if qlora and not values.get("full_finetune"):
        values = {**QLORA, **values}
    settings = Settings(
        values,
        tool=TOOL,
        version=version or (_GONE[old] if old else VERSION),
        assumed=version is None,
        why=why,
    )
    recipe: dict[str, Any] = {"framework": settings.framework(TOOL), "task": Task.SFT}
    model = str(settings.raw(*_MODELS, to="model", default=""))
    method = _method(settings, recipe, model)
    _precision(settings, recipe, model)
    words.hf_batch(settings, recipe, default=8)
    if whole := settings.count("batch_size", to="gradient_accumulation"):  # alpaca-lora's own flags
        micro = settings.count("micro_batch_size", to="micro_batch_size", default=4) or 4
        recipe["micro_batch_size"] = micro
        recipe["gradient_accumulation"] = max(1, whole // micro)
    _length(settings, recipe, script)
    on = settings.flag("gradient_checkpointing", to="checkpointing")
    settings.raw("gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs.use_reentrant")
    recipe["checkpointing"] = words.checkpointing(on)
    recipe["compile"] = settings.flag("torch_compile", to="compile")
    chosen = settings.raw(
        "attn_implementation",
        "flash_attn",
        "use_flash_attn",
        "use_flash_attention_2",
        to="attention",
    )
    recipe["attention"] = "flash" if chosen is True else words.attention(chosen) or "sdpa"
    liger = settings.flag("use_liger_kernel", "use_liger", to="loss")
    recipe["loss"] = Loss.CHUNKED if liger else Loss.FULL
    if liger and recipe["framework"] == TOOL:
        recipe["framework"] = "liger"  # its norms and SwiGLU keep less, too
    image_limit(settings, recipe, model, "max_pixels", "image_max_pixels")
    gpus = _sharding(settings, recipe, method, launch, base)
    return settings.finish(model, recipe=recipe, lora=_lora(settings, method), engine={}, gpus=gpus)


def _method(settings: Settings, recipe: dict[str, Any], model: str) -> Method:
    switches = ("use_peft", "use_lora", "lora", "lora_enable", "peft")
    rank = settings.has("lora_r", "lora_rank", "r", "lora_target_modules")
    full = settings.flag("full_finetune")
    peft = (settings.flag(*switches, to="method") or rank) and not full
    bits = settings.count("bits", "quantization_bit", "load_in_nbits", to="quantization", off=True)
    four = settings.flag("load_in_4bit", "q_lora", "use_4bit", "qlora") or bits == 4
    eight = settings.flag("load_in_8bit", "use_8bit") or bits == 8
    named = quantization_in_name(model)
    method = Method.FULL if not peft else Method.QLORA if four or named else Method.LORA
    if method is Method.QLORA:
        recipe["quantization"] = named or "nf4"
        nested = settings.flag(
            "double_quant", "bnb_4bit_use_double_quant", "use_nested_quant", to="double_quant"
        )
        recipe["double_quant"] = nested
    elif eight and peft:
        recipe["quantization"] = "int8"
    settings.raw("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "quant_type", "max_memory_MB")
    recipe["method"] = method
    return method


def _precision(settings: Settings, recipe: dict[str, Any], model: str) -> None:
    given = settings.raw("dtype", "torch_dtype", "model_dtype", to="dtype")
    old = settings.report.version.startswith("4")
    if given in (None, "auto"):
        spec = resolve_model(model) if model else None
        auto = spec.checkpoint_dtype if spec else "bf16"
        loaded = (
            auto if given == "auto" or not old else "fp16" if recipe.get("quantization") else "fp32"
        )
        recipe["dtype"] = loaded if loaded in ("bf16", "fp16", "fp32") else "bf16"
        settings.defaulted(
            "dtype", f"{recipe['dtype']} (transformers {'4' if old else '5: the checkpoint'})"
        )
    else:
        recipe["dtype"] = words.dtype(given) or "bf16"
    bf16, fp16 = settings.flag("bf16", to="mixed_precision"), settings.flag("fp16")
    recipe["mixed_precision"] = "bf16" if bf16 else "fp16" if fp16 else "none"


def _length(settings: Settings, recipe: dict[str, Any], script: str) -> None:
    source = settings.count("source_max_len", to="context")
    if source:
        target = settings.count("target_max_len", to="context", default=256) or 256
        recipe["context"] = source + target
    elif "clm" in script or "mlm" in script:
        # run_clm.py: min(1024, the tokenizer's) where block_size is not given
        recipe["context"] = settings.count("block_size", to="context", default=1024)
    else:
        recipe["context"] = settings.count(*LENGTHS, to="context")
        if recipe["context"] is None:
            settings.effect("no length in the file: planned at 1,024 tokens (give --context)")
            settings.defaulted("context", "1024 (assumed)")
            recipe["context"] = 1024
    recipe["packing"] = "clm" in script or settings.flag("packing", to="packing")


def _sharding(
    settings: Settings,
    recipe: dict[str, Any],
    method: Method,
    launch: Launch | None,
    base: Path | None,
) -> int | None:
    gpus = launched(settings, recipe, launch, base)
    if fsdp := fsdp_setting(settings, base=base):
        apply_launch(settings, recipe, fsdp)
    sharded = recipe.get("sharding") in (Sharding.FSDP, Sharding.FSDP2)
    if sharded and method is Method.FULL and recipe["mixed_precision"] != "none":
        settings.effect("FSDP with mixed precision keeps trainable parameters in fp32")
    return finish_sharding(settings, recipe, gpus)


def _lora(settings: Settings, method: Method) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    named = settings.raw("lora_target_modules", "target_modules", to="lora.targets")
    settings.raw("lora_alpha", "lora_bias", "lora_weight_path", "task_type", "bias")
    if named is None:
        settings.defaulted("lora.targets", "q_proj, v_proj (PEFT's table)")
    return {
        "rank": settings.count("lora_r", "lora_rank", "r", to="lora.rank", default=8),
        "targets": words.lora_targets(named) if named is not None else ("q_proj", "v_proj"),
        "dropout": settings.number("lora_dropout", to="lora.dropout", default=0.0),
        "modules_to_save": as_names(settings.raw("modules_to_save", "lora_modules_to_save")),
    }


def from_calls(calls: Calls, *, version: str | None = None) -> Imported:
    """Return a script that builds transformers' own Trainer as a run."""
    loader = next((found for name in _LOADERS if (found := calls.first(name))), None) or {}
    values = constants(loader)
    model = loader.get("*0") or values.pop("pretrained_model_name_or_path", None)
    for name in ("BitsAndBytesConfig", "LoraConfig"):
        if found := calls.last(name):
            values.update(constants(found))
            values["use_peft"] = values.get("use_peft") or name == "LoraConfig"
    arguments = arguments_of(calls, Task.SFT)
    values.update(constants(arguments))
    for name in ("tokenizer", "tokenize", "AutoTokenizer.from_pretrained"):
        call = constants(calls.last(name))
        for key in ("max_length", "model_max_length"):
            if isinstance(call.get(key), int):
                values.setdefault(key, call[key])
    if checkpoints(calls):
        values["gradient_checkpointing"] = True
    named = {name.lower(): value for name, value in calls.names.items() if isinstance(value, int)}
    for key in LENGTHS:
        if key in named and not isinstance(named[key], bool):
            values.setdefault(key, named[key])
    for key in ("quantization_config", "device_map", "use_cache", "low_cpu_mem_usage", "args"):
        values.pop(key, None)
    values["model"] = model if isinstance(model, str) else ""
    result = read(values, version=version or stated(calls.comments, "transformers"))
    for key, value in arguments.items():
        if value is UNKNOWN:
            Settings.note_unknown(result.report, key)
    return result
