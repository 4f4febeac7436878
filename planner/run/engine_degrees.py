"""How vLLM's own ranks divide a model: degrees that it would refuse, refused by name.

vLLM 0.32: config/model.py verify_with_parallel_config (heads, experts), distributed/utils.py divide (key
heads, widths), fused_moe/config.py (without expert parallelism experts are divided by their width over all
tensor and data parallel ranks, with it whole experts are), config/parallel.py (world size).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.errors import UsageError
from planner.models.spec import ModelSpec
from planner.run.recipe import VLLM, EngineKind, Task

if TYPE_CHECKING:
    from planner.run.resolved import Resolved


def refuse_degrees(model: ModelSpec, r: "Resolved", gpus: int) -> None:
    """Raise UsageError for the first degree of an engine that does not fit the model or the machine."""
    if r.engine not in VLLM:
        return
    apart = r.engine is EngineKind.VLLM_SERVER and r.task is not Task.SERVE
    for field, value, why in _faults(model, r, 0 if apart else gpus):
        raise UsageError(f"engine.{field}: {value} {why}")


def idle_note(r: "Resolved", gpus: int) -> str:
    """Return what to say of a machine that the engine's degrees leave GPUs of."""
    ranks = r.tensor_parallel * r.pipeline_parallel * r.data_parallel
    if r.trains or r.engine not in VLLM or ranks >= gpus:
        return ""
    return (
        f"{gpus - ranks} of {gpus} GPUs serve nothing: tensor {r.tensor_parallel} x pipeline "
        f"{r.pipeline_parallel} x data {r.data_parallel}; --tensor-parallel divides the model, "
        "--data-replicate repeats it"
    )


def _faults(model: ModelSpec, r: "Resolved", gpus: int) -> Iterator[tuple[str, object, str]]:
    """Yield each degree that divides wrongly: field, value, why. `gpus` 0: the engine has its own."""
    tensor, stages, copies = r.tensor_parallel, r.pipeline_parallel, r.data_parallel
    ranks = tensor * stages * copies
    if gpus and ranks > gpus:
        name = next(
            name
            for name, degree in (
                ("tensor_parallel", tensor),
                ("pipeline_parallel", stages),
                ("data_parallel", copies),
            )
            if degree > 1
        )
        yield (
            name,
            getattr(r, name),
            f"needs {ranks} GPUs (tensor {tensor} x pipeline {stages} x data {copies}), machine.gpus is {gpus}",
        )
    if gpus and r.trains and gpus % ranks:
        yield (
            "tensor_parallel",
            tensor,
            f"does not divide the {gpus} GPUs, which each belong to one engine",
        )
    mixers = [mixer for layer in model.layers for mixer in layer.mixers]
    for count in sorted({mixer.num_heads for mixer in mixers if not mixer.state_shapes} - {0}):
        if count % tensor:
            yield "tensor_parallel", tensor, f"does not divide the {count} attention heads"
    for count in sorted({mixer.num_kv_heads for mixer in mixers if not mixer.kv_lora_rank} - {0}):
        if count % tensor and tensor % count:
            yield (
                "tensor_parallel",
                tensor,
                f"neither divides nor repeats the {count} key-value heads",
            )
    yield from _widths(model, r)
    if stages > model.num_layers:
        yield (
            "pipeline_parallel",
            stages,
            f"makes more stages than the model's {model.num_layers} layers",
        )
    if r.expert_parallel and not any(layer.mlp.num_experts for layer in model.layers):
        yield "expert_parallel", True, f"divides experts, and {model.name or 'the model'} is dense"


def _widths(model: ModelSpec, r: "Resolved") -> Iterator[tuple[str, object, str]]:
    """Yield the channel mixers that do not divide."""
    tensor, flat = r.tensor_parallel, r.tensor_parallel * r.data_parallel
    for layer in model.layers:
        mlp = layer.mlp
        if not mlp.num_experts:
            if mlp.intermediate % tensor:
                yield "tensor_parallel", tensor, f"does not divide the MLP's {mlp.intermediate:,}"
        elif r.expert_parallel:
            if mlp.num_experts < flat:
                yield "expert_parallel", True, f"has {flat} ranks for {mlp.num_experts} experts"
        elif mlp.intermediate % flat:
            said = f"x data_parallel {r.data_parallel} " if r.data_parallel > 1 else ""
            yield (
                "tensor_parallel",
                tensor,
                f"{said}does not divide an expert's {mlp.intermediate:,}",
            )
