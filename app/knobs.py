"""Every setting the app offers: its name in a link, its field in a recipe, what it may be.

One table drives the widgets, the share link, the check of a link and the recipe itself.
None means "whatever the framework does".
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.dtypes import QUANTIZATIONS, TRAIN_DTYPES
from planner.run.recipe import (
    MAX_TOKENS,
    Attention,
    Checkpointing,
    EngineKind,
    Loss,
    Method,
    Optimizer,
    Recipe,
    Reference,
    Sharding,
    Task,
)
from planner.run.unread import ALGORITHMS

MAX_COUNT = 2**20
TARGET_SETS = ("all-linear", "attention", "mlp")


class Kind(StrEnum):
    """Which widget shows a knob."""

    CHOICE = "choice"
    COUNT = "count"
    NUMBER = "number"
    SWITCH = "switch"
    """yes, no or the framework's own."""
    TEXT = "text"


class Group(StrEnum):
    """Where a knob stands; `first` is always in view, the others are under "More"."""

    RUN = "run"
    FIRST = "first"
    SIZES = "Sizes"
    COMPUTE = "How it is computed"
    STATE = "What is trained and stored"
    ENGINE = "Generation"
    SPREAD = "Several GPUs"


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting."""

    key: str
    """Key of the widget, and name of the query parameter."""
    path: str
    """Field of Recipe; "lora.rank" reaches into a section."""
    label: str
    kind: Kind
    group: Group
    options: tuple[str, ...] = ()
    low: float = 1
    high: float = MAX_COUNT
    default: Any = None
    help: str = ""
    tasks: tuple[Task, ...] = tuple(Task)
    """The tasks it means something for."""


_TRAINS = tuple(task for task in Task if task is not Task.SERVE)
_GENERATES = (Task.GRPO, Task.SERVE)
_QUANTIZATIONS = tuple(dict.fromkeys(value or "none" for value in QUANTIZATIONS.values()))
FRAMEWORKS_FIRST = ("vramwise", "trl", "unsloth", "hf-trainer", "axolotl", "llamafactory")
"""Shown before the others, in this order."""


def _values(enum: type[StrEnum]) -> tuple[str, ...]:
    return tuple(member.value for member in enum)


def _choice(
    key: str, path: str, label: str, group: Group, options: tuple[str, ...], **rest: Any
) -> Knob:
    return Knob(key, path, label, Kind.CHOICE, group, options, **rest)


def _count(key: str, path: str, label: str, group: Group, high: float, **rest: Any) -> Knob:
    return Knob(key, path, label, Kind.COUNT, group, (), high=high, **rest)


def _switch(key: str, path: str, label: str, group: Group, **rest: Any) -> Knob:
    return Knob(key, path, label, Kind.SWITCH, group, ("yes", "no"), **rest)


KNOBS: tuple[Knob, ...] = (
    _choice("task", "task", "Task", Group.RUN, ("grpo", "sft", "dpo", "kto", "orpo", "simpo", "reward", "embed", "rerank", "serve"), default="grpo",
            help="What the run does: GRPO, supervised fine-tuning, preferences, a reward model, embeddings, a reranker or serving."),
    _choice("method", "method", "Method", Group.RUN, ("qlora", "lora", "full"), default="qlora", tasks=_TRAINS,
            help="qlora: adapters on a 4-bit base. lora: adapters on a 16-bit base. full: all weights."),
    _count("context", "context", "Context", Group.FIRST, MAX_TOKENS, default=2048,
           help="Prompt and completion together, in tokens."),
    _count("prompt", "prompt_length", "Prompt", Group.FIRST, MAX_TOKENS,
           help="Tokens of the prompt. Empty: all of the context counts as completion, the worst case."),
    _count("completion", "completion_length", "Answer", Group.FIRST, MAX_TOKENS, tasks=(Task.SERVE,),
           help="Tokens of an answer. With the prompt: the length of the requests that are counted."),
    _count("batch", "micro_batch_size", "Batch", Group.FIRST, MAX_COUNT,
           help="Micro-batch: sequences in one forward pass on one GPU."),
    _count("generations", "num_generations", "Generations", Group.FIRST, MAX_COUNT, tasks=(Task.GRPO,),
           help="Completions for every prompt."),
    _count("rank", "lora.rank", "LoRA rank", Group.FIRST, 2**14, tasks=_TRAINS),
    _choice("checkpointing", "checkpointing", "Checkpointing", Group.FIRST, _values(Checkpointing), tasks=_TRAINS,
            help="What is kept of the forward pass; offload moves layer inputs to host RAM."),
    _choice("engine", "engine.kind", "Engine", Group.FIRST, _values(EngineKind), tasks=_GENERATES,
            help="What generates the completions."),
    _count("accumulation", "gradient_accumulation", "Accumulation", Group.SIZES, MAX_COUNT, tasks=_TRAINS),
    _switch("packing", "packing", "Packing", Group.SIZES, tasks=_TRAINS),
    _count("checkpoint_every", "checkpoint_every", "Layers per checkpoint", Group.SIZES, MAX_COUNT, tasks=_TRAINS,
           help="Only for every-k checkpointing."),
    _count("keep_layers", "offload_keep_layers", "Layers not offloaded", Group.SIZES, 4096, low=0, tasks=_TRAINS),
    _choice("loss", "loss", "Loss head", Group.COMPUTE, _values(Loss), tasks=_TRAINS,
            help="chunked never holds logits of all tokens."),
    _count("loss_rows", "loss_chunk_rows", "Rows per loss chunk", Group.COMPUTE, MAX_COUNT, tasks=_TRAINS),
    _choice("attention", "attention", "Attention", Group.COMPUTE, _values(Attention)),
    _switch("tiled_mlp", "tiled_mlp", "Tiled MLP", Group.COMPUTE, tasks=_TRAINS),
    _choice("dtype", "dtype", "Base weights' dtype", Group.COMPUTE, TRAIN_DTYPES),
    _choice("mixed_precision", "mixed_precision", "Mixed precision", Group.COMPUTE, ("none", "bf16", "fp16"), tasks=_TRAINS),
    _switch("compile", "compile", "torch.compile", Group.COMPUTE),
    _choice("quantization", "quantization", "Quantisation of the base", Group.STATE, _QUANTIZATIONS),
    _switch("double_quant", "double_quant", "Double quantisation", Group.STATE),
    Knob("targets", "lora.targets", "LoRA targets", Kind.TEXT, Group.STATE, tasks=_TRAINS,
         help="all-linear, attention, mlp, or module names with commas: `q_proj, v_proj`"),
    _choice("adapter_dtype", "lora.dtype", "Adapters' dtype", Group.STATE, TRAIN_DTYPES, tasks=_TRAINS),
    _switch("dora", "lora.dora", "DoRA", Group.STATE, tasks=_TRAINS),
    Knob("dropout", "lora.dropout", "LoRA dropout", Kind.NUMBER, Group.STATE, low=0.0, high=0.99, tasks=_TRAINS),
    Knob("saved_modules", "lora.modules_to_save", "Modules trained in full", Kind.TEXT, Group.STATE, tasks=_TRAINS,
         help="Beside the adapters, with commas: `embed_tokens, lm_head`"),
    _choice("optimizer", "optimizer", "Optimizer", Group.STATE, _values(Optimizer), tasks=_TRAINS),
    _switch("optimizer_offload", "optimizer_offload", "Optimizer in host RAM", Group.STATE, tasks=_TRAINS),
    _switch("step_in_backward", "optimizer_in_backward", "Step inside backward", Group.STATE, tasks=_TRAINS),
    _switch("master_weights", "master_weights", "fp32 master weights", Group.STATE, tasks=_TRAINS),
    _choice("gradient_dtype", "gradient_dtype", "Gradients' dtype", Group.STATE, TRAIN_DTYPES, tasks=_TRAINS),
    Knob("beta", "beta", "KL weight (beta)", Kind.NUMBER, Group.STATE, low=0.0, high=100.0, tasks=(Task.GRPO, Task.DPO)),
    _choice("reference", "reference", "Reference model", Group.STATE, _values(Reference), tasks=(Task.GRPO, Task.DPO)),
    _choice("algorithm", "algorithm", "Algorithm", Group.STATE, tuple(sorted(ALGORITHMS)), tasks=_TRAINS,
            help="A relative of the task."),
    _choice("kv_dtype", "engine.kv_dtype", "KV cache dtype", Group.ENGINE, ("bf16", "fp16", "fp32", "fp8"), tasks=_GENERATES),
    _count("kv_bytes", "engine.kv_bytes", "KV cache size (bytes)", Group.ENGINE, 2**50, tasks=_GENERATES),
    Knob("utilization", "engine.gpu_memory_utilization", "vLLM memory utilisation", Kind.NUMBER, Group.ENGINE, low=0.01, high=1.0, tasks=_GENERATES),
    _count("seqs", "engine.max_num_seqs", "Generated at once", Group.ENGINE, MAX_COUNT, tasks=_GENERATES),
    _count("batched_tokens", "engine.max_num_batched_tokens", "Batched tokens", Group.ENGINE, MAX_TOKENS, tasks=_GENERATES),
    _count("block", "engine.block_size", "KV block (tokens)", Group.ENGINE, 4096, tasks=_GENERATES),
    _count("sleep", "engine.sleep_level", "Sleep level", Group.ENGINE, 2, low=0, tasks=(Task.GRPO,)),
    _count("max_loras", "engine.max_loras", "Adapter slots", Group.ENGINE, 4096, tasks=(Task.SERVE,),
           help="LoRA adapters that are served beside the base in one batch."),
    _count("max_lora_rank", "engine.max_lora_rank", "Their rank, at most", Group.ENGINE, 2**14, tasks=(Task.SERVE,)),
    _switch("graphs", "engine.cuda_graphs", "CUDA graphs", Group.ENGINE, tasks=_GENERATES),
    _count("tensor_parallel", "engine.tensor_parallel", "Tensor parallel", Group.SPREAD, MAX_COUNT, tasks=_GENERATES),
    _choice("sharding", "sharding", "Sharding", Group.SPREAD, _values(Sharding), tasks=_TRAINS,
            help="What the GPUs divide: nothing (ddp), states (zero1), gradients too (zero2), weights too (zero3, fsdp, fsdp2)."),
    _count("replicas", "parallel.data_replicate", "Groups with the same shards", Group.SPREAD, MAX_COUNT, tasks=_TRAINS,
           help="HSDP: each group of GPUs divides the weights, and the groups add up their gradients."),
    Knob("reshard", "reshard_after_forward", "Divide layers again after their forward", Kind.TEXT, Group.SPREAD, tasks=_TRAINS,
         help="yes, no, or over how many GPUs a layer stays divided until its backward."),
    _count("train_tensor", "parallel.tensor", "GPUs that share a layer", Group.SPREAD, MAX_COUNT, tasks=_TRAINS, help="Tensor parallel, in training."),
    _switch("sequence", "parallel.sequence", "They share a sequence's tokens between layers too", Group.SPREAD, tasks=_TRAINS),
    _count("stages", "parallel.pipeline", "Pipeline stages", Group.SPREAD, MAX_COUNT, tasks=_TRAINS),
    _count("context_ranks", "parallel.context", "GPUs that share a sequence", Group.SPREAD, MAX_COUNT, tasks=_TRAINS, help="Context parallel."),
    _choice("context_kind", "parallel.context_kind", "How they share it", Group.SPREAD, ("ring", "ulysses"), tasks=_TRAINS),
    _count("expert_ranks", "parallel.expert", "GPUs that share a layer's experts", Group.SPREAD, MAX_COUNT, tasks=_TRAINS),
    _switch("offload_weights", "offload.parameters", "Weights in host RAM", Group.SPREAD, tasks=_TRAINS, help="FSDP's `cpu_offload`, DeepSpeed's `offload_param`."),
)  # fmt: skip
BY_KEY = {knob.key: knob for knob in KNOBS}
BY_PATH = {knob.path: knob for knob in KNOBS}
MORE = (Group.SIZES, Group.COMPUTE, Group.STATE, Group.ENGINE, Group.SPREAD)


def applies(knob: Knob, task: str, method: str) -> bool:
    """Return whether a knob means something for a task and method."""
    if task not in knob.tasks:
        return False
    return method != Method.FULL or not knob.path.startswith("lora.") or task == Task.SERVE


def parse(knob: Knob, text: str) -> Any:
    """Return the value that a link's text means; raises ValueError with what is allowed."""
    if knob.kind in (Kind.CHOICE, Kind.SWITCH):
        if text not in knob.options:
            raise ValueError(f"one of {', '.join(knob.options)}")
        return text
    if knob.kind is Kind.TEXT:
        if len(text) > 100 or not text.isprintable():
            raise ValueError("at most 100 printable characters")
        if knob.key == "reshard" and text not in ("yes", "no") and not text.isdecimal():
            raise ValueError("yes, no or a number of GPUs")
        return text
    try:
        value = float(text) if knob.kind is Kind.NUMBER else int(text)
    except ValueError:
        raise ValueError("a number") from None
    if not knob.low <= value <= knob.high:
        raise ValueError(f"{knob.low:,} to {knob.high:,}")
    return value


def to_field(knob: Knob, value: Any) -> Any:
    """Return a widget's value as the recipe wants it."""
    if knob.kind is Kind.SWITCH:
        return value == "yes"
    if knob.key == "reshard":
        words = {"yes": True, "no": False}
        return words.get(value, int(value) if value.isdecimal() else value)
    if knob.key == "saved_modules" or (knob.key == "targets" and value not in TARGET_SETS):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def recipe_default(knob: Knob) -> Any:
    """Return the recipe's own default of a knob's field; None = the framework decides."""
    return read_path(Recipe(), knob.path)


def read_path(recipe: Recipe, path: str) -> Any:
    """Return a recipe's field by path."""
    value: Any = recipe
    for part in path.split("."):
        value = getattr(value, part)
    return value


def to_widget(knob: Knob, value: Any) -> Any:
    """Return a recipe's value as the widget holds it; None for the default."""
    if knob.default is None and value == recipe_default(knob):
        return None
    if value is None or value == "" or value == ():
        return None
    if knob.kind is Kind.SWITCH or isinstance(value, bool):
        return "yes" if value else "no"
    if knob.kind is Kind.TEXT and isinstance(value, int):
        return str(value)
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return value.value if isinstance(value, StrEnum) else value
