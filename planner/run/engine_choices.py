"""The engine's settings of a recipe: what was asked for, else what the framework's engine does."""

from typing import Any

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.run.framework_files import Framework
from planner.run.recipe import EngineKind, Method, Recipe, Task
from planner.run.tasks import TASKS
from planner.units import GiB

DEFAULT_LORA_RANK = 16
"""vLLM's max_lora_rank."""


def choose(value: Any, defaults: dict[str, Any], key: str, fallback: Any) -> Any:
    """Return what was asked for, else the framework's default, else a fallback."""
    return value if value is not None else defaults.get(key, fallback)


def engine_kind(recipe: Recipe, defaults: dict[str, Any]) -> EngineKind:
    """Return the engine that generates."""
    if recipe.engine.kind is not None:
        return recipe.engine.kind
    if recipe.task is Task.SERVE:
        return EngineKind.VLLM_SERVER
    generates = TASKS[recipe.task].generates
    return EngineKind(defaults.get("engine", "none")) if generates else EngineKind.NONE


INSIDE = (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH)
"""vLLM in the trainer's own process."""


def usual_sleep(kind: EngineKind | None, method: Method) -> int:
    """Return the level at which vLLM keeps between rollouts just what it needs.

    Adapters alone are pushed, so a copy of the base must outlive the sleep (1); all weights come anew (2).
    """
    return 2 if kind is EngineKind.VLLM_PUSH and method is Method.FULL else 1


def four_bit_refusal(kind: EngineKind | None, method: Method) -> str:
    """Return why vLLM inside our trainer refuses a 4-bit policy, or nothing."""
    if method is not Method.QLORA or kind not in INSIDE:
        return ""
    return (
        f"recipe.engine.kind: {kind} cannot generate with a 4-bit policy: vLLM (0.31 to 0.33) has no "
        "bitsandbytes layers, so it would serve other weights than are trained"
    )


def engine_fields(
    model: ModelSpec,
    machine: Machine,
    recipe: Recipe,
    framework: Framework,
    dtype: str,
    engine: EngineKind,
    *,
    most: int,
    max_len: int,
) -> dict[str, Any]:
    """Return the engine's settings; `most` sequences are generated at once when nothing is said."""
    section, serves, law = recipe.engine, recipe.task is Task.SERVE, framework.engine
    defaults = framework.task_defaults(recipe.task.value)
    wide = dtype == "fp32" and engine is EngineKind.TRANSFORMERS
    tokens = sequences = 0
    if serves:
        tokens, sequences = law.batch(
            vram_bytes=machine.vram_bytes,
            name=machine.gpu.name if machine.gpu else "",
            offline=section.offline,
            max_len=max_len,
            multimodal=bool(model.towers),
            latent=any(layer.mixer.kv_lora_rank for layer in model.layers),
        )
    fallbacks = {
        "max_num_seqs": 0 if law.sequences_by_room else sequences if serves else most,
        "max_num_batched_tokens": tokens if serves else 8192,
        "sleep_level": 0,
    }
    chosen = {
        key: choose(getattr(section, key), defaults, key, value) for key, value in fallbacks.items()
    }
    if section.cpu_offload_gib and not serves:
        raise UsageError(
            f"engine.cpu_offload_gib: {section.cpu_offload_gib:g} has no effect with task {recipe.task}",
            hint="only serve has it",
        )
    switches = framework.switches_of(recipe.task.value)
    if switches.drops_renewed_weights and section.sleep_level is None and chosen["sleep_level"]:
        chosen["sleep_level"] = usual_sleep(engine, recipe.method)
    return {
        **chosen,
        "kv_dtype": section.kv_dtype or ("fp32" if wide else "bf16"),
        "kv_bytes": section.kv_bytes or 0,
        "utilization": choose(
            section.gpu_memory_utilization,
            defaults,
            "gpu_memory_utilization",
            law.utilization if serves else 0.0,
        ),
        "block_size": section.block_size,
        "cuda_graphs": bool(choose(section.cuda_graphs, defaults, "cuda_graphs", True)),
        "tensor_parallel": section.tensor_parallel,
        "pipeline_parallel": section.pipeline_parallel,
        "data_parallel": section.data_parallel,
        "sync": section.sync or switches.sync_unit,
        "transfer": section.transfer,
        "folds_adapters": folds(recipe, engine),
        "expert_parallel": section.expert_parallel,
        "prefix_caching": law.prefix_caching
        if section.prefix_caching is None
        else section.prefix_caching,
        "engine_offload_bytes": int(section.cpu_offload_gib * GiB),
        **_adapter_slots(recipe, engine),
    }


def merges(recipe: Recipe, engine: EngineKind) -> str:
    """Return why vLLM gets merged weights instead of an adapter ("" = it serves the adapter)."""
    lora = recipe.lora
    if recipe.method is Method.FULL:
        return ""
    if lora.dora:
        return "DoRA rescales the base's weights"
    if lora.modules_to_save:
        return "modules_to_save trains whole modules"
    if lora.init.startswith("pissa"):
        return "PiSSA changed the base's weights"
    if lora.bias != "none" and engine is not EngineKind.VLLM_SHARED:
        return "the base's biases are trained"  # vllm-shared trains vLLM's own
    return ""


def folds(recipe: Recipe, engine: EngineKind) -> bool:
    """Return whether adapters go to the engine inside whole weights: what it cannot serve beside its base, and all
    that our trainer sends a server from GPU to GPU. A 4-bit base has none to fold into."""
    sent = engine is EngineKind.VLLM_SERVER and recipe.engine.transfer != "folder"
    return recipe.method is Method.LORA and (sent or bool(merges(recipe, engine)))


def _adapter_slots(recipe: Recipe, engine: EngineKind) -> dict[str, int]:
    """Return an engine's adapter slots: as asked for, else one for the policy that is trained."""
    section = recipe.engine
    serves = recipe.task is Task.SERVE
    policy = not serves and recipe.method is not Method.FULL and not merges(recipe, engine)
    rank = section.max_lora_rank or (recipe.lora.rank if policy else 0)
    slots = section.max_loras or int(bool(rank))
    return {"max_loras": slots, "max_lora_rank": rank or (DEFAULT_LORA_RANK if slots else 0)}
