"""A recipe with every choice made -> the options of a step to trace."""

from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.machines.machine import GpuSpec
from planner.models.lora_targets import peft_targets
from planner.run.experts import MODULES
from planner.run.recipe import Checkpointing, Method
from planner.run.resolved import Resolved
from planner.run.tasks import TASKS
from planner.terms.overhead import blas_workspace_bytes
from profiler.sharded import Shard
from profiler.subjects.options import StepOptions


def step_options(
    resolved: Resolved,
    config: dict[str, Any],
    *,
    gpu: GpuSpec | None = None,
    layers: int | None = None,
    steps: int = 2,
    rank: int = 0,
) -> StepOptions:
    """Return the options on `gpu` (None: an Ampere) as rank `rank`; raises UnsupportedError for what cannot
    be traced."""
    if resolved.quantization not in ("", "nf4", "fp4"):
        raise UnsupportedError(f"a {resolved.quantization} base cannot be traced")
    if resolved.checkpointing is Checkpointing.EVERY_K:
        raise UnsupportedError(
            "checkpointing every-k cannot be traced: transformers has no such switch"
        )
    if resolved.compiled or resolved.compiled_loss or resolved.float8:
        word = "float8" if resolved.float8 else "compile"
        raise UnsupportedError(
            f"{word} cannot be traced: what inductor fuses never reaches a tracker",
            hint="benchmarks/laws/compiled_layers.py prints what torch's partitioner saves",
        )
    if resolved.experts == MODULES:
        raise UnsupportedError(
            "experts as a list of modules cannot be traced: the installed transformers fuses them"
        )
    return StepOptions(
        config=config,
        head=TASKS[resolved.task].head.value,
        method=resolved.method,
        # FSDP under mixed precision holds trained weights in fp32
        dtype="fp32" if _narrow(resolved) else resolved.dtype,
        autocast=resolved.autocast or "none",
        lora_rank=resolved.lora_rank,
        lora_targets=_targets(resolved, config),
        experts=resolved.experts,
        imbalance=resolved.imbalance,
        expert_capacity=resolved.expert_capacity,
        lora_target_parameters=resolved.target_parameters,
        lora_dropout=resolved.lora_dropout,
        dora=resolved.dora,
        modules_to_save=resolved.modules_to_save,
        lora_bias=resolved.lora_bias,
        ties_saved_modules=resolved.switches.ties_saved_modules,
        adapter_dtype=resolved.adapter_dtype,
        double_quant=resolved.double_quant,
        prepare_kbit=resolved.switches.kbit_upcast != "none",
        kbit_norms_only=resolved.switches.kbit_upcast == "norms",
        keeps_matmul_input=resolved.switches.saved_input > 0,
        reentrant=resolved.switches.reentrant,
        transformers=resolved.switches.transformers,
        sdpa_repeats_kv=resolved.switches.sdpa_repeats_kv,
        checkpointing=resolved.checkpointing,
        checkpoint_every=resolved.checkpoint_every,
        attention=resolved.attention,
        optimizer=resolved.optimizer,
        micro_batch=resolved.sequences,
        length=resolved.seq_tokens,
        padded=resolved.padded,
        completion=resolved.completion_tokens,
        gradient_accumulation=resolved.micro_batches,
        steps=steps,
        layers=layers,
        fp32_outputs=resolved.switches.fp32_outputs and bool(resolved.autocast),
        keep_outputs=resolved.switches.keeps_outputs,
        eval_batches=0
        if TASKS[resolved.task].generates
        else -(-resolved.eval_samples // resolved.eval_batch),
        eval_rows=resolved.eval_batch * TASKS[resolved.task].rows,
        eval_logits=resolved.eval_logits,
        eval_accumulation=resolved.eval_accumulation,
        workspace_bytes=blas_workspace_bytes(gpu),
        shard=_shard(resolved, rank),
    )


def _shard(resolved: Resolved, rank: int) -> Shard | None:
    """Return how the model is divided; raises UnsupportedError for what no fake group can run."""
    if rank >= resolved.gpus:
        last = resolved.gpus - 1
        raise UsageError(f"--rank: {rank} is none of {resolved.gpus}", hint=f"0 to {last}")
    if resolved.gpus == 1:
        return None
    layout = resolved.layout
    for field in ("pipeline", "context", "expert"):
        if getattr(layout, field) > 1:
            raise UnsupportedError(
                f"parallel.{field}: {getattr(layout, field)} cannot be traced",
                hint="vramwise plan counts it",
            )
    if layout.tensor > 1:
        if resolved.switches.tensor_plan != "transformers" or layout.data > 1:
            raise UnsupportedError(
                f"parallel: {layout} cannot be traced under {resolved.framework.title}",
                hint=f"--framework hf-trainer --gpus {layout.tensor}: transformers' tp_plan alone",
            )
        if resolved.method is not Method.FULL:
            raise UnsupportedError(
                f"parallel.tensor: {layout.tensor} with {resolved.method.value} cannot be traced: "
                "transformers' tp_plan names no module of PEFT's",
                hint="--method full",
            )
        return Shard(ranks=resolved.gpus, rank=rank, tensor=layout.tensor)
    if not resolved.placement.flat_buffers:  # our own trainer's copies are FSDP2's too
        raise UnsupportedError(
            f"sharding {resolved.sharding.value} over {resolved.gpus} GPUs cannot be traced",
            hint="fsdp2 can: one rank of it runs beside ranks that are not there",
        )
    narrow = resolved.compute_dtype if _narrow(resolved) else ""
    return Shard(
        ranks=resolved.gpus,
        rank=rank,
        replicate=resolved.layout.data_replicate if resolved.layout.data_replicate > 1 else 0,
        syncs_each=resolved.accumulate_sync,
        param_dtype=narrow,
        # accelerate gives both one dtype (utils/dataclasses.py, set_mixed_precision)
        reduce_dtype=resolved.reduce_dtype or narrow,
        reshard_after_forward=resolved.reshard_after_forward,
        offload=resolved.placement.offload.by == "fsdp",
    )


def _narrow(resolved: Resolved) -> bool:
    return resolved.placement.fp32_shards and resolved.method is Method.FULL


def _targets(resolved: Resolved, config: dict[str, Any]) -> str | tuple[str, ...]:
    """Return the targets as PEFT takes them, by the planner's list of the model's modules."""
    if resolved.method is Method.FULL:
        return resolved.lora_targets
    model = model_spec_from_config(config)
    names = peft_targets(model, resolved.lora_targets, resolved.target_parameters)
    return names if isinstance(names, str) else tuple(names)
