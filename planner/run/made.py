"""The recipe of a run with every choice written down, in the words of run.yaml."""

from typing import Any

from planner.run.recipe import VLLM, EngineKind, Method, Recipe, Task
from planner.run.resolved import Resolved


def made(asked: Recipe, r: Resolved) -> dict[str, Any]:
    """Return `asked` with what the framework's defaults filled in; as a recipe, it is the same run."""
    document: dict[str, Any] = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
    document |= {
        "task": r.task.value,
        "algorithm": r.algorithm,
        "method": r.method.value,
        "framework": r.framework_asked,
        "dtype": r.dtype,
        "quantization": r.quantization or "none",
        "micro_batch_size": r.batch,
        "attention": r.attention.value,
        **_lengths(r),
    }
    if r.trains:
        document |= _training(asked, r)
    if r.engine is not EngineKind.NONE:
        document["engine"] |= _engine(r)
    return document


def _lengths(r: Resolved) -> dict[str, Any]:
    prompt, completion = r.prompt_tokens, r.completion_tokens
    known = {"prompt_length": prompt, "completion_length": completion}
    if r.task is Task.EMBED:  # a query and a document, each a text of its own
        return {}
    if r.task is Task.SERVE:  # what a request has is as it was asked
        return {"context": r.seq_tokens}
    both = {"context": r.seq_tokens} if prompt or completion else {}
    return both | {name: size for name, size in known.items() if size}


def _training(asked: Recipe, r: Resolved) -> dict[str, Any]:
    found: dict[str, Any] = {
        "mixed_precision": r.autocast or "none",
        "master_weights": r.master_weights,
        "gradient_dtype": r.gradient_dtype,
        "optimizer": r.optimizer.value,
        "checkpointing": r.checkpointing.value,
        "loss": r.loss.value,
        "tiled_mlp": r.tiled_mlp,
        "router_loss": r.router_loss,
        "packing": r.packing,
        "num_generations": r.num_generations,
        "beta": r.beta,
        "reference": r.reference.value,
        "accumulate_sync": r.accumulate_sync,
        "parallel": asked.parallel.model_dump(mode="json", exclude_none=True)
        | {"data_shard": r.layout.data_shard, "data_replicate": r.layout.data_replicate},
    }
    if r.quantization in ("nf4", "fp4"):
        found["double_quant"] = r.double_quant
    if r.method is not Method.FULL:
        lora = asked.lora.model_dump(mode="json", by_alias=True, exclude_none=True)
        found["lora"] = lora | {"rank": r.lora_rank, "dtype": r.adapter_dtype}
    return found


def _engine(r: Resolved) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": r.engine.value, "kv_dtype": r.kv_dtype}
    if r.max_num_seqs:
        found["max_num_seqs"] = r.max_num_seqs
    if r.engine in VLLM:
        found |= {
            "max_num_batched_tokens": r.max_num_batched_tokens,
            "sleep_level": r.sleep_level,
            "cuda_graphs": r.cuda_graphs,
        }
        if r.utilization:
            found["gpu_memory_utilization"] = r.utilization
    return found
