"""Generation rows of LitGPT and transformers -> models (parts of one) and the recipe of a plan."""

import re

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.accuracy.sft_recipe import quantization_of
from planner.accuracy.stages import is_split, stage_models
from planner.accuracy.variants import litgpt_model
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.run.recipe import EngineKind, EngineSection, Recipe, Task

PROMPT_TOKENS = 50
"""The scripts' own prompt line."""
DEFAULT_NEW_TOKENS = 250
"""The scripts' default of new tokens is 50 to 256: the cache is small beside the weights."""
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32"}


def generation_run(row: Row) -> tuple[tuple[ModelSpec, ...], Recipe, Machine]:
    """Return the model (its parts where layers are split), recipe and machine of a generation row."""
    if "10x" in row["method"] or "device_map=auto" in row["method"]:
        raise NotCovered("the row does not state the prompt length or the placement")
    if row["n_gpus"] not in {"", "1"} and not row["parallelism"]:
        raise NotCovered("the row does not say how the model is divided")
    if "tensor" in row["parallelism"]:
        raise NotCovered("tensor-parallel generation outside vLLM is not modelled")
    model = model_named(row["model"])
    litgpt = "litgpt" in row["framework"].lower()
    if litgpt:
        model = litgpt_model(model)
    models = stage_models(row, model) if is_split(row) else (model,)
    recipe = Recipe(
        task=Task.SERVE,
        framework="litgpt" if litgpt else "hf-trainer",
        dtype=_DTYPES.get(row["weights_dtype"], "bf16"),
        mixed_precision="bf16" if "mixed" in row["mixed_precision"] else "none",
        quantization=quantization_of(row["base_quant"]) or "none",
        double_quant=row["base_quant"].endswith("-dq"),
        context=_tokens(row),
        engine=EngineSection(kind=EngineKind.TRANSFORMERS),
    )
    return models, recipe, machine_named(row["gpu"])


def _tokens(row: Row) -> int:
    found = re.search(r"max_new_tokens (\d+)|(\d+) new tokens", f"{row['notes']} {row['method']}")
    new = int(found[1] or found[2]) if found else DEFAULT_NEW_TOKENS
    return PROMPT_TOKENS + new
