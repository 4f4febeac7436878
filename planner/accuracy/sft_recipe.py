"""Fine-tuning columns -> Recipe: what each cell means, whichever source wrote it."""

import re
from typing import Any

from planner.accuracy.lora_targets import lora_targets, targets_of_count
from planner.accuracy.notebooks import notebook_of
from planner.accuracy.parallel_columns import titan_layout
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.accuracy.sft_frameworks import framework_of
from planner.models.spec import ModelSpec
from planner.run.framework import pick
from planner.run.recipe import (
    Attention,
    Checkpointing,
    LoraSection,
    Loss,
    Method,
    Optimizer,
    Recipe,
    Sharding,
    Task,
)

_DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}
_SMALL_STATE = frozenset(
    [
        "adapter",
        "adapter_v2",
        "adaption_prompt",
        "boft",
        "c3a",
        "deft",
        "fourierft",
        "frod",
        "glora",
        "hira",
        "ia3",
        "lily",
        "miss",
        "oft",
        "peanut",
        "prefix_tuning",
        "prompt_tuning",
        "psoft",
        "pvera",
        "randlora",
        "road",
        "tinylora",
        "trainable_tokens",
        "unilora",
        "vblora",
        "vera",
        "waveft",
        "adalora",
        "loha",
        "lokr",
        "ln_tuning",
        "bone",
        "shira",
        "delora",
        "cartridges",
        "gralora",
    ]
)
"""PEFT methods whose trained state is at most a few million parameters: planned as a LoRA of the
same targets, since weights, saved activations and logits are what counts."""


SWIFT_2023_OTHERWISE = {
    "openbuddy-zephyr": Attention.EAGER,
    "yi": Attention.SDPA,
    "chatglm3": Attention.SDPA,
    "baichuan2-13b": Attention.EAGER,
}
"""Models whose runs in ms-swift 1.5's benchmark had no flash attention, by how their names start.

--use_flash_attn was on, but swift set `_flash_attn_2_enabled` (swift/llm/utils/model.py 67625b574),
which transformers 4.36 no longer reads: Llama's default there is SDPA, Mistral's eager. ChatGLM3's
and Baichuan2-13B's own code have none."""


def recipe_of(row: Row, model: ModelSpec) -> Recipe:
    """Return the recipe of a fine-tuning row; raises NotCovered with the reason.

    A length that the row does not state becomes the framework's default.
    """
    method = method_of(row)
    batch, length = row.integer("micro_batch"), row.integer("seq_len")
    notebook = notebook_of(row)
    if notebook and notebook.context:
        length = notebook.context
    framework = framework_of(row)
    values: dict[str, Any] = {
        "task": Task.SFT,
        "method": method,
        "framework": framework,
        "dtype": _DTYPES.get(row["weights_dtype"]),
        "mixed_precision": _mixed_precision(row),
        "quantization": quantization_of(row["base_quant"]),
        "double_quant": _double_quant(row),
        "optimizer": _optimizer(row["optimizer"], framework),
        "micro_batch_size": batch or 1,
        "gradient_accumulation": row.integer("grad_accum") or 1,
        "context": length or _default_context(framework),
        "packing": _flag(row["packing"]),
        "checkpointing": _checkpointing(row["grad_ckpt"], row["parallelism"]),
        "attention": _attention(row["attn"], framework, model),
        "loss": _loss(row),
        "sharding": _sharding(row),
        "compile": row["compile"] == "yes",
        **_in_float8(row),
        "optimizer_in_backward": "in_bwd" in row["optimizer"],
    }
    values |= titan_layout(row)
    if notebook and notebook.tiled_mlp:
        values["tiled_mlp"] = True
    if notebook and notebook.attention:
        values["attention"] = Attention(notebook.attention)
    if method is not Method.FULL:
        values["lora"] = LoraSection(
            rank=row.integer("lora_rank") or _default_rank(row),
            targets=_targets(row, model),
            dropout=_dropout(row),
        )
    return Recipe(**values)


def _targets(row: Row, model: ModelSpec) -> tuple[str, ...]:
    """Return the adapted linears: Unsloth's get_peft_model takes all seven projections by itself."""
    notebook = notebook_of(row)
    text = row["lora_targets"]
    if notebook and not text:
        return targets_of_count(model, row.integer("lora_rank") or 16, notebook.trained)
    return lora_targets(text, model)


def _default_context(framework: str) -> int:
    return int(pick(framework).task_defaults("sft").get("context", 2048))


def method_of(row: Row) -> Method:
    """Return the training method; raises NotCovered for what is no fine-tuning."""
    text = row["method"].lower()
    if text.startswith("qlora"):
        return Method.QLORA
    name = re.split(r"[ +(-]", text)[0]
    if name == "lora" or name in _SMALL_STATE:
        return Method.QLORA if row["base_quant"] else Method.LORA
    if name == "full":
        return Method.FULL
    raise NotCovered(f"method {text[:40]!r} is not a fine-tuning method that the planner knows")


