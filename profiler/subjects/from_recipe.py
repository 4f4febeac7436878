"""A recipe with every choice made -> the options of a step to trace."""

from typing import Any

from planner.errors import UnsupportedError
from planner.machine import GpuSpec
from planner.recipe import Checkpointing
from planner.resolve import Resolved
from planner.terms.overhead import blas_workspace_bytes
from profiler.subjects.options import StepOptions


def step_options(
    resolved: Resolved,
    config: dict[str, Any],
    *,
    gpu: GpuSpec | None = None,
    layers: int | None = None,
    steps: int = 2,
) -> StepOptions:
    """Return the options on `gpu` (None: an Ampere); raises UnsupportedError for what cannot be traced."""
    if resolved.quantization not in ("", "nf4", "fp4"):
        raise UnsupportedError(f"a {resolved.quantization} base cannot be traced")
    if resolved.gpus > 1:
        raise UnsupportedError("the trace runs one GPU; sharding over several cannot be traced")
    if resolved.checkpointing is Checkpointing.EVERY_K:
        raise UnsupportedError(
            "checkpointing every-k cannot be traced: transformers has no such switch"
        )
    return StepOptions(
        config=config,
        method=resolved.method,
        dtype=resolved.dtype,
        autocast=resolved.autocast or "none",
        lora_rank=resolved.lora_rank,
        lora_targets=_targets(resolved.lora_targets),
        lora_dropout=resolved.lora_dropout,
        adapter_dtype=resolved.adapter_dtype,
        double_quant=resolved.double_quant,
        prepare_kbit=bool(resolved.switch("kbit_upcast")),
        kbit_norms_only=resolved.switch("kbit_upcast") == "norms",
        keeps_matmul_input=bool(resolved.switch("saved_input")),
        reentrant=bool(resolved.switch("reentrant")),
        transformers=str(resolved.switch("transformers") or ""),
        checkpointing=resolved.checkpointing,
        attention=resolved.attention,
        optimizer=resolved.optimizer,
        micro_batch=resolved.sequences,
        length=resolved.seq_tokens,
        completion=resolved.completion_tokens,
        gradient_accumulation=resolved.grad_accum,
        steps=steps,
        layers=layers,
        fp32_outputs=bool(resolved.switch("fp32_outputs")) and bool(resolved.autocast),
        keep_outputs=resolved.framework.name == "peft-loop",
        workspace_bytes=blas_workspace_bytes(gpu),
    )


_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def _targets(targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return _TARGETS.get(targets, targets) if isinstance(targets, str) else targets
