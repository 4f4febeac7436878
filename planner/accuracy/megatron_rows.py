"""Megatron-LM's own test cases (exact bytes of the last rank) -> the run their arguments describe."""

import json
import re
from typing import Any

from planner.accuracy.names import machine_named
from planner.accuracy.parallel_columns import degree
from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rows import Row
from planner.families.megatron import Settings, bert_model, gpt_model
from planner.plan import Plan, plans_of_ranks
from planner.run.recipe import Recipe, Task
from planner.run.resolve import resolve

SOURCE = "megatron-lm-golden"
UNSTATED = (
    "fp8-format",
    "use-megatron-fsdp",
    "fine-grained-activation-offloading",
    "recompute-modules",
    "perform-rl-step",
    "defer-embedding-wgrad-compute",
)
"""Arguments that the plan does not know; a row with one is not scored."""
BY_0_18 = frozenset(
    {
        "gpt3_7b_tp1_pp4_memory_speed",
        "gpt3_mcore_te_tp1_pp4_vp1",
        "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic",
    }
)
"""Golden values as of 2026-05-29 (commit 6e091e1b), of the code that became 0.18: `git log` of their files.

The others' values are older, or of ranks that read no batches.
"""


def is_megatron(row: Row) -> bool:
    """Return whether the row is one of Megatron-LM's golden values."""
    return row["source_family"] == SOURCE


def predict_megatron(row: Row) -> Prediction:
    """Return what the plan of the last rank says about the row's figure."""
    settings = settings_of(row)
    gpus = row.integer("n_gpus")
    if gpus is None:
        raise NotCovered("the row does not say how many GPUs ran")
    build = bert_model if row["model"].startswith("bert") else gpt_model
    positions = int(settings.get("max-position-embeddings", row.integer("seq_len") or 0))
    model = build(row["model"], settings, positions)
    machine = machine_named(row["gpu"], gpus)
    resolved = resolve(model, recipe_of(row, settings), machine)
    last = plans_of_ranks(model, resolved, machine)[-1]
    if row.quantity == "allocated_after_step":
        value = standing_bytes(last)
        return Prediction("static_allocated", value, *last.interval("static", value), last)
    value = last.allocated_peak_bytes
    return Prediction("peak_allocated", value, *last.interval("allocated", value), last)


def settings_of(row: Row) -> Settings:
    """Return the arguments that the row's notes quote; raises NotCovered where they are missing or unknown."""
    found = re.search(r"architecture and settings: (\{.*?\});", row["notes"])
    if found is None:
        raise NotCovered("the row does not state the model's arguments")
    settings: Settings = json.loads(found[1])
    for key in UNSTATED:
        if settings.get(key):
            raise NotCovered(f"Megatron-LM's {key} is not planned")
    if not row["model"].startswith(("gpt", "bert")):
        raise NotCovered(f"the model {row['model'][:40]!r} is no decoder that the planner builds")
    if row["model"].startswith("gpt_grpo"):
        raise NotCovered("a test of RL: an inference engine's buffers are beside the training")
    if "muon" in row["optimizer"]:
        raise NotCovered("Megatron-LM's Muon is not planned")
    return settings


def recipe_of(row: Row, settings: Settings) -> Recipe:
    """Return the recipe of a test case."""
    text = row["parallelism"]
    tensor, pipeline = degree(row, "TP"), degree(row, "PP")
    parallel: dict[str, Any] = {
        "tensor": tensor,
        "sequence": "+ SP" in text and tensor > 1,
        "pipeline": pipeline,
        "context": degree(row, "CP"),
        "expert": degree(row, "EP"),
    }
    if settings.get("num-experts"):
        parallel["expert_tensor"] = int(settings.get("expert-tensor-parallel-size", tensor))
    if copies := int(settings.get("num-distributed-optimizer-instances", 0)):
        parallel["data_replicate"] = copies
    each = int(settings.get("num-layers-per-virtual-pipeline-stage", 0))
    if each:
        parallel["virtual_stages"] = int(settings["num-layers"]) // pipeline // each
    return Recipe.model_validate(
        {
            "task": Task.SFT,
            "method": "full",
            "framework": _law(settings) + ("==0.18" if row["model"] in BY_0_18 else ""),
            "dtype": "bf16",
            "micro_batch_size": row.integer("micro_batch") or 1,
            "gradient_accumulation": row.integer("grad_accum") or 1,
            "context": row.integer("seq_len"),
            "attention": _attention(row, settings),
            "sharding": "megatron" if "distributed optimizer" in text else "ddp",
            "parallel": parallel,
        }
    )


def _law(settings: Settings) -> str:
    """Return the law of the test case's kernels."""
    if not settings.get("no-gradient-accumulation-fusion"):
        return "megatron"
    if "local" in (settings.get("transformer-impl"), settings.get("spec")):
        return "megatron-local"
    if settings.get("cross-entropy-loss-fusion"):
        return "megatron-fused-loss"
    if settings.get("num-experts") and not settings.get("moe-grouped-gemm"):
        return "megatron-sequential-experts"
    if settings.get("overlap-moe-expert-parallel-comm"):
        return "megatron-overlapped-experts"
    alltoall = settings.get("moe-token-dispatcher-type") == "alltoall"
    return "megatron-alltoall" if alltoall else "megatron-separate-wgrad"


def _attention(row: Row, settings: Settings) -> str:
    """Return flash for a fused kernel; without Transformer Engine there is none."""
    whole = row["attn"] in ("unfused", "local") or settings.get("transformer-impl") == "local"
    return "eager" if whole else "flash"


def standing_bytes(result: Plan) -> int:
    """Return what is there between two steps: all of the step's phase but its temporaries."""
    step = result.phase("step")
    return sum(term.bytes for term in step.terms)