def _dropout(row: Row) -> float:
    """Return LoRA's dropout: what the source's scripts say, which its rows do not repeat."""
    if row.source == "fms-acceleration":
        return 0.1  # lora_dropout in every scenario of scripts/benchmarks (876e2ed)
    framework = row["framework"].lower()
    # LitGPT's default, and ms-swift's (arguments.py, lora_dropout_p)
    return 0.05 if "litgpt" in framework or "swift" in framework else 0.0


def _default_rank(row: Row) -> int:
    return 32 if "litgpt" in row["framework"].lower() else 8


def quantization_of(text: str) -> str | None:
    """Return the planner's word for a quantised base, or None."""
    folded = text.lower()
    if not folded:
        return None
    bits = "8bit" if "8" in folded else "4bit"
    if "gptq" in folded:
        return f"gptq-{bits}"
    if "awq" in folded:
        return "awq-4bit"
    return "int8" if bits == "8bit" else "nf4"


def _double_quant(row: Row) -> bool | None:
    """Return whether the constants are quantised too; None = the framework's own default."""
    text = row["base_quant"].lower()
    if not text or "gptq" in text:
        return None
    if "litgpt" in row["framework"].lower():
        return text.endswith("-dq")
    return True if re.search(r"double|nested|-dq", text) else None


def _mixed_precision(row: Row) -> str | None:
    text = row["mixed_precision"].lower()
    if text.startswith("none"):
        return "none"
    if "bf16" in text:
        return "bf16"
    return "fp16" if "fp16" in text else None


def _optimizer(text: str, framework: str) -> Optimizer | None:
    folded = text.lower()
    if folded.split(" ")[0] == "adamw" and framework.startswith(("torchtune", "torchtitan")):
        return None  # their configurations say which implementation
    if "paged" in folded:
        return Optimizer.PAGED_ADAMW_8BIT if "8bit" in folded else Optimizer.PAGED_ADAMW
    if "8bit" in folded:
        return Optimizer.ADAMW_8BIT
    if "fused" in folded:
        return Optimizer.ADAMW_FUSED
    return Optimizer.ADAMW if "adam" in folded else None


def _checkpointing(text: str, parallelism: str) -> Checkpointing | None:
    folded = text.lower()
    if "offload" in folded or "unsloth" in folded:
        return Checkpointing.OFFLOAD
    if folded.startswith("selective(op"):
        return Checkpointing.SELECTIVE_OP
    if folded.startswith(("full", "true", "on", "hf", "selective")):
        return Checkpointing.FULL
    if folded.startswith(("none", "false", "unknown")):
        return Checkpointing.NONE
    return None


def _attention(text: str, framework: str, model: ModelSpec) -> Attention | None:
    folded = text.lower()
    if framework == "ms-swift-1.5":
        for start, kind in SWIFT_2023_OTHERWISE.items():
            if model.name.startswith(start):
                return kind
    if "flash" in folded:
        return Attention.FLASH
    if "sdpa" in folded:
        return Attention.SDPA
    return Attention.EAGER if "eager" in folded else None


def _loss(row: Row) -> Loss | None:
    kernels = row["kernels"].lower()
    if "liger" in kernels or "chunked" in kernels:
        return Loss.CHUNKED
    return None


def _sharding(row: Row) -> Sharding:
    text, gpus = row["parallelism"].lower(), row.integer("n_gpus") or 1
    if text.startswith("listed as") and row["method"] == "full":
        raise NotCovered("the row does not say over how many GPUs the state was divided")
    if "single-gpu" in text or text.startswith("listed as"):
        return Sharding.NONE
    if titan_layout(row):
        return Sharding.FSDP2
    if gpus > 1 and re.search(r"\bpp \d|pipeline|expert", text):
        raise NotCovered("pipeline and expert parallel training are not modelled")
    if "device_map split" in text or "pipeline-sequential" in text:
        return Sharding.NONE  # planned stage by stage
    if "device_map" in text:
        raise NotCovered("layers split over GPUs by device_map are not modelled")
    if "fsdp" in text:
        second = "torchtitan" in row["framework"].lower()  # fully_shard since its first release
        return Sharding.FSDP2 if second else Sharding.FSDP
    stage = re.search(r"zero-?([123])", text)
    if stage:
        if "offload" in text or row["cpu_offload"].lower() in {"yes", "cpu", "disk"}:
            raise NotCovered("parameters or optimizer offloaded by the sharding engine")
        return Sharding(f"zero{stage[1]}")
    if gpus > 1 and "single" not in text:
        return Sharding.DDP
    return Sharding.NONE


def _in_float8(row: Row) -> dict[str, Any]:
    text = row["kernels"].lower()
    if "float8" not in text:
        return {}
    return {
        "float8": "rowwise" if "rowwise" in text else "tensorwise",
        "float8_all_gather": "float8 all-gather" in text,
    }


def _flag(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())
