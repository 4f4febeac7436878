"""Unsloth scripts and notebooks (2026.10.9: models/loader.py, rl.py): keyword arguments by AST."""

from typing import Any

from planner.importers import words
from planner.importers.names import quantization_in_name
from planner.importers.python_calls import UNKNOWN, Calls
from planner.importers.settings import Imported, Settings, as_names
from planner.importers.trl_script import (
    arguments_of,
    constants,
    task_of,
    trainer_settings,
)
from planner.run.recipe import EngineKind, Loss, Method, Reference, Task

VERSION = "2026.10.9"
LOADERS = (
    "FastLanguageModel.from_pretrained",
    "FastModel.from_pretrained",
    "FastVisionModel.from_pretrained",
    "FastSentenceTransformer.from_pretrained",
)
ADAPTERS = (
    "FastLanguageModel.get_peft_model",
    "FastModel.get_peft_model",
    "FastVisionModel.get_peft_model",
    "get_peft_model",
)


def read(calls: Calls, *, version: str | None = None) -> Imported:
    """Return an Unsloth script as a run."""
    task = task_of(calls)
    settings, loader, adapted = _collect(calls, task, version)
    recipe: dict[str, Any] = {"framework": settings.framework("unsloth"), "task": task}
    model = settings.raw("load.model_name", to="model") or loader.get("*0")
    model = model if isinstance(model, str) else ""
    method = _method(settings, recipe, model, adapted)
    given = words.dtype(settings.raw("load.dtype", to="dtype"))
    recipe["dtype"] = given or "bf16"
    if given is None:
        settings.defaulted("dtype", "bf16 (fp16 on a T4)")
    recipe["mixed_precision"] = "bf16" if recipe["dtype"] != "fp16" else "fp16"
    settings.raw("args.bf16", "args.fp16")
    length = settings.count("load.max_seq_length", to="context", default=2048) or 2048
    generations = _batch(settings, recipe, task, length)
    checkpointing = settings.raw(
        "peft.use_gradient_checkpointing",
        "load.use_gradient_checkpointing",
        "args.gradient_checkpointing",
        to="checkpointing",
        default="unsloth",
    )
    recipe["checkpointing"] = words.checkpointing(
        str(checkpointing) == "True", offload=str(checkpointing) == "unsloth"
    )
    recipe["loss"], recipe["attention"] = Loss.CHUNKED, "flash"
    recipe["optimizer"] = words.optimizer(
        settings, settings.raw("args.optim", to="optimizer", default="adamw_8bit")
    )
    engine = _engine(settings, recipe, generations) if task is Task.GRPO else {}
    _drop(settings)
    return settings.finish(
        model, recipe=recipe, lora=_lora(settings, method), engine=engine, gpus=1
    )


def _collect(
    calls: Calls, task: Task, version: str | None
) -> tuple[Settings, dict[str, Any], bool]:
    """Return the constant keywords of the loader, adapter and trainer calls, and the loader's."""
    loader, adapter = calls.first(*LOADERS) or {}, calls.first(*ADAPTERS)
    arguments = arguments_of(calls, task)
    values = {f"load.{key}": value for key, value in constants(loader).items()}
    values |= {
        f"peft.{key}": value for key, value in constants(adapter).items() if key not in ("model",)
    }
    trainer, _ = trainer_settings(calls, task)
    values |= {f"args.{key}": value for key, value in trainer.items()}
    values |= {f"args.{key}": value for key, value in constants(arguments).items()}
    settings = Settings(values, tool="unsloth", version=version or VERSION, assumed=version is None)
    for key in (
        key
        for source in (loader, adapter or {}, arguments)
        for key, value in source.items()
        if value is UNKNOWN and key not in ("*0", "model", "tokenizer")
    ):
        settings.unread(
            key, "", "the value is computed when the program runs; the default was used"
        )
    return settings, loader, adapter is not None


