"""How a mixture's experts run: which implementation, how unevenly, and whether they are linears of their own."""

from typing import TYPE_CHECKING, Any

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.run.framework_files import Framework
from planner.run.recipe import Recipe, Task
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.run.resolved import Resolved

GROUPED, FALLBACK, MODULES = "grouped_mm", "fallback", "modules"
LOOPS = frozenset({"eager", MODULES})
"""Implementations that run one expert after another: what they hold depends on the router."""
ALWAYS_FUSED = frozenset(
    {
        "gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "granitemoe",
        "granitemoeshared", "granitemoehybrid",
    }
)  # fmt: skip
"""Families whose experts were one tensor before transformers 5 as well (modeling_gpt_oss.py and others, 4.57)."""


def expert_fields(
    model: ModelSpec, machine: Machine, recipe: Recipe, framework: Framework, notes: list[str]
) -> dict[str, Any]:
    """Return the resolved fields of a mixture's experts; raises UsageError for what the code cannot do."""
    switches, asked = framework.switches, recipe.experts_implementation
    modules = switches.experts == MODULES
    linear = switches.linear_experts or model.model_type in switches.linear_expert_models
    plain = {
        "experts": "",
        "expert_capacity": 0.0,
        "linear_experts": linear,
    }
    if recipe.task is Task.SERVE or not any(layer.mlp.num_experts for layer in model.layers):
        return plain
    if asked is not None and modules:
        raise UsageError(
            f"experts_implementation: {asked} is not in {framework.title}",
            hint="it is a choice of transformers 5; before, experts are a list of modules",
        )
    fused = modules and model.model_type in ALWAYS_FUSED
    experts: str = "eager" if fused else asked or switches.experts
    factor = recipe.expert_capacity_factor
    if factor is not None and not switches.expert_capacity:
        raise UsageError(
            f"expert_capacity_factor: {framework.title} drops no tokens, its experts take all",
            hint="leave it out; Megatron and DeepSpeed's MoE layers have one, in a loop of your own (peft-loop)",
        )
    if factor is not None and experts not in LOOPS:
        raise UsageError(
            f"expert_capacity_factor: {experts} has every row at once, whoever they belong to",
            hint="experts_implementation: eager, or leave it out",
        )
    if experts == GROUPED and _before_ampere(machine):
        experts = FALLBACK
        notes.append(
            f"torch's grouped_mm starts with compute capability 8.0: on {machine.gpu.name if machine.gpu else ''} "
            "transformers runs its own, which makes gradients of frozen experts too"
        )
    return {
        "experts": experts,
        "expert_capacity": factor or 0.0,
        "linear_experts": linear or (modules and not fused),
    }


def _before_ampere(machine: Machine) -> bool:
    major = machine.gpu.compute_capability.partition(".")[0] if machine.gpu else ""
    return major.isdigit() and int(major) < 8


def uneven_notes(model: ModelSpec, r: "Resolved", extra: int) -> list[str]:
    """Return what a plan says of experts in a loop: rows of the fullest when even, and at worst."""
    if r.layout.expert > 1 and extra:
        return [
            f"experts over {r.layout.expert} ranks, evenly used; if every token chose this rank's, "
            f"{format_bytes(extra)} more"
        ]
    if r.experts not in LOOPS:
        return []
    mlp = next(layer.mlp for layer in model.layers if layer.mlp.num_experts)
    even = r.tokens * mlp.top_k / mlp.num_experts
    most = min(float(r.tokens), r.expert_capacity * even) if r.expert_capacity else r.tokens
    limit = (
        f"{r.expert_capacity:g} x {even:,.0f} by the capacity factor"
        if most < r.tokens
        else "a token chooses an expert once"
    )
    capped = f"expert_capacity_factor {r.expert_capacity:g}: " if r.expert_capacity else ""
    return [
        f"{capped}experts one after another, planned evenly used: {r.tokens:,} tokens x {mlp.top_k} / "
        f"{mlp.num_experts} = {even:,.0f} rows each; at worst {most:,.0f} ({limit}), "
        f"{format_bytes(extra)} more, which the upper end of the interval has"
    ]
