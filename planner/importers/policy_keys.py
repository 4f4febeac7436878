"""Reinforcement learning by key names: one table of a tool's own keys -> a run, for tools built alike.

A trained policy, perhaps a critic, reference and judge, and an engine that shares the GPUs or has its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from planner.datafiles import data_dir
from planner.importers import words
from planner.importers.keys import MOVES, SETTLED
from planner.importers.launch import finish_sharding, set_degrees
from planner.importers.names import quantization_in_name
from planner.importers.settings import Imported, Settings, as_int, as_names
from planner.run.recipe import EngineKind, Loss, Method, Reference, Sharding, Task

Names = tuple[str, ...]


@lru_cache(maxsize=1)
def _quiet() -> dict[str, list[str]]:
    path = data_dir() / "importers" / "quiet_prefixes.json"
    tools: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))["tools"]
    return tools


def quiet_prefixes(tool: str) -> Names:
    """Return how those of a tool's keys begin that move no byte of the GPU's memory."""
    return tuple(_quiet()[tool])


@dataclass(frozen=True, kw_only=True)
class PolicyKeys:
    """What one tool calls each thing, and its defaults; an empty tuple: the tool has no such key."""

    law: str
    model: Names
    critic: Names = ()
    judge: Names = ()
    rank: Names = ()
    targets: Names = ()
    dropout: Names = ()
    dtype: Names = ()
    dtype_default: str = "bf16"
    micro: Names = ()
    micro_default: int = 1
    token_budget: Names = ()
    """Tokens of a micro-batch, instead of sequences."""
    prompt: Names = ()
    prompt_default: int = 512
    whole: Names = ()
    """Prompt and completion together."""
    completion: Names = ()
    completion_default: int = 512
    generations: Names = ()
    generations_default: int = 1
    checkpointing: Names = ()
    checkpointing_default: bool = False
    no_checkpointing: Names = ()
    recompute: Names = ()
    """Megatron's recompute_granularity: full, selective."""
    scoring: Names = ()
    """Rows of a pass that only scores."""
    beside: Names = ()
    """Sections of a reference, whose layout is planned as the policy's."""
    optimizer: Names = ()
    optimizer_offload: Names = ()
    parameter_offload: Names = ()
    attention: Names = ()
    utilization: Names = ()
    utilization_default: float = 0.9
    engine_tensor: Names = ()
    engine_tensor_default: int = 1
    max_num_seqs: Names = ()
    batched_tokens: Names = ()
    eager: Names = ()
    degrees: Mapping[str, Names] = field(default_factory=dict)
    """Of recipe.parallel: tensor, sequence, pipeline, virtual_stages, context, expert, expert_tensor."""
    context_kind: str = "ring"
    quiet: Names = ()
    """Prefixes of keys that move no byte of the GPU's memory."""


@dataclass(kw_only=True)
class Policy:
    """What the tool's own code has settled before the table is read."""

    sharding: Sharding = Sharding.FSDP
    gpus: int | None = None
    colocated: bool = True
    sleeps: bool = True
    reference: bool = False
    beta: float | None = None
    critic: bool = False
    reward_model: str | None = None
    algorithm: str | None = None
    mixed_precision: str = "bf16"
    master_weights: bool | None = None
    engine: bool = True
    loss: Loss = Loss.FULL
    reference_offloaded: bool = False
    offloaded: bool = False
    """The policy lies in host memory while the engine generates."""


