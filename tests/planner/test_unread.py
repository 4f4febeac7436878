"""Every recipe field moves a plan, or is named as one that does not."""

from pathlib import Path
from typing import Any

import pytest

from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.run.runfile import make_recipe
from planner.run.unread import FIELDS_WITHOUT_BYTES, leaves

MODEL = catalogue_model("llama-3.2-1b")
GRPO: dict[str, Any] = {"task": "grpo", "framework": "trl-1.9"}
FULL: dict[str, Any] = {"method": "full", "framework": "hf-trainer", "dtype": "bf16"}
MEGATRON: dict[str, Any] = {"method": "full", "framework": "megatron"}
VLLM: dict[str, Any] = {"task": "grpo", "engine": {"kind": "vllm-push"}}
SERVE: dict[str, Any] = {"task": "serve"}
GATHERED: dict[str, Any] = {**FULL, "evaluation": {"samples": 64, "logits": True}}
DISTILL: dict[str, Any] = {"task": "distill", "framework": "trl", "teacher": "llama-3.2-3b"}
TWO_CARDS = (
    "loads",
    "buckets.reduce",
    "buckets.prefetch",
    "buckets.live",
    "buckets.reuse",
    "buckets.persistence",
    "buckets.sub_group",
    "buckets.overlap",
    "buckets.contiguous",
    "buckets.dtype",
    "sharding",
    "parallel.data_replicate",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.pipeline",
    "parallel.virtual_stages",
    "parallel.context",
    "parallel.context_kind",
    "parallel.expert",
    "parallel.expert_tensor",
    "accumulate_sync",
    "reshard_after_forward",
    "reduce_dtype",
    "float8_all_gather",
    "bucket_views",
    "offload.parameters",
    "offload.device",
    "offload.pinned",
)
SEEN, OF_IMAGES = (
    "qwen2.5-vl-3b",
    ("images", "image_size", "image_tokens", "videos", "video_frames"),
)
HEARD, OF_SOUNDS = "voxtral-mini-3b", ("audio", "audio_seconds")
LONG: dict[str, Any] = {**FULL, "context": 8192}
EXPERTS, OF_EXPERTS = (
    "qwen3-30b-a3b",
    (
        "engine.expert_parallel",
        "engine.data_parallel",
        "lora.target_parameters",
        "experts_implementation",
        "expert_capacity_factor",
        "router_loss",
        "parallel.expert",
        "parallel.expert_tensor",
    ),
)

