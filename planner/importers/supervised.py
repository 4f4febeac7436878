"""LitGPT (0.5), llm-foundry (0.22) and xtuner (0.2) configs, and prime-rl's TOML (0.8)."""

import re
from typing import Any

from planner.importers import words
from planner.importers.fsdp_config import from_fsdp_config
from planner.importers.launch import apply_launch, deepspeed_setting, finish_sharding, set_degrees
from planner.importers.policy_keys import (
    Policy,
    PolicyKeys,
    compute,
    quiet_prefixes,
    read_lora,
    read_policy,
)
from planner.importers.python_calls import Calls
from planner.importers.settings import Imported, Settings, as_names
from planner.run.recipe import Checkpointing, Loss, Method, Sharding, Task

VERSIONS = {"litgpt": "0.5.13", "llm-foundry": "0.22", "xtuner": "0.2", "prime-rl": "0.8.0"}


def _settings(flat: dict[str, Any], tool: str, version: str | None) -> Settings:
    return Settings(flat, tool=tool, version=version or VERSIONS[tool], assumed=version is None)


def read_litgpt(flat: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return a LitGPT config_hub YAML as a run (litgpt/finetune/{full,lora}.py)."""
    s = _settings(flat, "litgpt", version)
    recipe: dict[str, Any] = {"framework": "litgpt", "task": Task.SFT}
    model = str(s.raw("checkpoint_dir", "model_name", to="model", default="")).removeprefix(
        "checkpoints/"
    )
    rank = s.count("lora_r", to="lora.rank")
    quantize = s.raw("quantize", to="quantization")
    method = Method.FULL if not rank else Method.QLORA if quantize else Method.LORA
    recipe["method"] = method
    if quantize:
        recipe["quantization"] = (
            "int8" if "int8" in str(quantize) else "fp4" if "fp4" in str(quantize) else "nf4"
        )
        recipe["double_quant"] = str(quantize).endswith("-dq")
    precision = str(s.raw("precision", to="dtype", default="bf16-true"))
    recipe["dtype"] = (
        "fp32" if precision.endswith("mixed") else words.dtype(precision.split("-")[0]) or "bf16"
    )
    recipe["mixed_precision"] = precision.split("-")[0] if precision.endswith("mixed") else "none"
    micro = s.count("train.micro_batch_size", to="micro_batch_size", default=1) or 1
    gpus = 1
    if str(s.values.get("devices")) == "auto":
        s.raw("devices", to="gpus")
        s.effect("devices auto is every GPU of the machine: give --gpus (planned on one)")
    else:
        gpus = s.count("devices", to="gpus", default=1) or 1
    gpus *= s.count("num_nodes", to="gpus") or 1
    whole = s.count("train.global_batch_size", to="gradient_accumulation", default=16) or 16
    recipe["micro_batch_size"] = micro
    recipe["gradient_accumulation"] = max(1, whole // (micro * gpus))
    recipe["context"] = s.count("train.max_seq_length", to="context", default=2048)
    optimizer = s.raw("optimizer.class_path", "optimizer", to="optimizer", default="AdamW")
    recipe["optimizer"] = words.optimizer(s, optimizer)
    lora: dict[str, Any] = {}
    if rank:
        parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "projection": "o_proj"}
        usual = ("query", "value")
        names = [
            name
            for part, name in parts.items()
            if s.flag(f"lora_{part}", to="lora.targets", default=part in usual)
        ]
        names += (
            ["gate_proj", "up_proj", "down_proj"] if s.flag("lora_mlp", to="lora.targets") else []
        )
        names += ["lm_head"] if s.flag("lora_head", to="lora.targets") else []
        lora = {
            "rank": rank,
            "targets": tuple(names),
            "dropout": s.number("lora_dropout", to="lora.dropout", default=0.05),
        }
    recipe["checkpointing"] = Checkpointing.NONE
    if gpus > 1:
        recipe["sharding"] = Sharding.FSDP
        recipe["checkpointing"] = Checkpointing.FULL
        s.effect("several devices: FSDP with activation checkpointing of each block")
    s.quiet(
        "data",
        "train.",
        "eval.",
        "out_dir",
        "logger",
        "optimizer.",
        "lora_alpha",
        "tokenizer",
        "resume",
    )
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)


def read_llm_foundry(
    flat: dict[str, Any], *, version: str | None = None, gpus: int | None = None
) -> Imported:
    """Return an llm-foundry training YAML as a run; the composer launcher gives the GPUs."""
    s = _settings(_resolved(flat), "llm-foundry", version)
    recipe: dict[str, Any] = {"framework": "hf-trainer", "task": Task.SFT}
    model = str(
        s.raw("model.pretrained_model_name_or_path", "tokenizer.name", to="model", default="")
    )
    peft = s.mapping("model.peft_config") or {}
    method = Method.LORA if peft else Method.FULL
    recipe["method"] = method
    precision = str(s.raw("precision", to="mixed_precision", default="amp_bf16"))
    recipe["dtype"] = "fp32" if precision.startswith("amp") else words.dtype(precision) or "fp32"
    recipe["mixed_precision"] = words.dtype(precision.removeprefix("amp_")) or "none"
    micro = 1
    if str(s.values.get("device_train_microbatch_size")) == "auto":
        s.raw("device_train_microbatch_size", to="micro_batch_size")
        s.effect(
            "device_train_microbatch_size auto: Composer tries smaller ones until it fits; planned as 1"
        )
    else:
        micro = s.count("device_train_microbatch_size", to="micro_batch_size", default=1) or 1
    recipe["micro_batch_size"] = micro
    whole = s.count("global_train_batch_size", to="gradient_accumulation") or micro
    recipe["gradient_accumulation"] = max(1, whole // (micro * (gpus or 1)))
    recipe["context"] = s.count(
        "max_seq_len",
        "variables.max_seq_len",
        "train_loader.dataset.max_seq_len",
        to="context",
        default=2048,
    )
    recipe["packing"] = s.raw("train_loader.dataset.packing_ratio") is not None
    name = str(s.raw("optimizer.name", to="optimizer", default="decoupled_adamw"))
    recipe["optimizer"] = words.optimizer(s, name)
    section = s.mapping("fsdp_config") or s.mapping("parallelism_config.fsdp")
    recipe["checkpointing"] = Checkpointing.NONE
    if section:
        launch = from_fsdp_config(section)
        apply_launch(s, recipe, launch)
    chosen = s.raw(
        "model.config_overrides.attn_config.attn_impl",
        "model.attn_config.attn_impl",
        to="attention",
    )
    recipe["attention"] = words.attention(chosen) or (
        "flash" if s.flag("model.use_flash_attention_2") else "sdpa"
    )
    lora = {}
    if peft:
        named = peft.get("target_modules")
        lora = {
            "rank": s.count("model.peft_config.r", to="lora.rank", default=8),
            "targets": words.lora_targets(named) if named else "all-linear",
        }
    s.quiet(*quiet_prefixes("llm-foundry"))
    gpus = finish_sharding(s, recipe, gpus)
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)


def _resolved(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with ${variables.x} and ${x} put in."""

    def fill(value: Any) -> Any:
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        return flat.get(match.group(1), value) if match else value

    return {key: fill(value) for key, value in flat.items()}


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def read_xtuner(calls: Calls, names: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return an xtuner Python config (mmengine) as a run: `model = dict(llm=dict(...), lora=dict(...))`."""
    whole = _section(names, "model")
    llm, lora_given = _section(whole, "llm"), _section(whole, "lora")
    quant, wrapper = _section(llm, "quantization_config"), _section(names, "optim_wrapper")
    scalars = {
        key: value for key, value in names.items() if isinstance(value, (str, int, float, bool))
    }
    plain = {f"lora.{key}": lora_given.get(key) for key in ("r", "lora_dropout")}
    s = _settings({**scalars, **plain}, "xtuner", version)
    recipe: dict[str, Any] = {"framework": "hf-trainer", "task": Task.SFT}
    model = str(
        s.raw(
            "pretrained_model_name_or_path",
            "model_name_or_path",
            "llm_name_or_path",
            to="model",
            default="",
        )
    )
    four, eight = quant.get("load_in_4bit") is True, quant.get("load_in_8bit") is True
    method = Method.FULL if not lora_given else Method.QLORA if four else Method.LORA
    recipe["method"] = method
    if lora_given and (four or eight):
        recipe["quantization"] = "nf4" if four else "int8"
        recipe["double_quant"] = quant.get("bnb_4bit_use_double_quant") is True
    recipe["dtype"] = words.dtype(llm.get("torch_dtype")) or "fp16"
    recipe["mixed_precision"] = words.dtype(wrapper.get("dtype")) or "fp16"
    recipe["micro_batch_size"] = s.count("batch_size", to="micro_batch_size", default=1)
    recipe["gradient_accumulation"] = s.count(
        "accumulative_counts", to="gradient_accumulation", default=1
    )
    recipe["context"] = s.count("max_length", "max_dataset_length", to="context", default=2048)
    recipe["packing"] = s.flag("pack_to_max_length", to="packing", default=True)
    recipe["checkpointing"] = Checkpointing.FULL
    s.defaulted("checkpointing", "full (SupervisedFinetune use_activation_checkpointing=True)")
    reward = any("RewardModel" in name for name in calls.by_name)
    if any("DPO" in name for name in (*calls.by_name, *map(str, whole.values()))):
        recipe["task"] = Task.DPO
        recipe["reference"] = words.reference(method, needed=True)
    elif reward:
        recipe["task"] = Task.REWARD
    lora: dict[str, Any] = {}
    if lora_given:
        lora = {
            "rank": s.count("lora.r", to="lora.rank", default=8),
            "targets": "all-linear",
            "dropout": s.number("lora.lora_dropout", to="lora.dropout"),
        }
        named = as_names(lora_given.get("target_modules"))
        if named:
            lora["targets"] = named
    gpus = set_degrees(
        s,
        recipe,
        None,
        context=s.count("sequence_parallel_size", to="parallel.context"),
        context_kind="ulysses",
    )
    s.quiet("")
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)


def with_deepspeed(found: Imported, name: str) -> Imported:
    """Return an xtuner run with the DeepSpeed preset of `xtuner train --deepspeed deepspeed_zero2`."""
    s = Settings({}, tool=found.tool, version=found.version, assumed=False)
    s.report = found.report
    recipe: dict[str, Any] = {"dtype": found.run.recipe.dtype, "method": found.run.recipe.method}
    apply_launch(s, recipe, deepspeed_setting(s, name, None))
    run = found.run.model_copy(update={"recipe": found.run.recipe.model_copy(update=recipe)})
    return Imported(
        tool=found.tool, version=found.version, run=run, report=found.report, values=found.values
    )


_T = "trainer.model."
PRIME = PolicyKeys(
    law="torchtitan",
    model=("model.name", "trainer.model.name"),
    rank=(f"{_T}lora.rank", "model.lora.rank"),
    targets=(f"{_T}lora.target_modules", "model.lora.target_modules"),
    dropout=(f"{_T}lora.dropout", "model.lora.dropout"),
    dtype_default="fp32",
    micro=("trainer.micro_batch_size", "orchestrator.micro_batch_size", "data.micro_batch_size"),
    completion=(
        "orchestrator.train.sampling.max_completion_tokens",
        "orchestrator.sampling.max_tokens",
    ),
    whole=("seq_len", f"{_T}seq_len", "orchestrator.seq_len", "data.seq_len", "model.seq_len"),
    generations=("orchestrator.group_size", "orchestrator.rollouts_per_example"),
    checkpointing=("recomputes",),
    checkpointing_default=True,
    optimizer=("trainer.optim.type", "optim.type"),
    optimizer_offload=(f"{_T}optim_cpu_offload", "model.optim_cpu_offload"),
    parameter_offload=(f"{_T}fsdp_cpu_offload", "model.fsdp_cpu_offload"),
    attention=(f"{_T}attn", "model.attn"),
    utilization=("inference.vllm.gpu_memory_utilization", "inference.gpu_memory_utilization"),
    engine_tensor=("inference.vllm.tensor_parallel_size", "inference.parallel.tp"),
    degrees={
        "context": (f"{_T}cp", "model.cp"),
        "expert": (f"{_T}ep", "model.ep"),
        "data_replicate": (f"{_T}dp_replicate", "model.dp_replicate"),
    },
    quiet=quiet_prefixes("prime-rl"),
)


def is_prime(document: dict[str, Any]) -> bool:
    """Return whether a TOML document is prime-rl's: an RL run, its trainer alone, or its SFT."""
    keys = set(document)
    if {"orchestrator", "inference"} & keys and {
        "model",
        "trainer",
        "seq_len",
        "deployment",
    } & keys:
        return True
    return "model" in keys and "data" in keys and bool({"optim", "deployment", "ckpt"} & keys)


def read_prime(flat: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return a prime-rl TOML as a run; trainer and inference have GPUs of their own."""
    s = _settings(flat, "prime-rl", version)
    supervised = not any(key.startswith(("orchestrator", "trainer", "inference.")) for key in flat)
    nodes = s.count("deployment.num_train_nodes", to="gpus")
    gpus = (
        nodes * (s.count("deployment.gpus_per_node", to="gpus", default=8) or 8)
        if nodes
        else s.count("deployment.num_train_gpus", "trainer_gpu_ids", to="gpus", default=1)
    )
    mode = s.raw(f"{_T}ac.mode", "model.ac.mode", to="checkpointing", default="full")
    s.values["recomputes"] = str(mode) != "none"
    s.used.add("recomputes")
    fused = s.raw(
        f"{_T}fused_lm_head_token_chunk_size",
        "model.fused_lm_head_token_chunk_size",
        to="loss",
        default=8192,
    )
    for prefix in (_T, "model."):
        if str(s.values.get(f"{prefix}ep", "")) == "auto":
            s.values.pop(f"{prefix}ep")
    if str(mode) == "selective":
        s.effect("ac.mode selective recomputes norms alone: planned as full, a lower bound")
    policy = Policy(
        sharding=Sharding.FSDP2,
        gpus=gpus,
        colocated=False,
        beta=0.0,
        algorithm="grpo",
        loss=Loss.FULL if str(fused) == "disabled" else Loss.CHUNKED,
        engine=not supervised,
    )
    keys = PRIME
    if supervised:
        return _prime_sft(s, gpus, policy)
    return read_policy(s, PolicyKeys(**{**vars(keys), "law": "verl"}), policy)


def _prime_sft(s: Settings, gpus: int | None, policy: Policy) -> Imported:
    recipe: dict[str, Any] = {
        "framework": "torchtitan",
        "task": Task.SFT,
        "dtype": "fp32",
        "mixed_precision": "bf16",
    }
    model = str(s.raw(*PRIME.model, to="model", default="Qwen/Qwen3-0.6B"))
    lora = read_lora(s, PRIME)
    recipe["method"] = Method.LORA if lora else Method.FULL
    recipe["context"] = s.count(*PRIME.whole, to="context", default=128)
    recipe["micro_batch_size"] = s.count("data.micro_batch_size", to="micro_batch_size", default=1)
    recipe["packing"], recipe["loss"] = True, policy.loss
    compute(s, recipe, PRIME)
    recipe["sharding"] = Sharding.FSDP2
    s.quiet(*PRIME.quiet)
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)
