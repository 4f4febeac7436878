"""How to start a vLLM engine for a run: sizes from the recipe and the plan."""

import uuid
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.answers.width import KERNEL_BLOCK, KERNEL_BLOCK_CPU, pool_bytes
from planner.errors import UsageError
from planner.models.hub import find_model
from planner.plan import Plan
from planner.run.engine_choices import usual_sleep
from planner.run.recipe import EngineKind, Method, Recipe, Task
from trainer.config import refuse_four_bit
from trainer.engines.vllm_memory import engine_parts, free_and_total, memory_share
from trainer.engines.vllm_platform import (
    can_sleep,
    check_device,
    check_dtype,
    runs_on_cpu,
    vllm_platform,
)
from trainer.model import DTYPES, Policy
from trainer.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How to start an engine. Sizes are asked for explicitly so that the trainer gets all the rest."""

    model: str
    """Local folder or hub id of the base model."""
    dtype: str
    """bfloat16, float16 or float32."""
    max_model_len: int
    """Longest prompt + completion in tokens."""
    max_num_seqs: int
    """Sequences generated at once."""
    kv_bytes: int
    """Memory of the KV cache, from the plan."""
    kv_dtype: str = "auto"
    """auto: the policy's dtype; fp8: half the bytes, and other log-probabilities (train.loss.is_correction)."""
    block_size: int | None = None
    """Tokens of a block of the cache; None = vLLM's own choice."""
    max_num_batched_tokens: int | None = None
    """Prefill tokens of one step; None = the larger of 2048 and max_model_len."""
    prefix_caching: bool = True
    """A group's prompt is computed and kept once, not once a completion."""
    lora_rank: int = 0
    """Largest adapter rank; 0 = no adapter slots."""
    sleep_level: int = 0
    """What vLLM gives back while the trainer works: 0 nothing, 1 the KV cache (and a copy's weights go
    to the host), 2 a copy's weights are dropped as well."""
    memory_share: float | None = None
    """Share of the card that vLLM takes (checked against what is free); None = no card."""
    cuda_graphs: bool = True
    """Decoding steps are replayed; a CPU has none."""
    ranks: int = 1
    """Of the run: with several, vLLM's workers are the ranks themselves."""
    tensor_parallel: int = 1
    """Neighbouring ranks that are one engine; each states its own part of the KV cache."""
    name: str = ""
    """Of this start on all ranks: what they share in this machine's memory has it."""
    seed: int = 0
    revision: str | None = None
    generation_timeout_s: float = 1800.0
    """A rollout that takes longer is aborted with an error."""
    guided: bool = False
    """Completions may follow a grammar: vLLM loads the tokenizer for it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More arguments of vllm.LLM, as they are."""


DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def settle_engine(recipe: Recipe) -> Recipe:
    """Return the recipe with its engine's sleep level and graphs written down, so that the plan sees them.

    Nothing heavy has loaded yet: a vLLM that cannot start here is refused now. Where vLLM cannot sleep
    the level is 0, and the plan counts its KV cache and its weights as there all the time.
    """
    in_process = recipe.engine.kind in (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH)
    if recipe.task is not Task.GRPO or not in_process:
        return recipe
    refuse_four_bit(recipe)
    dtype = DTYPES.get(recipe.dtype or "bf16")
    if dtype is not None:  # an unknown one is refused where the policy is loaded
        check_dtype(dtype)
    settled: dict[str, Any] = {"sleep_level": sleep_level(recipe)}
    if runs_on_cpu():
        if recipe.engine.cuda_graphs:
            raise UsageError(
                "recipe.engine.cuda_graphs: true, but vLLM on cpu has none", hint="leave it out"
            )
        settled["cuda_graphs"] = False
    engine = recipe.engine.model_copy(update=settled)
    return recipe.model_copy(update={"engine": engine})


def sleep_level(recipe: Recipe) -> int:
    """Return what vLLM gives back between rollouts: as asked, or as much as keeps what it needs."""
    asked, kind = recipe.engine.sleep_level, recipe.engine.kind
    if not can_sleep():
        if asked:
            raise UsageError(
                f"recipe.engine.sleep_level: {asked}, but vLLM on {vllm_platform().device_type} "
                "cannot give memory back",
                hint="0, or leave it out",
            )
        return 0
    if kind is EngineKind.VLLM_SHARED and asked == 2:
        raise UsageError(
            "recipe.engine.sleep_level: 2 would drop the weights that vllm-shared shares with the policy",
            hint="1 (the KV cache goes), or leave it out",
        )
    if asked is not None:
        return asked
    return usual_sleep(kind, recipe.method)


