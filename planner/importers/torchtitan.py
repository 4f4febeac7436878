"""torchtitan's TOML job configs (train_configs/*.toml, 0.0.2 of 2024-12 to 0.2)."""

import re
import tomllib
from typing import Any

from planner.errors import UsageError
from planner.importers import words
from planner.importers.launch import set_degrees
from planner.importers.settings import Imported, Settings
from planner.run.recipe import Checkpointing, Float8, Method, Sharding, Task

VERSION = "0.1.0"
SECTIONS = frozenset({"model", "training"})
MODELS = {
    ("llama3", "8B"): "meta-llama/Llama-3.1-8B",
    ("llama3", "70B"): "meta-llama/Llama-3.1-70B",
    ("llama3", "405B"): "meta-llama/Llama-3.1-405B",
    ("qwen3", "0.6B"): "Qwen/Qwen3-0.6B",
    ("qwen3", "1.7B"): "Qwen/Qwen3-1.7B",
    ("qwen3", "4B"): "Qwen/Qwen3-4B",
    ("qwen3", "8B"): "Qwen/Qwen3-8B",
    ("qwen3", "14B"): "Qwen/Qwen3-14B",
    ("qwen3", "32B"): "Qwen/Qwen3-32B",
}
"""torchtitan's flavours; llama3's were 3 and 3.1 of the same shapes."""
FP8 = "float8"
WITHOUT_BYTES = frozenset(
    {"job", "profiling", "metrics", "checkpoint", "lr_scheduler", "comm", "fault_tolerance"}
)
"""Sections that move no byte of a plan."""


def load(text: str) -> dict[str, Any] | None:
    """Return the document if the text is TOML with torchtitan's sections, else None."""
    if not re.search(r"^\s*\[(?:model|training|job)\]", text, re.MULTILINE):
        return None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"toml: {str(error)[:160]}") from None
    return document if set(document) >= SECTIONS else None