RECURRENT, OF_RECURRENT = "qwen3.5-0.8b", ("engine.prefix_caching",)
BIASED, OF_BIASED = "qwen2.5-0.5b", ("lora.bias",)
ADAPTER = str(Path(__file__).parent / "adapter")

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "parallel.tensor": (FULL, 2),
    "parallel.sequence": ({**MEGATRON, "parallel": {"tensor": 2}}, True),
    "parallel.pipeline": (MEGATRON, 2),
    "parallel.virtual_stages": (
        {**MEGATRON, "gradient_accumulation": 4, "parallel": {"pipeline": 2}},
        2,
    ),
    "parallel.context": (FULL, 2),
    "parallel.context_kind": ({**FULL, "parallel": {"context": 2}}, "ulysses"),
    "parallel.expert": (MEGATRON, 2),
    "parallel.expert_tensor": ({**MEGATRON, "parallel": {"tensor": 2, "sequence": True}}, 1),
    "bucket_views": ({**FULL, "sharding": "ddp"}, True),
    "images": (LONG, 1),
    "image_size": ({**LONG, "images": 1}, "512x512"),
    "image_tokens": ({**LONG, "images": 1}, 64),
    "videos": ({**LONG, "video_frames": 4, "videos": 1}, 2),
    "video_frames": ({**LONG, "video_frames": 4, "videos": 1}, 8),
    "audio": (LONG, 1),
    "audio_seconds": ({**LONG, "audio": 1}, 45.0),
    "task": ({}, "grpo"),
    "algorithm": ({**FULL, "task": "dpo"}, "orpo"),
    "method": ({}, "full"),
    "framework": ({}, "trl"),
    "dtype": ({}, "fp32"),
    "mixed_precision": ({"framework": "hf-trainer", "checkpointing": "none"}, "bf16"),
    "quantization": ({}, "nf4"),
    "double_quant": ({"method": "qlora"}, False),
    "master_weights": (FULL, True),
    "gradient_dtype": (FULL, "fp32"),
    "optimizer": (FULL, "sgd"),
    "optimizer_offload": (FULL, True),
    "offload.parameters": ({**FULL, "sharding": "zero3"}, True),
    "offload.device": ({**FULL, "sharding": "zero3", "optimizer_offload": True}, "nvme"),
    "offload.pinned": ({**FULL, "sharding": "zero3", "optimizer_offload": True}, True),
    "optimizer_in_backward": (FULL, True),
    "micro_batch_size": ({}, 4),
    "gradient_accumulation": (FULL, 4),
    "prompt_length": (GRPO, 1024),
    "completion_length": (GRPO, 1024),
    "context": ({}, 4096),
    "num_generations": ({**GRPO, "framework": "vramwise"}, 64),
    "checkpointing": ({}, "none"),
    "checkpoint_every": ({"checkpointing": "every-k"}, 4),
    "offload_keep_layers": ({"checkpointing": "offload"}, 8),
    "attention": ({"checkpointing": "none"}, "eager"),
    "packing": ({"framework": "vramwise", "context": 2048}, True),
    "loss": ({**FULL, "context": 4096}, "chunked"),
    "loss_chunk_rows": ({"framework": "trl", "loss": "chunked"}, 64),
    "entropy": ({"framework": "peft-loop", "method": "full", "loss": "full"}, True),
    "tiled_mlp": ({"framework": "axolotl", "context": 8192, "checkpointing": "full"}, True),
    "neftune": ({"framework": "vramwise"}, True),
    "router_loss": ({"framework": "vramwise"}, False),
    "beta": ({**GRPO, "method": "full"}, 0.1),
    "reference": ({**GRPO, "method": "full", "beta": 0.1}, "offloaded"),
    "evaluation.samples": (FULL, 64),
    "evaluation.batch_size": ({**FULL, "evaluation": {"samples": 64}}, 32),
    "evaluation.logits": ({**FULL, "evaluation": {"samples": 64}}, True),
    "evaluation.accumulation_steps": (GATHERED, 1),
    "save": (FULL, "whole"),
    "resume": (FULL, True),
    "teacher": (DISTILL, "llama-3.1-8b"),
    "teacher_placement": (DISTILL, "served"),
    "teacher_top_k": ({**DISTILL, "context": 8192, "teacher_placement": "served"}, 4096),
    "value_model": ({"task": "ppo"}, "llama-3.1-8b"),
    "reward_model": ({"task": "ppo"}, "none"),
    "negatives": ({"task": "embed", "method": "full"}, 4),
    "mini_batch": ({"task": "embed", "method": "full", "micro_batch_size": 64}, 4),
    "sharding": (FULL, "zero3"),
    "loads": ({**FULL, "sharding": "zero3"}, "full"),
    "buckets.reduce": ({**FULL, "sharding": "zero2"}, 10**8),
    "buckets.prefetch": ({**FULL, "sharding": "zero3", "buckets": {"live": 10**8}}, 10**8),
    "buckets.live": ({**FULL, "sharding": "zero3"}, 10**7),
    "buckets.reuse": ({**FULL, "sharding": "zero3", "buckets": {"live": 10**7}}, 0),
    "buckets.persistence": ({**FULL, "sharding": "zero3", "buckets": {"live": 10**7}}, 10**7),
    "buckets.sub_group": ({**FULL, "sharding": "zero3"}, 10**7),
    "buckets.overlap": ({**FULL, "sharding": "zero2"}, True),
    "buckets.contiguous": ({**FULL, "sharding": "zero2"}, False),
    "buckets.dtype": ({**FULL, "sharding": "zero3"}, "fp32"),
    "parallel.data_replicate": ({**FULL, "sharding": "fsdp2"}, 2),
    "reshard_after_forward": ({**FULL, "sharding": "fsdp2"}, False),
    "reduce_dtype": ({**FULL, "sharding": "fsdp2", "context": 128}, "fp32"),
    "accumulate_sync": (
        {**FULL, "sharding": "fsdp2", "gradient_accumulation": 4, "framework": "hf-trainer"},
        True,
    ),
    "compile": ({"framework": "torchtune"}, True),
    "compile_loss": ({"framework": "torchtitan", "method": "full"}, True),
    "float8": ({"framework": "torchtitan", "method": "full", "compile": True}, "rowwise"),
    "float8_all_gather": (
        {"framework": "torchtitan", "method": "full", "float8": "tensorwise", "sharding": "fsdp"},
        True,
    ),
    "experts_implementation": ({"checkpointing": "none"}, "batched_mm"),
    "expert_capacity_factor": (
        {
            "framework": "peft-loop",
            "experts_implementation": "eager",
            "context": 8192,
            "checkpointing": "full",
            "lora": {"targets": ("q_proj",)},
        },
        1.25,
    ),
    "lora.rank": ({}, 64),
    "lora.targets": ({}, ("q_proj",)),
    "lora.target_parameters": ({"lora": {"targets": ("q_proj",)}}, ("mlp.experts.down_proj",)),
    "lora.dtype": ({}, "fp32"),
    "lora.dora": ({}, True),
    "lora.from": ({}, ADAPTER),
    "lora.init": ({}, "pissa"),
    "lora.bias": ({}, "all"),
    "lora.modules_to_save": ({}, ("lm_head",)),
    "lora.dropout": ({"checkpointing": "none"}, 0.1),
    "engine.kind": (GRPO, "vllm-push"),
    "engine.kv_dtype": (GRPO, "fp8"),
    "engine.kv_bytes": (VLLM, 2**33),
    "engine.gpu_memory_utilization": (VLLM, 0.5),
    "engine.max_num_seqs": (VLLM, 2),
    "engine.max_num_batched_tokens": (VLLM, 65536),
    "engine.block_size": ({**VLLM, "context": 1025}, 512),
    "engine.sleep_level": ({**VLLM, "framework": "trl"}, 2),
    "engine.cuda_graphs": (VLLM, False),
    "engine.tensor_parallel": (SERVE, 2),
    "engine.pipeline_parallel": (SERVE, 2),
    "engine.data_parallel": (SERVE, 2),
    "engine.transfer": ({**GRPO, "engine": {"kind": "vllm-server"}}, "ipc"),
    "engine.sync": (
        {
            **GRPO,
            "method": "full",
            "framework": "trl",
            "sharding": "fsdp2",
            "engine": {"kind": "vllm-push"},
        },
        "model",
    ),
    "engine.expert_parallel": ({**SERVE, "engine": {"tensor_parallel": 4}}, True),
    "engine.offline": (SERVE, True),
    "engine.cpu_offload_gib": (SERVE, 1.0),
    "engine.max_loras": (SERVE, 4),
    "engine.max_lora_rank": ({**SERVE, "engine": {"max_loras": 1}}, 64),
    "engine.prefix_caching": (VLLM, False),
}
"""Field: (a run that reads it, another value)."""

