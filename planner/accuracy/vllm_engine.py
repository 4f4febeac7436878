"""A vLLM log's columns -> the run it describes: model, recipe and machine, from its arguments alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.machines.machine import Machine, make_machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import EngineSection, Recipe, Task
from planner.units import GiB

_SCHEMES = (
    (r"q8_0", "gguf-q8_0"),
    (r"q4_k_m", "gguf-q4_k_m"),
    (r"q4_0", "gguf-q4_0"),
    (r"nvfp4", "nvfp4"),
    (r"mxfp4|gpt-oss", "mxfp4"),
    (r"gptq|auto_round|autoround|int4|kimi-k2-think", "gptq-4bit"),
    (r"awq", "awq-4bit"),
    (r"bitsandbytes|bnb|nf4|4.?bit", "nf4"),
    (r"fp8", "fp8"),
)
_EXPERTS_ONLY: dict[str, object] = {
    "modules_to_not_convert": [
        "self_attn",
        "shared_expert",
        "router",
        "feed_forward.gate_proj",
        "feed_forward.up_proj",
        "feed_forward.down_proj",
    ]
}
_LISTS: tuple[tuple[str, Mapping[str, object]], ...] = (
    # Meta's FP8 files: routed experts only; attention, shared experts and dense layers stay bf16
    # (the same list as fp_layers of intel/auto-round's run_llama4_quant.sh)
    (r"llama-4-.*fp8", _EXPERTS_ONLY),
)
_UNSEEN_LISTS = r"unsloth|qwen3\.5-.*gptq|autoround|nvfp4"
"""Checkpoints that leave modules in 16 bits by a list that the row does not say."""
_UNNAMED = r"not named|class|^\(|AMD|WSL|size not"
_RELEASES = (
    ("2024-03", "0.3"),
    ("2024-12", "0.6.4"),
    ("2025-01", "0.6.6"),
    ("2025-02", "0.7"),
    ("2025-03-15", "0.7.3"),
    ("2025-05", "0.8"),
)
"""Release current at the end of a month: what a development build of that time is planned as."""
SPARE_VRAM_BYTES = 80 * GiB
"""A card for figures that no card moves (weights, host blocks)."""


ARGUMENTS = "arguments (see the row's notes)"
RANK = "which rank's figure it is"
DEGREES = "how many GPUs are tensor ranks and how many stages"
SKIP_LIST = "the checkpoint's list of 16-bit modules"
ENCODER = "the encoder's profile"
"""Names of what a row may leave open."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a row says about its engine, and what it leaves open."""

    model: ModelSpec
    recipe: Recipe
    machine: Machine | None
    """None: the row names no card."""
    open: tuple[str, ...]
    """Choices that the row does not state and no default of a known version settles."""
    others: tuple[Recipe, ...]
    """The same run with open choices made otherwise."""

    def planned(self, *, card: bool = True) -> Plan:
        """Return the plan; with `card`, raise NotCovered when none is named."""
        if card and self.machine is None:
            raise NotCovered("the log names neither a card nor its memory")
        return plan(self.model, self.recipe, self.machine or _spare(self.recipe))

    def alternatives(self) -> list[Plan]:
        """Return the plans of the other ways the open choices may have been made."""
        return [plan(self.model, recipe, self.machine or _spare(recipe)) for recipe in self.others]


def _spare(recipe: Recipe) -> Machine:
    engine = recipe.engine
    return make_machine(
        vram=SPARE_VRAM_BYTES, gpus=engine.tensor_parallel * engine.pipeline_parallel
    )


def run_of(row: Row) -> Run:
    """Return the run of a log row (vllm.csv, or an engine's row of rl.csv)."""
    text, left = row["model"], []
    if "offload" in row["notes"]:
        raise NotCovered("weights are offloaded to the host by cpu_offload_gb")
    if re.search(r"\bdcp\b|decode.context", f"{text} {row['notes']}".lower()):
        raise NotCovered("decode context parallelism divides the cache by another rule")
    origin = f"{text} {row['source']} {row['framework']} {row['source_title']}".lower()
    unsloth = "unsloth" in origin
    scheme = _scheme(row, text)
    model = _checkpoint(model_named(text), row, text, scheme)
    if re.search(r"EAGLE|MTP|spec", f"{text} {row['notes']}"):
        left.append("a draft model")
    if model.towers:
        left.append(ENCODER)
    if re.search(r"unknown|leak", row["notes"]):
        left.append(ARGUMENTS)
    if re.search(r"split not in", row["notes"]):
        left.append(DEGREES)
    if re.search(r"one worker|one rank", row["notes"]):
        left.append(RANK)
    if scheme not in ("", "fp8") and re.search(_UNSEEN_LISTS, origin):
        left.append(SKIP_LIST)
    version = _version(row)
    if not version and not unsloth:
        left.append("version")
    elif version and [int(part) for part in version.split(".")[:2]] < [0, 5]:
        left.append("a law of that release")
    framework = _framework(row, version, unsloth=unsloth)
    utilisation = row.number("gpu_memory_utilization") or row.number("vllm_gpu_mem_util")
    if utilisation is None and row["util_is_default"] != "yes":
        left.append("utilisation")
    length = row.integer("max_model_len") or row.integer("seq_len")
    if "max_model_len default" in row["notes"]:
        length = model.max_position
    if length is None:
        left.append("length")
    if length is None and not model.max_position:
        raise NotCovered("the log states no length and the model has none")
    slots = _adapter_slots(row)
    if slots and "max_lora_rank" not in slots:
        left.append("adapter rank")
    section: dict[str, Any] = {
        "tensor_parallel": row.integer("tp") or 1,
        "pipeline_parallel": _stages(row),
        "expert_parallel": row["expert_parallel"] == "True",
        "gpu_memory_utilization": utilisation,
        "max_num_seqs": row.integer("max_num_seqs"),
        "max_num_batched_tokens": row.integer("max_num_batched_tokens")
        or (length if unsloth else None),
        "block_size": row.integer("block_size") or 16,
        "kv_dtype": "fp8" if row["kv_cache_dtype"].startswith("fp8") else None,
        "cuda_graphs": row["enforce_eager"] != "True",
        **slots,
    }
    recipe = Recipe(
        task=Task.SERVE,
        framework=framework,
        quantization=scheme or "none",
        dtype="fp16" if "fp16" in row["dtype"] or "T4" in row["gpu"] else "bf16",
        context=length or model.max_position,
        engine=EngineSection(**{key: value for key, value in section.items() if value is not None}),
    )
    if model.longest and recipe.context and recipe.context > model.longest:
        # the log ran: its command scaled the positions (--hf-overrides, --rope-scaling)
        model = replace(model, rope_scaled_position=recipe.context)
    return Run(model, recipe, _machine(row), tuple(left), _others(row, recipe, left))


