"""Columns of rl.csv -> Recipe."""

import re
from typing import Any

from planner.accuracy.lora_targets import lora_targets
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.models.spec import ModelSpec
from planner.run.framework import pick, spell
from planner.run.recipe import (
    Attention,
    Checkpointing,
    EngineKind,
    EngineSection,
    LoraSection,
    Loss,
    Method,
    OffloadSection,
    Optimizer,
    Recipe,
    Reference,
    Sharding,
    Task,
)

_TASKS = {
    str(task): task
    for task in (Task.SFT, Task.DPO, Task.KTO, Task.ORPO, Task.SIMPO, Task.REWARD, Task.PPO)
}
_GRPO = frozenset({"grpo", "gspo", "dapo", "dr_grpo", "rloo", "reinforce", "cispo"})
_CHECKPOINTING = {
    "full": Checkpointing.FULL,
    "none": Checkpointing.NONE,
    "offload": Checkpointing.OFFLOAD,
}
_ATTENTION = {"fa2": Attention.FLASH, "sdpa": Attention.SDPA, "eager": Attention.EAGER}
_REFERENCE = {
    "none": Reference.NONE,
    "separate": Reference.SEPARATE,
    "adapter_off": Reference.ADAPTER_OFF,
}
_OPTIMIZERS = {
    "adamw_8bit": Optimizer.ADAMW_8BIT,
    "paged_adamw_8bit": Optimizer.PAGED_ADAMW_8BIT,
    "adamw_torch": Optimizer.ADAMW,
    "none": Optimizer.SGD,
}


def rl_recipe(row: Row, model: ModelSpec) -> Recipe:
    """Return the recipe of a training row; raises NotCovered with the reason."""
    if row["method"] not in {"full", "lora", "qlora"}:
        raise NotCovered("the row does not state the training method")
    method = Method(row["method"])
    task = _task(row["algo"])
    values: dict[str, Any] = {
        "task": task,
        "method": method,
        "framework": _framework(row),
        "dtype": _dtype(row),
        "mixed_precision": _mixed_precision(row),
        "quantization": "nf4" if method is Method.QLORA else None,
        "double_quant": True if "double quant" in row["notes"] else None,
        "optimizer": _OPTIMIZERS.get(row["optimizer"]),
        "micro_batch_size": row.integer("batch_per_device") or _one_sequence(row),
        "num_generations": row.integer("num_generations"),
        "checkpointing": _checkpointing(row, method),
        "attention": _ATTENTION.get(row["attn"]),
        "loss": _loss(row["loss_impl"]),
        # Liger takes one sequence a chunk
        "loss_chunk_rows": row.integer("completion_len") if row["loss_impl"] == "liger" else None,
        "reference": _REFERENCE.get(row["ref_model"]),
        "sharding": _sharding(row),
        "gradient_accumulation": _accumulation(row),
        **_lengths(row, task),
    }
    if row["framework"].startswith("verl") and "offload" in row["sharding"]:
        values["optimizer_offload"] = True
        values["offload"] = OffloadSection(parameters="param+" in row["sharding"])
    if "own loop" in row["notes"]:
        values["entropy"] = True  # garg-aayush's loop logs one of every step
    if task is Task.GRPO:
        kind = EngineKind.TRANSFORMERS if row["vllm"] in {"none", ""} else EngineKind.VLLM_PUSH
        values["engine"] = EngineSection(
            kind=kind, gpu_memory_utilization=row.number("vllm_gpu_mem_util")
        )
    if method is not Method.FULL:
        targets = lora_targets(row["lora_targets"] or "all-linear", model)
        values["lora"] = LoraSection(
            rank=row.integer("lora_rank") or 16, targets=targets, dtype=_adapter_dtype(row)
        )
    return Recipe(**values)


def _dtype(row: Row) -> str:
    """Return the weights' dtype; verl's actor is fp32 unless a row says that it is not."""
    if row["framework"].startswith("verl") and not row["dtype"]:
        return "fp32"
    return "fp32" if row["dtype"].startswith("fp32") else "bf16"