UNREAD: dict[str, tuple[dict[str, Any], Any]] = {
    **{
        f"lora.{name}": (FULL, value)
        for name, value in {
            "rank": 64,
            "targets": "mlp",
            "target_parameters": ("mlp.experts.down_proj",),
            "dtype": "fp32",
            "dora": True,
            "from": ADAPTER,
            "init": "pissa",
            "bias": "all",
            "use_rslora": True,
            "modules_to_save": ("lm_head",),
            "dropout": 0.1,
        }.items()
    },
    "evaluation.samples": (SERVE, 64),
    "evaluation.batch_size": (FULL, 32),
    "evaluation.logits": (FULL, True),
    "evaluation.accumulation_steps": ({**FULL, "evaluation": {"samples": 8}}, 2),
    "save": (SERVE, "whole"),
    "resume": (SERVE, True),
    "optimizer": (SERVE, "sgd"),
    "optimizer_offload": (SERVE, True),
    "neftune": (SERVE, True),
    "router_loss": ({"framework": "vramwise"}, True),
    "offload.parameters": (SERVE, True),
    "offload.device": (FULL, "nvme"),
    "offload.pinned": ({**FULL, "framework": "vramwise", "optimizer_offload": True}, True),
    "master_weights": (SERVE, True),
    "gradient_accumulation": (SERVE, 4),
    "checkpointing": (SERVE, "full"),
    "loss": (SERVE, "chunked"),
    "tiled_mlp": (SERVE, True),
    "mixed_precision": (SERVE, "bf16"),
    "optimizer_in_backward": ({}, True),
    "gradient_dtype": ({}, "fp32"),
    "checkpoint_every": ({"checkpointing": "full"}, 4),
    "compile": (SERVE, True),
    "compile_loss": (GRPO, True),
    "float8": (SERVE, "rowwise"),
    "float8_all_gather": (SERVE, True),
    "offload_keep_layers": ({"checkpointing": "none"}, 8),
    "loss_chunk_rows": ({"framework": "trl-0.15"}, 64),
    "double_quant": ({}, False),
    "num_generations": ({}, 8),
    "beta": ({}, 0.1),
    "reference": ({}, "separate"),
    "engine.kv_dtype": ({}, "fp8"),
    "engine.max_num_seqs": ({}, 2),
    "engine.kv_bytes": (GRPO, 2**33),
    "engine.gpu_memory_utilization": (GRPO, 0.5),
    "engine.max_num_batched_tokens": (GRPO, 65536),
    "engine.block_size": (GRPO, 512),
    "engine.sleep_level": (GRPO, 2),
    "engine.cuda_graphs": (GRPO, False),
    "engine.tensor_parallel": (GRPO, 2),
    "engine.data_parallel": (GRPO, 2),
    "engine.sync": (GRPO, "layer"),
    "engine.transfer": (GRPO, "nccl"),
    "engine.pipeline_parallel": (GRPO, 2),
    "engine.expert_parallel": (GRPO, True),
    "engine.offline": (GRPO, True),
    "engine.max_loras": (GRPO, 4),
    "engine.max_lora_rank": (GRPO, 64),
    "engine.prefix_caching": (GRPO, False),
    "loads": (FULL, "full"),
    "sharding": (FULL, "zero3"),
    "experts_implementation": (FULL, "eager"),
    "expert_capacity_factor": (FULL, 1.25),
}
"""Field: (a run that does not read it, a value that somebody gave)."""


