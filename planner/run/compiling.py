"""What a recipe says of torch.compile, float8 and selective checkpointing, and who can do it."""

from collections.abc import Callable
from typing import Any

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.run.framework import frameworks
from planner.run.framework_files import Framework
from planner.run.logits_law import LogitsLaw
from planner.run.recipe import Checkpointing, Method, Recipe, Task
from planner.run.switches import Switches

SELECTIVE = frozenset({Checkpointing.SELECTIVE_OP, Checkpointing.SELECTIVE_LAYER})
FLOAT8_CAPABILITY = (8, 9)
"""torchtitan components/quantization/float8.py: has_cuda_capability(8, 9)."""


def compile_fields(recipe: Recipe, framework: Framework, machine: Machine) -> dict[str, Any]:
    """Return what is compiled and what multiplies in float8; raises UsageError for what nobody does."""
    switches = framework.switches_of(recipe.task.value)
    trains = recipe.task is not Task.SERVE
    asked = trains and (recipe.compile or bool(recipe.compile_loss))
    if asked and switches.compiles == "none":
        _refuse("compile", framework, lambda s: s.compiles != "none", recipe.task)
    if trains and recipe.checkpointing in SELECTIVE and not switches.selective:
        _refuse(
            f"checkpointing {recipe.checkpointing}", framework, lambda s: s.selective, recipe.task
        )
    loss = recipe.compile_loss
    if loss is None:
        loss = recipe.compile and switches.compiles_loss
    return {
        "compile": recipe.compile,
        "compiled": switches.compiles if recipe.compile and trains else "",
        # a loss outside the model's forward is compiled only by who says so
        "compiled_loss": trains and loss and recipe.task is Task.SFT,
        **_float8(recipe, framework, switches, machine),
    }


def _float8(
    recipe: Recipe, framework: Framework, switches: Switches, machine: Machine
) -> dict[str, Any]:
    if recipe.task is Task.SERVE or recipe.float8 is None:
        if recipe.float8_all_gather and recipe.task is not Task.SERVE:
            raise UsageError(
                "float8_all_gather: nothing is in float8", hint="float8: tensorwise beside it"
            )
        return {"float8": None, "float8_all_gather": False}
    if not switches.float8:
        _refuse("float8", framework, lambda s: s.float8, recipe.task)
    if recipe.method is not Method.FULL:
        raise UsageError(
            f"float8: method {recipe.method} freezes the linears it would convert",
            hint="method full",
        )
    if recipe.float8_all_gather and recipe.float8 != "tensorwise":
        raise UsageError(
            f"float8_all_gather: torchao gathers in float8 with tensorwise scaling, not {recipe.float8}",
            hint="float8: tensorwise",
        )
    capability = machine.gpu.compute_capability if machine.gpu else ""
    numbers = tuple(int(part) for part in capability.split(".") if part.isdigit())
    if machine.gpu and len(numbers) > 1 and numbers < FLOAT8_CAPABILITY:
        raise UsageError(
            f"float8: {machine.gpu.name} has no float8 products",
            hint="a card of compute capability 8.9 or newer",
        )
    return {"float8": recipe.float8, "float8_all_gather": recipe.float8_all_gather}


def _refuse(what: str, framework: Framework, able: Callable[[Switches], bool], task: Task) -> None:
    others = sorted(
        {law.family for law in frameworks().values() if able(law.switches_of(task.value))}
    )
    raise UsageError(
        f"{what}: {framework.title} does not do it",
        hint=f"frameworks that do: {', '.join(others)}" if others else "leave it out",
    )


def compiled_law(framework: Framework, task: Task, kind: str) -> LogitsLaw:
    """Return the law of a compiled loss.

    A cross-entropy on materialised logits is fused, upcast and all: what is saved is the logits as the
    head made them, and of vocabulary width the backward makes only their gradient
    (benchmarks/laws/compiled_layers.py). Losses that are kernels of their own stay what they are.
    """
    for key in (f"{task.value}-{kind}-compiled", f"{kind}-compiled"):
        if key in framework.logits:
            return framework.logits[key]
    law = framework.law(task.value, kind)
    if law.kind != "full":
        return law
    return law.model_copy(
        update={
            "forward": (("logits", "act"),),
            "backward": (("logits", "act"), ("gradient", "act")),
            "order": ("logits: act", "|", "gradient: act", "-logits"),
            "source": "compiled cross-entropy: the partitioner saves the logits, one kernel makes their gradient",
        }
    )