def _adapter_dtype(row: Row) -> str | None:
    """TRL from 1.0 on casts the adapters of a quantised base to bf16."""
    quantised = row["framework"] == "trl" and row["method"] == "qlora"
    return "bf16" if quantised and _recent(row) else None


def _recent(row: Row) -> bool:
    """Return whether the run used TRL 1.x: it says so, or it is of 2026."""
    text = f"{row['notes']} {row['source_url_or_repo']}"
    return re.search(r"trl 1\.|results_2026", text) is not None


def _task(name: str) -> Task:
    if name in _GRPO:
        return Task.GRPO
    if name in _TASKS:
        return _TASKS[name]
    raise NotCovered(f"algorithm {name!r} is not one that the planner knows")


def _framework(row: Row) -> str:
    name = row["framework"].lower()
    if name == "trl":
        if row["loss_impl"] != "full_logits":
            return "trl"
        if "trl 1.12" in row["notes"]:
            return pick("trl", "1.12").name
        return pick("trl", "1.9.2" if _recent(row) else "0.15").name
    known = {
        "unsloth": "unsloth",
        "hf": "hf-trainer",
        "huggingface": "hf-trainer",
        "ms-swift": "ms-swift",
        "verl": "verl",
        "custom": "fused-logp-loop",
    }
    name = next((word for word in ("verl",) if name.startswith(word)), name)
    if name.startswith("custom (plain torch"):
        return pick("peft-loop").name
    if name not in known:
        raise NotCovered(f"the framework {name!r} is not known")
    stated = re.match(r"\d+(\.\d+)+", row["framework_version"])
    if stated and name in {"ms-swift", "verl", "unsloth"}:
        return pick(spell(known[name], stated[0])).name
    return pick(known[name]).name


def _mixed_precision(row: Row) -> str | None:
    if "bf16 autocast" in row["notes"]:
        return "bf16"
    if row["framework"] == "custom":
        return "none"
    return "bf16" if row["framework"] == "trl" else None  # what its users set until 0.19 made it so


def _one_sequence(row: Row) -> int | None:
    """A context limit is stated for one sequence."""
    return 1 if row.quantity == "max_context_capacity" else None


def _checkpointing(row: Row, method: Method) -> Checkpointing | None:
    stated = _CHECKPOINTING.get(row["grad_ckpt"])
    if stated is None and method is Method.QLORA:
        return Checkpointing.FULL  # prepare_model_for_kbit_training turns it on
    return stated


def _loss(text: str) -> Loss | None:
    if text == "full_logits":
        return Loss.FULL
    return Loss.CHUNKED if text in {"chunked", "liger"} else None


def _sharding(row: Row) -> Sharding:
    text = row["sharding"].lower()
    if text in {"", "none"}:
        return Sharding.NONE
    if re.search(r"tp|pp|cp|ep|megatron", text):
        raise NotCovered("tensor, pipeline, context or expert parallel training is not modelled")
    if "offload" in text and not row["framework"].startswith("verl"):
        raise NotCovered("parameters or optimizer offloaded by the sharding engine")
    word = re.match(r"ddp|fsdp|zero[123]", text)
    if word is None:
        raise NotCovered(f"sharding {text[:30]!r} is not one that the planner knows")
    return Sharding(word[0])


def _accumulation(row: Row) -> int:
    if row["optimizer"] == "none":
        return 2  # no step and no zero_grad: every backward adds to the last one's
    stated = re.search(r"\bGA (\d+)|grad acc (\d+)", row["notes"])
    return int(stated[1] or stated[2]) if stated else 1


def _lengths(row: Row, task: Task) -> dict[str, int]:
    prompt, completion = row.integer("prompt_len"), row.integer("completion_len")
    context = row.integer("seq_len")
    if completion is None and context is None:
        raise NotCovered("the row does not state the sequence length")
    if completion is None or task is not Task.GRPO:
        return {"context": context or (prompt or 0) + (completion or 0)}
    stated = re.search(r"about (\d+) tokens", row["notes"])
    guess = (context - completion) if context else int(stated[1]) if stated else None
    length = prompt or guess
    if not length:
        return {"completion_length": completion}  # the framework's prompt limit
    return {"prompt_length": length, "completion_length": completion}
