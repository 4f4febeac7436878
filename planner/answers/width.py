"""How wide vLLM generates in the trainer's process: as many of a step's sequences at once as the plan has room for.

Decoding reads all weights for every token of a batch, however many sequences are in it: a batch twice as wide
costs hardly more time. So nothing of a step waits for a second wave unless its keys and values have no room.
"""

from collections.abc import Callable
from typing import Any

from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.engine_choices import INSIDE
from planner.run.framework import pick
from planner.run.recipe import Recipe, RunFile, Task
from planner.run.train_bytes import step_prompts
from planner.terms.vllm_blocks import vllm_kv
from planner.units import format_bytes

Planned = tuple[Recipe, Plan]
KERNEL_BLOCK, KERNEL_BLOCK_CPU = 16, 32
"""Tokens that an attention kernel takes at a time (flash_attn.py: MultipleOf(16); platforms/cpu.py: 32)."""
CPU_BLOCK_TOKENS = 128
"""The CPU build's block size when none is asked for."""


def generates_inside(recipe: Recipe) -> bool:
    """Return whether vLLM generates in the trainer's own process."""
    return recipe.task is Task.GRPO and recipe.engine.kind in INSIDE


def with_width(run: RunFile, model: ModelSpec, machine: Machine) -> RunFile:
    """Return the run with as many sequences at once as its training would generate; one with a train section only."""
    recipe = run.recipe
    ours = recipe.framework in (None, "vramwise") and generates_inside(recipe)
    if not run.train or not ours or recipe.engine.max_num_seqs or recipe.engine.kv_bytes:
        return run
    step = step_prompts(recipe, run.train.get("prompts_per_step"), machine.num_gpus)
    prompts = -(-step // machine.num_gpus)
    made, _ = widened(model, recipe, plan(model, recipe, machine), machine, prompts=prompts)
    return run.model_copy(update={"recipe": made})


def widened(
    spec: ModelSpec,
    recipe: Recipe,
    planned: Plan,
    machine: Machine,
    *,
    prompts: int,
    say: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Return the recipe with how many of a step's sequences vLLM generates at once, its pool, and their plan.

    `prompts`: of a step, on one rank. What the recipe states stays: the number, or the pool, which then says the
    number. The pool is what vLLM's blocks of so many sequences at full length take. Raises VramwiseError where the
    number has no room.
    """
    engine = recipe.engine
    if not generates_inside(recipe) or (engine.max_num_seqs and engine.kv_bytes):
        return recipe, planned
    r = planned.resolved
    step = prompts * engine.tensor_parallel * r.num_generations
    block = engine.block_size if "block_size" in engine.model_fields_set else None

    def pool(count: int) -> int:
        return pool_bytes(
            spec,
            length=r.seq_tokens,
            sequences=count,
            batched_tokens=max(r.max_num_batched_tokens, count),
            kv_dtype=engine.kv_dtype or recipe.dtype or "bf16",  # vLLM here holds the policy's
            block_size=block,
            degree=engine.tensor_parallel,
            prefix_caching=r.prefix_caching,
            on_cpu=machine.cpu,
        )

    def sized(count: int) -> Planned:
        size = engine.kv_bytes or pool(min(count, step))
        wider = changed(recipe, max_num_seqs=count, kv_bytes=size)
        return wider, plan(spec, wider, machine)

    if engine.max_num_seqs:
        made = sized(engine.max_num_seqs)
        if not made[1].may_run:
            size = format_bytes(made[1].resolved.kv_bytes)
            raise VramwiseError(
                f"recipe.engine.max_num_seqs: {engine.max_num_seqs} sequences of {r.seq_tokens:,} tokens need a "
                f"KV cache of {size}, with which the run does not fit: {made[1].why}",
                hint="fewer, or leave it out: then as many as have room",
            )
        return made
    count, most, best = 1, step, sized(1)
    while count < most:
        middle = (count + most + 1) // 2
        trial = sized(middle)
        room = not engine.kv_bytes or pool(middle) <= engine.kv_bytes
        if room and trial[1].verdict == "fits":
            count, best = middle, trial
        else:
            most = middle - 1
    usual = min(r.max_num_seqs, step)
    if count < usual and not engine.kv_bytes and (trial := sized(usual))[1].may_run:
        count, best = usual, trial  # tight, as it was planned so far
    if count < step:
        say(
            f"vLLM generates {count} of a step's {step} sequences at once: a KV cache of "
            f"{format_bytes(best[1].resolved.kv_bytes)}"
        )
    return best


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with fields of its engine changed."""
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})


def pool_bytes(
    model: ModelSpec,
    *,
    length: int,
    sequences: int,
    batched_tokens: int,
    kv_dtype: str,
    block_size: int | None,
    degree: int,
    prefix_caching: bool,
    on_cpu: bool,
) -> int:
    """Return one of `degree` ranks' part of the pool that holds `sequences` of `length` tokens, and vLLM's null block."""
    law = pick("vllm").engine
    kv = vllm_kv(
        model,
        kv_bytes=0,
        max_model_len=length,
        kv_dtype=kv_dtype,
        block_size=block_size or (CPU_BLOCK_TOKENS if on_cpu else KERNEL_BLOCK),
        kernel_block=KERNEL_BLOCK_CPU if on_cpu else KERNEL_BLOCK,
        # the CPU platform switches asynchronous scheduling off
        in_flight_tokens=batched_tokens * (1 if on_cpu else law.in_flight_batches),
        prefix_caching=prefix_caching,
        ranks=degree,
    )
    return kv.bytes_per_sequence * sequences + kv.bytes_per_block