def read(values: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return a torchtitan job config as a run; the number of GPUs is in its command."""
    settings = Settings(
        values, tool="torchtitan", version=version or VERSION, assumed=version is None
    )
    name = str(settings.raw("model.name", to="model", default="llama3"))
    flavor = str(settings.raw("model.flavor", to="model", default="8B"))
    model = MODELS.get((name, flavor), "")
    if not model:
        settings.unread(
            "model.flavor", f"{name} {flavor}", "the model: not in the table of flavours"
        )
        model = f"{name}-{flavor}".lower()
    recipe: dict[str, Any] = {
        "framework": settings.framework("torchtitan"),
        "task": Task.SFT,
        "method": Method.FULL,
        "dtype": "fp32",
        "mixed_precision": words.dtype(
            settings.raw("training.mixed_precision_param", to="mixed_precision", default="bfloat16")
        ),
        "micro_batch_size": settings.count(
            "training.local_batch_size", "training.batch_size", to="micro_batch_size", default=8
        ),
        "context": settings.count("training.seq_len", to="context", default=2048),
        "packing": True,
        "attention": "flash",
    }
    settings.quiet("training.max_norm", "training.steps", *(f"{name}." for name in WITHOUT_BYTES))
    settings.raw("training.mixed_precision_reduce", "training.dataset_path")
    _optimizer(settings, recipe)
    _checkpointing(settings, recipe)
    _compile(settings, recipe)
    _float8(settings, recipe)
    gpus = _sharding(settings, recipe)
    return settings.finish(model, recipe=recipe, lora={}, engine={}, gpus=gpus)


def _optimizer(settings: Settings, recipe: dict[str, Any]) -> None:
    name = str(settings.raw("optimizer.name", to="optimizer", default="AdamW"))
    how = str(settings.raw("optimizer.implementation", to="optimizer", default="fused"))
    fused = how == "fused" or settings.flag("optimizer.fused")
    recipe["optimizer"] = words.optimizer(settings, f"{name} fused" if fused else name)
    recipe["optimizer_in_backward"] = settings.flag("optimizer.early_step_in_backward")


def _checkpointing(settings: Settings, recipe: dict[str, Any]) -> None:
    """Read mode none, full or selective; selective_ac_option is op or every which layer."""
    mode = str(settings.raw("activation_checkpoint.mode", to="checkpointing", default="selective"))
    option = str(
        settings.raw("activation_checkpoint.selective_ac_option", to="checkpointing", default="op")
    )
    if mode != "selective":
        recipe["checkpointing"] = Checkpointing.FULL if mode == "full" else Checkpointing.NONE
    elif option.isdigit() and int(option):
        recipe["checkpointing"] = Checkpointing.SELECTIVE_LAYER
        recipe["checkpoint_every"] = int(option)
    else:
        recipe["checkpointing"] = Checkpointing.SELECTIVE_OP
    settings.raw("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns")


def _compile(settings: Settings, recipe: dict[str, Any]) -> None:
    """Read compile.enable with its components, or the older training.compile."""
    on = settings.flag("compile.enable", "training.compile", to="compile")
    parts = settings.raw("compile.components", to="compile_loss", default=["model", "loss"])
    chosen = [str(part) for part in parts] if isinstance(parts, list) else [str(parts)]
    recipe["compile"] = on and "model" in chosen
    if on and settings.has("compile.components"):
        recipe["compile_loss"] = "loss" in chosen


def _float8(settings: Settings, recipe: dict[str, Any]) -> None:
    converters = settings.raw("model.converters", to="float8", default=[])
    on = [str(each) for each in converters] if isinstance(converters, list) else [str(converters)]
    prefix = "quantize.linear.float8" if "quantize.linear.float8" in on else FP8
    keys = [f"{FP8}.{{}}", "quantize.linear.float8.{}"]

    def of(name: str) -> tuple[str, ...]:
        return tuple(key.format(name) for key in keys)

    gathers = settings.flag(*of("enable_fsdp_float8_all_gather"), to="float8_all_gather")
    scaling = str(settings.raw(*of("recipe_name"), to="float8", default="tensorwise"))
    settings.raw(*of("filter_fqns"))
    settings.raw(*of("precompute_float8_dynamic_scale_for_fsdp"))
    settings.raw(*of("force_recompute_fp8_weight_in_bwd"))
    if not any(FP8 in each for each in on):
        return
    word = scaling.replace("_", "-")
    if word not in {each.value for each in Float8}:
        settings.unread(f"{prefix}.recipe_name", scaling, "the scaling: planned as tensorwise")
        word = Float8.TENSORWISE.value
    recipe["float8"] = Float8(word)
    recipe["float8_all_gather"] = gathers


def _sharding(settings: Settings, recipe: dict[str, Any]) -> int | None:
    """Read the data-parallel degree; what else divides the model is said."""

    def degree(name: str) -> int | None:
        keys = (f"parallelism.{name}", f"training.{name}")
        return settings.count(*keys, to=f"parallel.{name.removesuffix('_degree')}", off=True)

    shard = degree("data_parallel_shard_degree") or -1
    found = {
        name: degree(key) or 1
        for name, key in (
            ("data_replicate", "data_parallel_replicate_degree"),
            ("tensor", "tensor_parallel_degree"),
            ("pipeline", "pipeline_parallel_degree"),
            ("context", "context_parallel_degree"),
            ("expert", "expert_parallel_degree"),
        )
    }
    settings.raw("parallelism.pipeline_parallel_schedule")
    settings.raw("parallelism.disable_loss_parallel", "parallelism.enable_async_tensor_parallel")
    copies = Sharding.DDP if found["data_replicate"] > 1 else Sharding.NONE
    recipe["sharding"] = copies if shard == 1 else Sharding.FSDP
    ranks = found["data_replicate"] * max(1, shard)
    gpus = set_degrees(
        settings,
        recipe,
        None if shard < 0 else ranks * found["tensor"] * found["pipeline"] * found["context"],
        sequence=found["tensor"] > 1,
        **found,
    )
    if shard < 0:
        settings.effect(
            "data_parallel_shard_degree -1 is every GPU of the command: give --gpus (planned on one)"
        )
    return gpus