def _stages(row: Row) -> int:
    """Return the pipeline's stages: one where the release took the flag and could not do it."""
    return 1 if "PP was unsupported" in row["notes"] else row.integer("pp") or 1


def _checkpoint(model: ModelSpec, row: Row, text: str, scheme: str) -> ModelSpec:
    """Return the model as it was published: quantised, unless vLLM quantised it while loading."""
    if not scheme or "online" in row["quantization"] or "--quantization" in text:
        return model
    lists = next((known for name, known in _LISTS if re.search(name, text.lower())), {})
    if "gguf" in row["quantization"]:
        return model  # a file of its own kind, without a quantization_config: all linears alike
    if model.checkpoint_quantization and not lists:
        return model
    return replace(
        model,
        checkpoint_quantization=scheme,
        quantization_config=dict(lists or model.quantization_config),
    )


def _version(row: Row) -> str:
    """Return the release, "" when the row does not say."""
    text = row["vllm_version"]
    dated = re.search(r"dev (\d{4}-\d{2}-\d{2})", text)
    if "before 0.6.5" in text or "PR #10511" in row["source_title"]:
        return "0.6.4"
    if dated and not re.match(r"0\.", text):
        return next((version for until, version in _RELEASES if dated[1] < until), "0.8")
    found = re.search(r"(\d+\.\d+)(\.\d+)?", text)
    if found:
        return found[1] + (found[2] or "")
    return ""


def _framework(row: Row, version: str, *, unsloth: bool) -> str:
    """Return the name of the law: the V0 engine of 0.8 to 0.10 and Unsloth's have their own."""
    if unsloth and (not version or row["engine"] == "V0"):
        return "vllm-unsloth"
    if not version:
        return "vllm-0.12" if row["engine"] != "V0" else "vllm-0.7"
    minor = [int(part) for part in version.split(".")[:2]]
    if row["engine"] == "V0" and [0, 8] <= minor < [0, 11]:
        return "vllm-0.8-v0"
    if row["engine"] == "V1" and minor < [0, 8]:
        return "vllm-0.8"
    return f"vllm~{version}"


_LAWS_TRIED = ("vllm-0.8", "vllm-0.10", "vllm-0.17", "vllm-0.21", "vllm")


def _others(row: Row, recipe: Recipe, left: list[str]) -> tuple[Recipe, ...]:
    """Return the same run with what the row leaves open chosen otherwise."""

    def engine(**changes: Any) -> Recipe:
        return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})

    found = []
    if recipe.engine.max_num_batched_tokens is None:
        found.append(engine(offline=True))
    if "version" in left and row["engine"] != "V0":
        found += [recipe.model_copy(update={"framework": name}) for name in _LAWS_TRIED]
    if "adapter rank" in left:
        found += [engine(max_lora_rank=rank) for rank in (8, 64)]
    if "utilisation" in left:
        found += [engine(gpu_memory_utilization=share) for share in (0.8, 0.95)]
    if RANK in left:
        found.append(engine(max_num_seqs=1))  # ranks but the first do not sample
    if ARGUMENTS in left:
        found.append(engine(max_num_seqs=2048))
    return tuple(found)


def _machine(row: Row) -> Machine | None:
    total, ranks = row.number("total_gpu_memory_gib"), (row.integer("tp") or 1) * _stages(row)
    named = bool(row["gpu"]) and not re.search(_UNNAMED, row["gpu"])
    try:
        return (
            machine_named(row["gpu"] if named else "", ranks, total or 0.0)
            if total or named
            else None
        )
    except NotCovered:
        return None


def _scheme(row: Row, text: str) -> str:
    words = f"{row['quantization']} {row['dtype']} {text}".lower()
    return next((scheme for pattern, scheme in _SCHEMES if re.search(pattern, words)), "")


def _adapter_slots(row: Row) -> dict[str, Any]:
    stated = re.search(r"max_lora_rank=(\d+)", row["notes"])
    if stated:
        return {"max_loras": 1, "max_lora_rank": int(stated[1])}
    return {"max_loras": 1} if row["lora_enabled"] == "True" else {}
