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
from planner.run.recipe import Recipe, Task
from planner.units import format_bytes
from trainer.engines.vllm_settings import pool_bytes
from trainer.say import Say, silent

Planned = tuple[Recipe, Plan]


def generates_inside(recipe: Recipe) -> bool:
    """Return whether vLLM generates in the trainer's own process."""
    return recipe.task is Task.GRPO and recipe.engine.kind in INSIDE


def with_graphs(
    recipe: Recipe, solve: Callable[[Recipe], Planned], *, say: Say = silent
) -> Planned:
    """Return what `solve` makes of the recipe: with CUDA graphs, without them where only that fits.

    Raises what `solve` raises where neither does, or where the recipe has decided.
    """
    try:
        return solve(recipe)
    except VramwiseError as error:
        if not generates_inside(recipe) or recipe.engine.cuda_graphs is not None:
            raise
        try:
            found = solve(_engine(recipe, cuda_graphs=False))
        except VramwiseError:
            raise error from None
        say(f"vLLM runs without CUDA graphs, slower: with them {error.message}")
        return found


def widened(
    spec: ModelSpec,
    recipe: Recipe,
    planned: Plan,
    machine: Machine,
    *,
    prompts: int,
    say: Say = silent,
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
        wider = _engine(recipe, max_num_seqs=count, kv_bytes=size)
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


def _engine(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})
