"""Megatron-LM's own command lines: torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 ...

Read in Megatron-LM's examples (gpt3, llama, mixtral) and megatron/training/arguments.py. The model is spelled
out by its widths; the catalogue's model of those widths is planned, whatever it was trained for.
"""

import re
from typing import Any

from planner.importers import words
from planner.importers.context import Context
from planner.importers.launch import finish_sharding, set_degrees
from planner.importers.launchers import Started
from planner.importers.megatron_flags import DEGREES, recompute, renamed
from planner.importers.policy_keys import quiet_prefixes
from planner.importers.settings import Imported, Settings, as_int
from planner.importers.shapes import Shape, model_of
from planner.run.recipe import Method, Optimizer, Sharding, Task

VERSION = "0.14"
SWIGLU_MULTIPLE = 64
_WIDTHS = frozenset(("num_layers", "hidden_size", "num_attention_heads"))
_PROGRAM = re.compile(r"(?:pretrain|train|finetune)_\w+\.py$")
_OTHERS = re.compile(r"_(?:bert|t5|ict|retro|mamba|hybrid|vision|vit|vlm|multimodal)\w*\.py$")
"""Programs whose models are no decoders of attention."""


def pretrain_command(started: Started, context: Context) -> Imported | None:
    """Return the run of Megatron-LM's flags, or None for another command."""
    values = renamed(started.arguments)
    if not set(values) >= _WIDTHS or "hf_checkpoint" in values or _OTHERS.search(started.name):
        return None
    if not (_PROGRAM.search(started.program) or "tensor_model_parallel_size" in values):
        return None
    return read(values, started.gpus, version=context.version_of("megatron"))


def read(values: dict[str, Any], gpus: int | None, *, version: str | None = None) -> Imported:
    """Return Megatron-LM's arguments as a run."""
    s = Settings(values, tool="megatron", version=version or VERSION, assumed=version is None)
    recipe: dict[str, Any] = {"framework": "megatron", "task": Task.SFT, "method": Method.FULL}
    model = _model(s)
    half = "bf16" if s.flag("bf16", to="dtype") else "fp16" if s.flag("fp16", to="dtype") else ""
    recipe["dtype"], recipe["mixed_precision"] = half or "fp32", "none"
    micro = s.count("micro_batch_size", to="micro_batch_size", default=1) or 1
    recipe["micro_batch_size"] = micro
    recipe["context"] = s.count("seq_length", "encoder_seq_length", to="context", default=1024)
    if s.flag("recompute_activations"):
        s.values.setdefault("recompute_granularity", "selective")
    if s.flag("checkpoint_activations"):  # its name before 2022
        s.values.setdefault("recompute_granularity", "full")
    if s.raw("fp8_format", "fp8_recipe") or s.flag("fp8_param_gather"):
        s.effect("fp8: products in 8 bit, planned in 16; --fp8-param-gather's 1 B weights are not")
    recompute(s, recipe)
    recipe["optimizer"] = Optimizer.ADAMW_FUSED
    if (name := s.raw("optimizer")) and str(name) != "adam":
        recipe["optimizer"] = words.optimizer(s, name)
    whole = s.flag("use_distributed_optimizer", to="sharding")
    recipe["sharding"] = Sharding.MEGATRON if whole else Sharding.DDP
    if s.flag("optimizer_cpu_offload", to="optimizer_offload"):
        recipe["optimizer_offload"] = True
    recipe["attention"] = "flash"
    found: dict[str, Any] = {
        name: s.flag(*keys, to="parallel.sequence")
        if name == "sequence"
        else s.count(*keys, to=f"parallel.{name}", off=True)
        for name, keys in DEGREES.items()
    }
    if (found.get("tensor") or 1) < 2:
        found["sequence"] = False
    layers = s.count(
        "num_layers_per_virtual_pipeline_stage", to="parallel.virtual_stages", off=True
    )
    if layers and (stages := found.get("pipeline")):
        found["virtual_stages"] = max(1, (as_int(values["num_layers"]) or 1) // stages // layers)
    total = set_degrees(s, recipe, gpus, **found)
    inner = 1
    for name in ("tensor", "pipeline", "context"):
        inner *= found.get(name) or 1
    data = max(1, (total or inner) // inner)
    batch = s.count("global_batch_size", to="gradient_accumulation") or micro * data
    recipe["gradient_accumulation"] = max(1, batch // (micro * data))
    s.quiet(*quiet_prefixes("megatron"))
    ranks = finish_sharding(s, recipe, total)
    return s.finish(model, recipe=recipe, lora={}, engine={}, gpus=ranks)


def _model(s: Settings) -> str:
    """Return the catalogue's model of these widths, "" for none; says which."""
    hidden = s.count("hidden_size", to="model") or 0
    heads = s.count("num_attention_heads", to="model") or 0
    grouped = s.flag("group_query_attention")
    queries = s.count("num_query_groups", to="model", off=True)
    experts = s.count("num_experts", to="model", off=True)
    swiglu = s.flag("swiglu")
    usual = int(4 * hidden * 2 / 3 / SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE if swiglu else 4 * hidden
    inner = s.count("moe_ffn_hidden_size", "ffn_hidden_size", to="model") or usual
    asked = Shape(
        layers=s.count("num_layers", to="model") or 0,
        hidden=hidden,
        heads=heads,
        kv_heads=queries if grouped and queries else heads,
        intermediate=inner,
        experts=experts,
        vocab=s.count("vocab_size", "padded_vocab_size", to="model"),
        gated=swiglu,
    )
    s.raw("kv_channels", "max_position_embeddings", "moe_router_topk", "ffn_hidden_size")
    model = model_of(asked)
    widths = f"{asked.layers} layers of {hidden:,}, {heads} heads, MLP {inner:,}"
    if model is None:
        s.effect(f"no model here has {widths}: say which is alike (--model)")
        return ""
    s.effect(f"planned as {model}, which has {widths}; its vocabulary stands for the tokenizer's")
    return model