def settings_for(
    policy: Policy,
    *,
    recipe: Recipe,
    plan: Plan | None,
    kind: EngineKind,
    guided: bool = False,
    ranks: Ranks | None = None,
) -> VllmSettings:
    """Return the engine settings of a run: lengths and sizes from the recipe, KV bytes from the plan.

    `ranks`: of a run whose policy is not laid out over them yet; None: the policy's.
    Without a plan the pool holds every sequence at full length, in vLLM's own blocks.
    Raises UsageError for what this vLLM, this card or what is free of it cannot do.
    """
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"kind": kind})})
    refuse_four_bit(recipe)
    ranks = policy.ranks if ranks is None else ranks
    check_device(policy.device, local_rank=ranks.local_rank)
    check_dtype(policy.dtype)
    resolved = plan.resolved if plan is not None else None
    length = recipe.context or (recipe.prompt_length or 0) + (recipe.completion_length or 0)
    if resolved is not None:
        length = resolved.prompt_tokens + resolved.completion_tokens
    if not length:
        raise UsageError(
            "recipe.context: vLLM must know the longest sequence",
            hint="set context, or prompt_length and completion_length",
        )
    sequences = recipe.engine.max_num_seqs or max(
        recipe.micro_batch_size or 1, recipe.num_generations or 1
    )
    tokens = resolved.max_num_batched_tokens if resolved is not None else max(2048, length)
    batched = max(recipe.engine.max_num_batched_tokens or tokens, sequences)
    cached = recipe.engine.prefix_caching
    if cached is None:
        cached = resolved.prefix_caching if resolved is not None else True
    kv_dtype = _kv_dtype(policy, recipe)
    block = _block_size(recipe)
    needed = pool_bytes(
        find_model(policy.source, revision=policy.revision),
        length=length,
        sequences=sequences,
        batched_tokens=batched,
        kv_dtype=kv_dtype,
        block_size=block,
        degree=recipe.engine.tensor_parallel,
        prefix_caching=cached,
        on_cpu=runs_on_cpu(),
    )
    planned = 0
    if plan is not None:
        planned = sum(t.bytes for t in plan.phase("rollout").terms if t.name == "kv_cache")
    kv_bytes = recipe.engine.kv_bytes or max(planned, needed)
    share = None
    if not runs_on_cpu():
        free, total = free_and_total()
        parts = engine_parts(policy, recipe=recipe, plan=plan, kv_bytes=kv_bytes, total_bytes=total)
        name = vllm_platform().get_device_name()
        share = memory_share(parts, free_bytes=free, total_bytes=total, name=name)
    return VllmSettings(
        model=policy.source,
        revision=policy.revision,
        dtype=DTYPE_NAMES[policy.dtype],
        ranks=ranks.size,
        tensor_parallel=recipe.engine.tensor_parallel,
        name=ranks.broadcast_object(uuid.uuid4().hex[:12]),
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=batched,
        prefix_caching=cached,
        kv_bytes=kv_bytes,
        kv_dtype="fp8" if kv_dtype == "fp8" else "auto",
        block_size=block,
        lora_rank=0 if recipe.method is Method.FULL else recipe.lora.rank,
        sleep_level=sleep_level(recipe),
        memory_share=share,
        cuda_graphs=not runs_on_cpu() and recipe.engine.cuda_graphs is not False,
        generation_timeout_s=recipe.engine.timeout_s,
        guided=guided,
    )


def _kv_dtype(policy: Policy, recipe: Recipe) -> str:
    """Return the dtype of keys and values: the policy's own, or fp8. Raises UsageError for another."""
    own = {value: name for name, value in DTYPES.items()}[policy.dtype]
    asked = recipe.engine.kv_dtype or own
    if asked not in (own, "fp8"):
        raise UsageError(
            f"recipe.engine.kv_dtype: {asked} is not what vLLM can hold beside {own} weights",
            hint=f"{own} or fp8",
        )
    return asked


def _block_size(recipe: Recipe) -> int | None:
    """Return the block size that the recipe asks for, or None. Raises UsageError for one without a kernel."""
    if "block_size" not in recipe.engine.model_fields_set:
        return None
    step = KERNEL_BLOCK_CPU if runs_on_cpu() else KERNEL_BLOCK
    if recipe.engine.block_size % step:
        raise UsageError(
            f"recipe.engine.block_size: {recipe.engine.block_size} tokens fit no attention kernel here",
            hint=f"a multiple of {step}",
        )
    return recipe.engine.block_size