def _method(settings: Settings, recipe: dict[str, Any], model: str, adapted: bool) -> Method:
    full = settings.flag("load.full_finetuning", to="method")
    eight, sixteen = (
        settings.flag("load.load_in_8bit", to="quantization"),
        settings.flag("load.load_in_16bit", to="quantization"),
    )
    four = settings.flag(
        "load.load_in_4bit", to="quantization", default=not (full or eight or sixteen)
    )
    named = quantization_in_name(model)
    if full or not adapted:
        method = Method.FULL
    elif four or named:
        method, recipe["quantization"], recipe["double_quant"] = Method.QLORA, named or "nf4", True
        if "gpt-oss" in model.lower():
            # Unsloth's copy holds every expert as a 4-bit linear, transformers' fused experts stay 16 bit
            recipe["quantization"] = "mxfp4"
            settings.effect("gpt-oss: experts as 4-bit linears, counted at MXFP4's 4.25 bits")
        elif not settings.flag("load.use_exact_model_name"):
            settings.effect(
                "a plain name is swapped for Unsloth's -bnb-4bit copy; the dynamic copies keep some layers in 16 bit and are larger"
            )
    else:
        method = Method.LORA
        if eight:
            recipe["quantization"] = "int8"
    recipe["method"] = method
    return method


def _batch(settings: Settings, recipe: dict[str, Any], task: Task, length: int) -> int:
    micro = (
        settings.count("args.per_device_train_batch_size", to="micro_batch_size", default=4) or 4
    )
    recipe["gradient_accumulation"] = settings.count(
        "args.gradient_accumulation_steps", to="gradient_accumulation", default=2
    )
    recipe["micro_batch_size"] = micro
    if task is not Task.GRPO:
        recipe["context"] = (
            settings.count("args.max_length", "args.max_seq_length", to="context") or length
        )
        recipe["packing"] = settings.flag("args.packing", to="packing")
        if task in (Task.DPO, Task.KTO):
            recipe["beta"] = settings.number("args.beta", to="beta", default=0.1)
            recipe["reference"] = words.reference(recipe["method"], needed=True)
        return 1
    generations = settings.count("args.num_generations", to="num_generations", default=8) or 8
    recipe["num_generations"] = generations
    if micro % generations:
        settings.effect(
            f"per_device_train_batch_size {micro} does not divide by num_generations {generations}: Unsloth raises it to {generations}"
        )
        recipe["micro_batch_size"] = generations
    completion = settings.count("args.max_completion_length", to="completion_length")
    prompt = settings.count("args.max_prompt_length", to="prompt_length")
    if completion is None and prompt is None:
        settings.defaulted("completion_length", f"half of max_seq_length {length}")
        completion = prompt = length // 2
    recipe["completion_length"] = (
        completion if completion is not None else max(1, length - (prompt or 1))
    )
    recipe["prompt_length"] = prompt if prompt is not None else max(1, length - (completion or 0))
    return generations


def _engine(settings: Settings, recipe: dict[str, Any], generations: int) -> dict[str, Any]:
    loss_type = str(settings.raw("args.loss_type", to="algorithm", default="bnpo"))
    recipe["algorithm"] = loss_type
    beta = settings.number(
        "args.beta", to="beta", default=0.0 if loss_type in ("dapo", "dr_grpo") else 0.001
    )
    recipe["beta"] = beta
    recipe["reference"] = Reference.ADAPTER_OFF if beta else Reference.NONE
    if not settings.flag("load.fast_inference", to="engine.kind"):
        return {"kind": EngineKind.TRANSFORMERS}
    return {
        "kind": EngineKind.VLLM_SHARED,
        "gpu_memory_utilization": settings.number(
            "load.gpu_memory_utilization", to="engine.gpu_memory_utilization", default=0.5
        ),
    }


def _lora(settings: Settings, method: Method) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    targets = settings.raw("peft.target_modules", to="lora.targets")
    if targets is None:
        settings.defaulted("lora.targets", ", ".join(words.SEVEN))
    trained = tuple(name for name in as_names(targets) if name in ("embed_tokens", "lm_head"))
    if trained:
        settings.effect(f"{' and '.join(trained)} in target_modules are trained whole")
    names = words.lora_targets(targets) if targets is not None else words.SEVEN
    if isinstance(names, tuple):
        names = tuple(name for name in names if name not in trained)
    return {
        "rank": settings.count("peft.r", to="lora.rank", default=16),
        "targets": names,
        "dropout": settings.number("peft.lora_dropout", to="lora.dropout", default=0.0),
        "modules_to_save": (*as_names(settings.raw("peft.modules_to_save")), *trained),
    }


def _drop(settings: Settings) -> None:
    for key in settings.values:
        if key.startswith(
            (
                "peft.lora_alpha",
                "peft.bias",
                "peft.random_state",
                "peft.use_rslora",
                "peft.loftq_config",
                "peft.finetune_",
                "load.token",
                "load.max_lora_rank",
                "load.float8",
                "args.vllm_sampling_params",
            )
        ):
            settings.used.add(key)