def read_policy(settings: Settings, keys: PolicyKeys, policy: Policy) -> Imported:
    """Return the run of a policy's settings."""
    task = Task.PPO if policy.critic else Task.GRPO
    recipe: dict[str, Any] = {"framework": keys.law, "task": task, "loss": policy.loss}
    if policy.algorithm and task is Task.GRPO:
        recipe["algorithm"] = policy.algorithm
    model = str(settings.raw(*keys.model, to="model", default=""))
    lora = read_lora(settings, keys)
    method = Method.LORA if lora else Method.FULL
    recipe["method"] = method
    recipe["dtype"] = words.dtype(settings.raw(*keys.dtype)) or keys.dtype_default
    recipe["mixed_precision"] = policy.mixed_precision
    if policy.master_weights is not None and method is Method.FULL:
        recipe["master_weights"] = policy.master_weights
    lengths(settings, recipe, keys)
    _micro_batch(settings, recipe, keys)
    if task is Task.GRPO:
        recipe["num_generations"] = settings.count(
            *keys.generations, to="num_generations", default=keys.generations_default
        )
    else:
        settings.raw(*keys.generations)
    compute(settings, recipe, keys)
    recipe["sharding"] = policy.sharding
    if policy.offloaded:
        recipe["optimizer_offload"], recipe["offload"] = True, {"parameters": True}
        settings.effect(
            "the policy is in host memory while the engine generates, not during its update"
        )
    if policy.beta is not None:
        recipe["beta"] = policy.beta
    recipe["reference"] = words.reference(method, needed=policy.reference or task is Task.PPO)
    if policy.reference_offloaded and recipe["reference"] is Reference.SEPARATE:
        recipe["reference"] = Reference.OFFLOADED
    if task is Task.PPO:
        critic = settings.raw(*keys.critic, to="value_model")
        recipe["value_model"] = str(critic) if critic and str(critic) != model else None
        recipe["reward_model"] = policy.reward_model or "none"
    elif policy.reward_model:
        settings.effect(
            f"the reward model {policy.reward_model} scores on GPUs of the run: it is not planned"
        )
    engine = read_engine(settings, keys, policy, method) if policy.engine else {}
    gpus = _degrees(settings, recipe, keys, policy)
    _scoring(settings, recipe, keys)
    _beside(settings, keys)
    settings.quiet(*keys.quiet)
    return settings.finish(model, recipe=recipe, lora=lora, engine=engine, gpus=gpus)


def _scoring(settings: Settings, recipe: dict[str, Any], keys: PolicyKeys) -> None:
    """Say how many rows a scoring pass has where they are not the update's."""
    rows = as_int(settings.raw(*keys.scoring)) if keys.scoring else None
    if rows and rows != recipe["micro_batch_size"]:
        settings.effect(
            f"passes that only score have {rows} rows: planned with the update's {recipe['micro_batch_size']}"
        )


def _beside(settings: Settings, keys: PolicyKeys) -> None:
    """Say which settings of a reference are not its own in the plan."""
    named = [
        key
        for key in settings.values
        if keys.beside
        and key.startswith(keys.beside)
        and key not in settings.used
        and MOVES.search(key.removeprefix(keys.beside[0]))
        and not SETTLED.search(key)
    ]
    if named:
        settings.used.update(named)
        settings.effect(
            f"the reference's own layout is planned as the policy's: {', '.join(named[:6])}"
            + (f" and {len(named) - 6} more" if len(named) > 6 else "")
        )


def read_lora(settings: Settings, keys: PolicyKeys) -> dict[str, Any]:
    """Return the adapters' settings, {} for full fine-tuning (rank 0 or absent)."""
    rank = settings.count(*keys.rank, to="lora.rank", off=True) if keys.rank else None
    named = settings.raw(*keys.targets, to="lora.targets") if keys.targets else None
    dropout = settings.number(*keys.dropout, to="lora.dropout") if keys.dropout else None
    if rank is None:
        settings.defaulted("method", "full")
        return {}
    targets = words.lora_targets(named) if as_names(named) else "all-linear"
    return {"rank": rank, "targets": targets, "dropout": dropout}