def changed(base: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    section, _, name = field.rpartition(".")
    return {**base, section: {**base.get(section, {}), name: value}} if section else {
        **base,
        field: value,
    }  # fmt: skip


def planned(fields: dict[str, Any], *, gpus: int = 1, model: ModelSpec = MODEL) -> Plan:
    return plan(model, make_recipe(**fields), make_machine("h100-sxm", gpus=gpus))


def sizes(result: Plan) -> tuple[Any, ...]:
    terms = [(phase.name, t.name, t.bytes) for phase in result.phases for t in phase.terms]
    host = [(t.name, t.bytes) for t in result.host_terms]
    return terms, host, result.reserved_peak_bytes, result.high_bytes


def fields() -> set[str]:
    return {name for name, _ in leaves(Recipe())}


def test_every_field_of_a_recipe_is_accounted_for() -> None:
    assert fields() == set(CASES) | set(FIELDS_WITHOUT_BYTES)
    assert not set(CASES) & set(FIELDS_WITHOUT_BYTES)


@pytest.mark.parametrize("field", sorted(CASES))
def test_a_field_moves_the_plan_or_is_named_in_it(field: str) -> None:
    base, value = CASES[field]
    gpus = 2 if field in TWO_CARDS else 4 if field.startswith("engine.") else 1
    model = catalogue_model(EXPERTS) if field in OF_EXPERTS else MODEL
    model = catalogue_model(BIASED) if field in OF_BIASED else model
    model = catalogue_model(RECURRENT) if field in OF_RECURRENT else model
    model = catalogue_model(SEEN) if field in OF_IMAGES else model
    model = catalogue_model(HEARD) if field in OF_SOUNDS else model
    before, after = (
        planned(fields, gpus=gpus, model=model) for fields in (base, changed(base, field, value))
    )
    said = {*after.assumptions, *after.not_modeled} - {*before.assumptions, *before.not_modeled}
    name = field.rpartition(".")[2]
    assert sizes(before) != sizes(after) or any(note.startswith(name) for note in said)
    assert not any(f" {field}" in note for note in after.assumptions if "not read" in note)


@pytest.mark.parametrize("field", sorted(FIELDS_WITHOUT_BYTES))
def test_a_field_without_bytes_moves_nothing(field: str) -> None:
    values = {
        "engine.url": "http://host:1",
        "engine.timeout_s": 5.0,
        "lora.use_rslora": True,
        "parallel.data_shard": -1,
        "parallel.schedule": "1f1b",
        "buckets.allgather": 10**8,
    }
    base = {**FULL, "sharding": "zero2"} if field.startswith("buckets.") else VLLM
    assert sizes(planned(base)) == sizes(planned(changed(base, field, values[field])))
    assert FIELDS_WITHOUT_BYTES[field]


@pytest.mark.parametrize("field", sorted(UNREAD))
def test_a_field_that_this_run_does_not_read_is_said(field: str) -> None:
    base, value = UNREAD[field]
    before, after = planned(base), planned(changed(base, field, value))
    assert sizes(before) == sizes(after)
    notes = [note for note in after.assumptions if note.startswith("not read")]
    assert len(notes) == 1
    assert field in notes[0]
    assert not any(note.startswith("not read") for note in before.assumptions)


def test_an_unknown_algorithm_is_said() -> None:
    notes = planned({**GRPO, "algorithm": "grpoo"}).assumptions
    assert any("algorithm grpoo is not known: planned as grpo" in note for note in notes)
    assert not any(
        "algorithm" in note for note in planned({**GRPO, "algorithm": "dapo"}).assumptions
    )
