"""torchtune YAML (snapshot bd2a0fc7 of 0.7): the model component carries method and size."""

import re
from typing import Any

from planner.importers import words
from planner.importers.settings import Imported, Settings
from planner.run.recipe import Float8, Loss, Method, Sharding, Task

VERSION = "0.6.1"
_COMPONENT = re.compile(r"(?:(?P<kind>qlora|lora|dora|qdora)_)?(?P<model>[a-z0-9_]+)$")
MODELS: tuple[tuple[str, str], ...] = (
    (r"llama2_(\d+)b", "meta-llama/Llama-2-{0}b-hf"),
    (r"llama3_(8|70)b", "meta-llama/Meta-Llama-3-{0}B"),
    (r"llama3_1_(\d+)b", "meta-llama/Llama-3.1-{0}B"),
    (r"llama3_2_(1|3)b", "meta-llama/Llama-3.2-{0}B"),
    (r"llama3_2_vision_(\d+)b", "meta-llama/Llama-3.2-{0}B-Vision"),
    (r"llama3_3_(\d+)b", "meta-llama/Llama-3.3-{0}B-Instruct"),
    (r"llama4_scout_17b_16e", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    (r"llama4_maverick_17b_128e", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    (r"mistral_7b", "mistralai/Mistral-7B-v0.1"),
    (r"phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
    (r"phi4_14b", "microsoft/phi-4"),
    (r"gemma_(\d+)b", "google/gemma-{0}b"),
    (r"gemma2_(\d+)b", "google/gemma-2-{0}b"),
    (r"qwen2_(\d+)b", "Qwen/Qwen2-{0}B"),
    (r"qwen2_(0|1)_5b", "Qwen/Qwen2-{0}.5B"),
    (r"qwen2_5_(0|1)_5b(?:_base|_instruct)?", "Qwen/Qwen2.5-{0}.5B"),
    (r"qwen2_5_(\d+)b(?:_base|_instruct)?", "Qwen/Qwen2.5-{0}B"),
    (r"qwen3_(0_6|1_7)b(?:_base|_instruct)?", "Qwen/Qwen3-{0}B"),
    (r"qwen3_(\d+)b(?:_base|_instruct)?", "Qwen/Qwen3-{0}B"),
)
_TARGETS = {"output_proj": "o_proj"}


def model_of(component: str) -> tuple[str, str]:
    """Return (hub id, method word) of a model component; the component itself if unknown."""
    leaf = component.rsplit(".", 1)[-1]
    match = _COMPONENT.match(leaf)
    kind, name = (match.group("kind") or "", match.group("model")) if match else ("", leaf)
    for pattern, hub_id in MODELS:
        if found := re.fullmatch(pattern, name):
            size = found.group(1).replace("_", ".") if found.groups() else ""
            return hub_id.format(size), kind
    return name, kind


def read(values: dict[str, Any], *, version: str | None = None, text: str = "") -> Imported:
    """Return a torchtune config as a run; recipe and GPU count are in its header and command."""
    settings = Settings(
        values, tool="torchtune", version=version or VERSION, assumed=version is None
    )
    component = str(settings.raw("model._component_", to="model", default=""))
    model, kind = model_of(component)
    if "/" not in model:
        settings.unread("model._component_", component, "the model: not in the table of components")
    recipe: dict[str, Any] = {"framework": settings.framework("torchtune")}
    dpo = (
        "DPO" in str(settings.values.get("loss._component_", ""))
        or "dpo" in text.lower()[:4000].split("tune run", 1)[-1][:80]
    )
    recipe["task"] = Task.DPO if dpo else Task.SFT
    quantized = settings.flag("model.quantize_base") or kind.startswith("q")
    method = Method.FULL if not kind else Method.QLORA if quantized else Method.LORA
    recipe["method"] = method
    if method is Method.QLORA:
        recipe["quantization"], recipe["double_quant"] = "nf4", True
    recipe["dtype"] = words.dtype(settings.raw("dtype", to="dtype", default="bf16")) or "bf16"
    recipe["mixed_precision"] = "none"
    recipe["micro_batch_size"] = settings.count("batch_size", to="micro_batch_size", default=2)
    recipe["gradient_accumulation"] = settings.count(
        "gradient_accumulation_steps", to="gradient_accumulation", default=1
    )
    _length(settings, recipe)
    _compute(settings, recipe)
    recipe["compile"] = settings.flag("compile", to="compile")
    if settings.flag("enable_fp8_training", to="float8"):
        recipe["float8"] = _float8(settings)
    if dpo:
        recipe["reference"] = words.reference(method, needed=True)
    gpus = _gpus(settings, recipe, text)
    settings.raw(
        "device",
        "low_cpu_ram",
        "model.lora_alpha",
        "custom_sharded_layers",
        "fsdp_reshard_after_forward",
    )
    return settings.finish(
        model, recipe=recipe, lora=_lora(settings, method, kind), engine={}, gpus=gpus
    )


def _float8(settings: Settings) -> Float8 | None:
    """Return the scaling; torchtune hands the name to torchao, whose default is tensorwise."""
    name = str(settings.raw("fp8_recipe_name", to="float8", default="tensorwise"))
    try:
        return Float8(name.replace("_", "-"))
    except ValueError:
        settings.unread("fp8_recipe_name", name, "the scaling of float8: planned as tensorwise")
        return Float8.TENSORWISE


def _length(settings: Settings, recipe: dict[str, Any]) -> None:
    length = settings.count("tokenizer.max_seq_len", to="context")
    recipe["context"] = length
    if length is None:
        settings.effect(
            "tokenizer.max_seq_len is null: nothing is truncated, the longest sample decides (planned at 2048; give --context)"
        )
        recipe["context"] = 2048
        settings.defaulted("context", "2048 (no limit in the file)")
    recipe["packing"] = settings.flag("dataset.packed", to="packing")


def _compute(settings: Settings, recipe: dict[str, Any]) -> None:
    on = settings.flag("enable_activation_checkpointing", to="checkpointing")
    offload = settings.flag("enable_activation_offloading", to="checkpointing")
    recipe["checkpointing"] = words.checkpointing(on, offload=offload)
    recipe["attention"] = "sdpa"
    loss = str(settings.raw("loss._component_", to="loss", default="LinearCrossEntropyLoss"))
    recipe["loss"] = Loss.CHUNKED if "Linear" in loss or "Chunk" in loss else Loss.FULL
    name = str(settings.raw("optimizer._component_", to="optimizer", default="torch.optim.AdamW"))
    fused = settings.flag("optimizer.fused")
    recipe["optimizer"] = words.optimizer(settings, f"{name} fused" if fused else name)
    if settings.flag("optimizer_in_bwd", to="gradients"):
        recipe["optimizer_in_backward"] = True
        settings.effect(
            "optimizer_in_bwd steps each parameter in the backward: gradients of one layer at a time live"
        )


def _gpus(settings: Settings, recipe: dict[str, Any], text: str) -> int | None:
    given = settings.count("n_gpus", to="gpus")
    match = re.search(r"nproc[_-]per[_-]node[ =]+(\d+)", text)
    gpus = given or (int(match.group(1)) if match else None)
    distributed = re.search(r"\w+_distributed\b|_distributed\.py", text) is not None
    if distributed or (gpus or 1) > 1:
        recipe["sharding"] = Sharding.FSDP
    elif not re.search(r"single_device", text):
        settings.effect(
            "the recipe (single_device or distributed) is not in the file: planned on one GPU"
        )
    if settings.flag("fsdp_cpu_offload"):
        settings.effect("fsdp_cpu_offload keeps parameters and optimizer in host memory")
        recipe["optimizer_offload"] = True
        if recipe.get("sharding") is Sharding.FSDP:
            recipe["offload"] = {"parameters": True}
    return gpus


def _lora(settings: Settings, method: Method, kind: str) -> dict[str, Any]:
    if method is Method.FULL:
        return {}
    attention = settings.raw(
        "model.lora_attn_modules", to="lora.targets", default=["q_proj", "v_proj"]
    )
    targets = [_TARGETS.get(str(name), str(name)) for name in attention]
    if settings.flag("model.apply_lora_to_mlp", to="lora.targets"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if settings.flag("model.apply_lora_to_output", to="lora.targets"):
        targets.append("lm_head")
    return {
        "rank": settings.count("model.lora_rank", to="lora.rank", default=8),
        "targets": tuple(targets),
        "dropout": settings.number("model.lora_dropout", to="lora.dropout", default=0.0),
        "dora": settings.flag("model.use_dora") or "dora" in kind,
        "dtype": "bf16",
    }