def lengths(settings: Settings, recipe: dict[str, Any], keys: PolicyKeys) -> None:
    """Read prompt and completion; where only their sum is stated, the prompt is what is left."""
    completion = (
        settings.count(*keys.completion, to="completion_length") if keys.completion else None
    )
    prompt = settings.count(*keys.prompt, to="prompt_length") if keys.prompt else None
    whole = settings.count(*keys.whole, to="context") if keys.whole else None
    if whole:
        least = prompt or min(keys.prompt_default, whole // 2)
        completion = min(completion or whole, whole - least) if whole > least else whole
        prompt = prompt or whole - completion
    if completion is None:
        completion = keys.completion_default
        settings.defaulted("completion_length", completion)
    if prompt is None:
        prompt = keys.prompt_default
        settings.defaulted("prompt_length", prompt)
    recipe["prompt_length"], recipe["completion_length"] = prompt, completion


def _micro_batch(settings: Settings, recipe: dict[str, Any], keys: PolicyKeys) -> None:
    budget = (
        settings.count(*keys.token_budget, to="micro_batch_size", off=True)
        if keys.token_budget
        else None
    )
    if budget:
        length = recipe["prompt_length"] + recipe["completion_length"]
        recipe["micro_batch_size"] = max(1, budget // length)
        recipe["packing"] = True
        settings.effect(
            f"at most {budget:,} tokens a micro-batch, planned as {recipe['micro_batch_size']} full sequences"
        )
        settings.raw(*keys.micro)
    else:
        recipe["micro_batch_size"] = settings.count(
            *keys.micro, to="micro_batch_size", default=keys.micro_default
        )


def compute(settings: Settings, recipe: dict[str, Any], keys: PolicyKeys) -> None:
    """Read checkpointing, optimizer, offload and attention."""
    on = (
        not settings.flag(*keys.no_checkpointing, to="checkpointing")
        if keys.no_checkpointing
        else settings.flag(
            *keys.checkpointing, to="checkpointing", default=keys.checkpointing_default
        )
    )
    again = str(settings.raw(*keys.recompute, to="checkpointing") or "") if keys.recompute else ""
    recipe["checkpointing"] = words.checkpointing(on or again == "full")
    name = settings.raw(*keys.optimizer, to="optimizer") if keys.optimizer else None
    recipe["optimizer"] = words.optimizer(settings, name) if name else "adamw"
    if keys.optimizer_offload and settings.flag(*keys.optimizer_offload, to="optimizer_offload"):
        recipe["optimizer_offload"] = True
    if keys.parameter_offload and settings.flag(*keys.parameter_offload, to="offload.parameters"):
        recipe["offload"] = {"parameters": True}
    chosen = settings.raw(*keys.attention, to="attention") if keys.attention else None
    recipe["attention"] = words.attention(chosen) or "flash"


def read_engine(
    settings: Settings, keys: PolicyKeys, policy: Policy, method: Method
) -> dict[str, Any]:
    """Return the engine beside the policy, or on GPUs of its own."""
    tensor = settings.count(
        *keys.engine_tensor, to="engine.tensor_parallel", default=keys.engine_tensor_default
    )
    used = settings.number(
        *keys.utilization, to="engine.gpu_memory_utilization", default=keys.utilization_default
    )
    eager = settings.flag(*keys.eager, to="engine.cuda_graphs") if keys.eager else False
    seqs = (
        settings.count(*keys.max_num_seqs, to="engine.max_num_seqs") if keys.max_num_seqs else None
    )
    tokens = (
        settings.count(*keys.batched_tokens, to="engine.max_num_batched_tokens")
        if keys.batched_tokens
        else None
    )
    if not policy.colocated:
        settings.effect("the engine has GPUs of its own: it takes none of the training's memory")
        return {"kind": EngineKind.VLLM_SERVER}
    sleep = (1 if method is not Method.FULL else 2) if policy.sleeps else 0
    if not policy.sleeps:
        settings.effect(
            f"the engine does not sleep: it keeps {used or 0:g} of the card while training"
        )
    return {
        "kind": EngineKind.VLLM_PUSH,
        "gpu_memory_utilization": used,
        "tensor_parallel": tensor,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "sleep_level": sleep,
        "cuda_graphs": not eager,
    }


def _degrees(
    settings: Settings, recipe: dict[str, Any], keys: PolicyKeys, policy: Policy
) -> int | None:
    found: dict[str, Any] = {}
    for name, named in keys.degrees.items():
        if name == "sequence":
            found[name] = settings.flag(*named, to="parallel.sequence")
        else:
            found[name] = settings.count(*named, to=f"parallel.{name}", off=True)
    if (found.get("tensor") or 1) < 2:
        found.pop("sequence", None)
    found["context_kind"] = keys.context_kind
    gpus = set_degrees(settings, recipe, policy.gpus, **found)
    return finish_sharding(settings, recipe, gpus)


def quantized(recipe: dict[str, Any], model: str) -> None:
    """Write the quantization that a model's name announces into a recipe of adapters."""
    if (named := quantization_in_name(model)) and recipe.get("method") is Method.LORA:
        recipe["method"], recipe["quantization"] = Method.QLORA, named
