"""Generation rows of LitGPT and transformers: weights, a cache, one dequantised weight."""

import re
from dataclasses import replace

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rows import Row
from planner.accuracy.sft_recipe import quantization_of
from planner.accuracy.stages import is_split, stage_models
from planner.accuracy.variants import litgpt_model
from planner.model import ModelSpec
from planner.recipe import EngineKind, EngineSection, Recipe, Task
from planner.resolve import Resolved, resolve
from planner.terms.counts import base_weights
from planner.terms.kv_cache import sequence_bytes
from planner.terms.overhead import blas_workspace_bytes

DEFAULT_TOKENS = 300
"""A prompt line and the scripts' default of 50 to 256 new tokens: the cache is small."""
DEQUANTISED_BYTES = 4
"""bitsandbytes dequantises a weight quantised from fp32 to fp32 before its matmul."""
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32"}


def predict_inference(row: Row) -> Prediction:
    """Return the peak of generating one sequence, in bytes on one GPU."""
    if "10x" in row["method"] or "device_map=auto" in row["method"]:
        raise NotCovered("the row does not state the prompt length or the placement")
    if row["n_gpus"] not in {"", "1"} and not row["parallelism"]:
        raise NotCovered("the row does not say how the model is divided")
    model = model_named(row["model"])
    litgpt = "litgpt" in row["framework"].lower()
    if litgpt:
        model = litgpt_model(model)
    if "peak_allocated" not in row.quantity:
        raise NotCovered(f"the figure {row.quantity[:50]!r} is not one that the planner states")
    parts = stage_models(row, model) if is_split(row) else (model,)
    framework = "litgpt" if litgpt else "hf-trainer"
    value = max(_peak(row, piece, framework) for piece in parts)
    return around("peak_allocated", value, 0.95, 1.08)


def _peak(row: Row, model: ModelSpec, framework: str) -> int:
    resolved = _resolved(row, model, framework)
    ranks = (row.integer("n_gpus") or 1) if "tensor" in row["parallelism"] else 1
    value = _weights(model, resolved, ranks) + _work(row, model, resolved)
    value += blas_workspace_bytes(machine_named(row["gpu"]).gpu)
    return value + sequence_bytes(model, _tokens(row)) // ranks


def _resolved(row: Row, model: ModelSpec, framework: str) -> Resolved:
    recipe = Recipe(
        task=Task.SERVE,
        framework=framework,
        dtype=_DTYPES.get(row["weights_dtype"], "bf16"),
        quantization=quantization_of(row["base_quant"]) or "none",
        double_quant=row["base_quant"].endswith("-dq"),
        engine=EngineSection(kind=EngineKind.TRANSFORMERS),
    )
    return resolve(model, recipe, machine_named(row["gpu"]))


def _weights(model: ModelSpec, resolved: Resolved, ranks: int) -> int:
    """Return this rank's weights: layers are divided, embeddings and head are not."""
    total = base_weights(model, resolved).total
    if ranks == 1:
        return total
    bare = replace(model, layers=(), layer_order=())
    outside = base_weights(bare, resolved).total
    return outside + (total - outside) // ranks


def _work(row: Row, model: ModelSpec, resolved: Resolved) -> int:
    base = base_weights(model, resolved)
    if base.quantized:
        return DEQUANTISED_BYTES * base.largest_quantized
    if "mixed" in row["mixed_precision"]:
        return 2 * model.parameters  # autocast's 16-bit copies live as long as its context
    return 4 * model.vocab


def _tokens(row: Row) -> int:
    found = re.search(r"max_new_tokens (\d+)|(\d+) new tokens", f"{row['notes']} {row['method']}")
    return int(found[1] or found[2]) + 50 if found else DEFAULT_TOKENS
