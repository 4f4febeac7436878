"""What helps when vLLM refuses to start: its KV pool is under one request."""

from dataclasses import replace
from typing import Any

from planner.answers.advise import largest
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Recipe, Task

LEAST = 256
"""Tokens of a request that is worth serving."""
MOST_UTILIZATION = 0.97


def pool_levers(model: ModelSpec, recipe: Recipe, machine: Machine, base: Plan) -> list[str]:
    """Return vLLM's flags that make it start, each with the longest request it then holds.

    Empty unless `base` is of a server that refuses. The first are free, then graphs are given up, then GPUs added.
    """
    if not base.problem or recipe.task is not Task.SERVE:
        return []
    used = base.resolved.utilization
    higher = {"gpu_memory_utilization": MOST_UTILIZATION} if 0 < used < MOST_UTILIZATION else {}
    eager = {"cuda_graphs": False} if base.resolved.cuda_graphs else {}
    tries: list[tuple[str, dict[str, Any], int]] = [("", {}, 1)]
    if higher:
        tries.append((f"--gpu-memory-utilization {MOST_UTILIZATION}", higher, 1))
    if eager:
        tries.append(("--enforce-eager", eager, 1))
    if higher and eager:
        tries.append(
            (f"--enforce-eager --gpu-memory-utilization {MOST_UTILIZATION}", {**eager, **higher}, 1)
        )
    tensor = base.resolved.tensor_parallel * 2
    tries.append((f"--tensor-parallel-size {tensor}", {"tensor_parallel": tensor}, 2))
    asked = base.resolved.seq_tokens
    found = []
    for words, update, times in tries:
        changed = recipe.model_copy(update={"engine": recipe.engine.model_copy(update=update)})
        tokens = _longest(
            model, changed, replace(machine, num_gpus=machine.num_gpus * times), asked
        )
        if tokens >= asked and words:
            found.append(f"{words}: one request of {asked:,} tokens fits")
        elif tokens >= LEAST:
            found.append(
                f"--max-model-len {tokens} {words}".strip()
                + f": the longest request that fits is {tokens:,} tokens"
            )
    return found


def _longest(model: ModelSpec, recipe: Recipe, machine: Machine, asked: int) -> int:
    def verdict(tokens: int) -> str:
        lengths = {"context": tokens, "prompt_length": None, "completion_length": None}
        try:
            return plan(model, recipe.model_copy(update=lengths), machine).verdict
        except VramwiseError:
            return "refused"

    accepted = frozenset(("fits", "tight"))
    if verdict(asked) in accepted:
        return asked
    return largest(verdict, limit=asked, accepted=accepted)
