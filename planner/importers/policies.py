"""Reinforcement learning of SkyRL, NeMo-RL, AReaL and ROLL: each tool's key table, and what its own words mean.

Read in SkyRL a956457, NeMo-RL 7ea279a, AReaL 4aef98d and ROLL 8eb27cc (2026): their config classes and examples.
"""

import re
from typing import Any

from planner.importers import words
from planner.importers.policy_keys import (
    Policy,
    PolicyKeys,
    compute,
    quiet_prefixes,
    read_lora,
    read_policy,
)
from planner.importers.settings import Imported, Settings, as_bool, as_int
from planner.run.recipe import Loss, Method, Sharding, Task

VERSIONS = {"skyrl": "0.5", "nemo-rl": "0.5", "areal": "1.0", "roll": "0.2"}
_M = "trainer.policy.megatron_config."
_E = "generator.inference_engine."
SKYRL = PolicyKeys(
    law="verl",
    model=("trainer.policy.model.path",),
    critic=("trainer.critic.model.path",),
    rank=("trainer.policy.model.lora.rank",),
    targets=("trainer.policy.model.lora.target_modules",),
    dropout=("trainer.policy.model.lora.dropout",),
    dtype_default="fp32",
    micro=("trainer.micro_train_batch_size_per_gpu",),
    token_budget=("trainer.max_tokens_per_microbatch",),
    prompt=("trainer.max_prompt_length",),
    completion=("generator.sampling_params.max_generate_length",),
    completion_default=1024,
    generations=("generator.n_samples_per_prompt",),
    generations_default=5,
    checkpointing=("trainer.gradient_checkpointing",),
    checkpointing_default=True,
    recompute=(f"{_M}transformer_config_kwargs.recompute_granularity",),
    scoring=("trainer.micro_forward_batch_size_per_gpu",),
    beside=("trainer.ref.",),
    optimizer_offload=(f"{_M}optimizer_config_kwargs.optimizer_cpu_offload",),
    parameter_offload=("trainer.policy.fsdp_config.cpu_offload",),
    utilization=(f"{_E}gpu_memory_utilization", "generator.gpu_memory_utilization"),
    utilization_default=0.8,
    engine_tensor=(f"{_E}tensor_parallel_size", "generator.inference_engine_tensor_parallel_size"),
    max_num_seqs=(f"{_E}max_num_seqs", "generator.max_num_seqs"),
    batched_tokens=(f"{_E}max_num_batched_tokens", "generator.max_num_batched_tokens"),
    eager=(f"{_E}enforce_eager", "generator.enforce_eager"),
    degrees={
        "tensor": (f"{_M}tensor_model_parallel_size",),
        "pipeline": (f"{_M}pipeline_model_parallel_size",),
        "context": (f"{_M}context_parallel_size", "trainer.policy.sequence_parallel_size"),
        "expert": (f"{_M}expert_model_parallel_size",),
        "expert_tensor": (f"{_M}expert_tensor_parallel_size",),
    },
    context_kind="ulysses",
    quiet=quiet_prefixes("skyrl"),
)
_P, _G = "policy.", "policy.generation.vllm_cfg."
NEMO = PolicyKeys(
    law="verl",
    model=("policy.model_name",),
    rank=("lora_rank",),
    targets=(
        "policy.dtensor_cfg.lora_cfg.target_modules",
        "policy.megatron_cfg.peft.target_modules",
    ),
    dtype_default="fp32",
    micro=("policy.train_micro_batch_size",),
    token_budget=("token_budget",),
    whole=("policy.max_total_sequence_length",),
    generations=("grpo.num_generations_per_prompt",),
    generations_default=16,
    checkpointing=(
        "policy.dtensor_cfg.activation_checkpointing",
        "policy.megatron_cfg.activation_checkpointing",
    ),
    recompute=("policy.megatron_cfg.recompute_granularity",),
    scoring=("policy.logprob_batch_size",),
    optimizer=("policy.optimizer.name",),
    optimizer_offload=("policy.megatron_cfg.optimizer.optimizer_cpu_offload",),
    parameter_offload=("policy.dtensor_cfg.cpu_offload",),
    utilization=(f"{_G}gpu_memory_utilization",),
    utilization_default=0.6,
    engine_tensor=(f"{_G}tensor_parallel_size",),
    eager=(f"{_G}enforce_eager",),
    degrees={
        "tensor": (
            "policy.dtensor_cfg.tensor_parallel_size",
            "policy.megatron_cfg.tensor_model_parallel_size",
        ),
        "sequence": (
            "policy.dtensor_cfg.sequence_parallel",
            "policy.megatron_cfg.sequence_parallel",
        ),
        "pipeline": ("policy.megatron_cfg.pipeline_model_parallel_size",),
        "context": (
            "policy.dtensor_cfg.context_parallel_size",
            "policy.megatron_cfg.context_parallel_size",
        ),
        "expert": ("policy.megatron_cfg.expert_model_parallel_size",),
        "expert_tensor": ("policy.megatron_cfg.expert_tensor_parallel_size",),
    },
    quiet=quiet_prefixes("nemo-rl"),
)
AREAL = PolicyKeys(
    law="verl",
    model=("actor.path",),
    critic=("critic.path",),
    rank=("actor.lora_rank",),
    targets=("actor.target_modules",),
    dtype=("actor.dtype",),
    token_budget=("actor.mb_spec.max_tokens_per_mb",),
    prompt=("train_dataset.max_length",),
    prompt_default=1024,
    completion=("gconfig.max_new_tokens",),
    completion_default=16384,
    generations=("gconfig.n_samples",),
    checkpointing=("actor.gradient_checkpointing",),
    recompute=("actor.megatron.recompute_granularity",),
    beside=("ref.",),
    checkpointing_default=True,
    optimizer=("actor.optimizer.type",),
    utilization=("vllm.gpu_memory_utilization", "sglang.mem_fraction_static"),
    utilization_default=0.9,
    engine_tensor=("engine_tensor",),
    degrees={
        "tensor": ("tensor",),
        "pipeline": ("pipeline",),
        "context": ("context",),
        "expert": ("expert",),
    },
    context_kind="ulysses",
    quiet=quiet_prefixes("areal"),
)
_A, _S = "actor_train.", "actor_train.strategy_args.strategy_config."
ROLL = PolicyKeys(
    law="verl",
    model=("pretrain", "actor_train.model_args.model_name_or_path"),
    critic=("critic.model_args.model_name_or_path",),
    rank=("actor_train.model_args.lora_rank", "lora_rank"),
    targets=("actor_train.model_args.lora_target", "lora_target"),
    dtype=("actor_train.model_args.dtype",),
    micro=("actor_train.training_args.per_device_train_batch_size",),
    prompt=("prompt_length",),
    prompt_default=1024,
    completion=("response_length",),
    completion_default=1024,
    whole=("sequence_length",),
    generations=("num_return_sequences_in_group",),
    no_checkpointing=("actor_train.model_args.disable_gradient_checkpointing",),
    recompute=(f"{_S}recompute_granularity",),
    scoring=("actor_train.infer_batch_size",),
    beside=("reference.",),
    utilization=(
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization",
        "actor_infer.strategy_args.strategy_config.mem_fraction_static",
    ),
    utilization_default=0.8,
    engine_tensor=("actor_infer.strategy_args.strategy_config.tensor_parallel_size",),
    degrees={
        "tensor": (f"{_S}tensor_model_parallel_size",),
        "sequence": (f"{_S}sequence_parallel",),
        "pipeline": (f"{_S}pipeline_model_parallel_size",),
        "virtual_stages": (f"{_S}virtual_pipeline_model_parallel_size",),
        "context": (f"{_S}context_parallel_size",),
        "expert": (f"{_S}expert_model_parallel_size",),
    },
    quiet=quiet_prefixes("roll"),
)


def _settings(flat: dict[str, Any], tool: str, version: str | None) -> Settings:
    return Settings(flat, tool=tool, version=version or VERSIONS[tool], assumed=version is None)


def read_skyrl(flat: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return SkyRL's Hydra overrides or YAML as a run."""
    s = _settings(flat, "skyrl", version)
    strategy = str(s.raw("trainer.strategy", to="sharding", default="fsdp"))
    megatron = "megatron" in strategy
    estimator = str(s.raw("trainer.algorithm.advantage_estimator", to="task", default="grpo"))
    together = s.flag("trainer.placement.colocate_all", to="engine.kind", default=True)
    nodes = s.count("trainer.placement.policy_num_nodes", to="gpus", default=1) or 1
    each = s.count("trainer.placement.policy_num_gpus_per_node", to="gpus", default=1) or 1
    kl = s.flag("trainer.algorithm.use_kl_loss", to="reference", default=True)
    kl = kl or s.flag("trainer.algorithm.use_kl_in_reward")
    fused = s.flag("trainer.fused_lm_head_logprob", to="loss")
    policy = Policy(
        sharding=Sharding.ZERO1 if megatron else Sharding.FSDP2,
        gpus=nodes * each,
        colocated=together,
        offloaded=together,  # workers/worker_dispatch: colocated models take turns on the GPU
        reference=kl,
        beta=s.number("trainer.algorithm.kl_loss_coef", to="beta", default=0.001) if kl else 0.0,
        critic=estimator == "gae",
        algorithm=estimator,
        loss=Loss.CHUNKED if fused else Loss.FULL,
        mixed_precision="none" if megatron else "bf16",
        master_weights=megatron or None,
    )
    return read_policy(s, SKYRL, policy)


def read_nemo_rl(flat: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return a NeMo-RL YAML (grpo, and its sft and dpo) as a run."""
    s = _settings(_filled(flat), "nemo-rl", version)
    megatron = s.flag("policy.megatron_cfg.enabled", to="sharding")
    for kind in ("dtensor_cfg.lora_cfg", "megatron_cfg.peft"):
        if s.flag(f"policy.{kind}.enabled", to="method"):
            s.values["lora_rank"] = s.raw(f"policy.{kind}.dim", default=8)
    other = "dtensor_cfg" if megatron else "megatron_cfg"  # the engine that is not used
    s.quiet(f"=policy.{other}.", "=data_plane.", "=policy.generation.refit_cfg.")
    if s.raw("policy.generation.backend") != "megatron":
        s.quiet("=policy.generation.mcore_generation_config.")
    s.raw("policy.sequence_packing.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens")
    packed = s.flag("policy.sequence_packing.enabled") or s.flag("policy.dynamic_batching.enabled")
    length = as_int(s.values.get("policy.max_total_sequence_length")) or 512
    micro = as_int(s.values.get("policy.train_micro_batch_size")) or 1
    if packed:
        s.values["token_budget"] = length * micro
    nodes = s.count("cluster.num_nodes", to="gpus", default=1) or 1
    each = s.count("cluster.gpus_per_node", to="gpus", default=1) or 1
    together = s.flag("policy.generation.colocated.enabled", to="engine.kind", default=True)
    s.without_disabled()
    beta = s.number("loss_fn.reference_policy_kl_penalty", to="beta", default=0.01)
    task = next(
        (
            name
            for name in ("dpo", "sft", "distillation")
            if any(k.startswith(f"{name}.") for k in flat)
        ),
        "",
    )
    if task in ("dpo", "sft"):
        return _nemo_supervised(s, Task.DPO if task == "dpo" else Task.SFT, nodes * each, megatron)
    s.values.pop("policy.generation.max_new_tokens", None)
    policy = Policy(
        sharding=Sharding.ZERO1 if megatron else Sharding.FSDP2,
        gpus=nodes * each,
        colocated=together,
        offloaded=together,  # nemo_rl/algorithms/grpo.py: offload_after_refit
        reference=bool(beta),
        beta=beta,
        algorithm="grpo",
        mixed_precision="none" if megatron else "bf16",
        master_weights=megatron or None,
        reference_offloaded=True,
    )
    if task == "distillation":
        s.unread(
            "teacher",
            s.values.get("teacher.model_name"),
            "its forward passes on the same GPUs: not planned",
        )
        s.quiet("teacher.")
    return read_policy(s, NEMO, policy)


def _nemo_supervised(s: Settings, task: Task, gpus: int, megatron: bool) -> Imported:
    recipe: dict[str, Any] = {
        "framework": "verl" if task is Task.SFT else "hf-trainer",
        "task": task,
    }
    model = str(s.raw(*NEMO.model, to="model", default=""))
    lora = read_lora(s, NEMO)
    recipe["method"] = Method.LORA if lora else Method.FULL
    recipe["dtype"], recipe["mixed_precision"] = ("bf16", "none") if megatron else ("fp32", "bf16")
    recipe["context"] = s.count(*NEMO.whole, to="context", default=1024)
    recipe["micro_batch_size"] = s.count(*NEMO.micro, to="micro_batch_size", default=1)
    compute(s, recipe, NEMO)
    recipe["sharding"] = Sharding.ZERO1 if megatron else Sharding.FSDP2
    if task is Task.DPO:
        recipe["reference"] = words.reference(recipe["method"], needed=True)
    s.quiet(*NEMO.quiet)
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)


_BACKEND = re.compile(r"(?:(?P<engine>\w+)(?:\[[^\]]*\])?:)?(?P<dims>(?:[dptce]\d+)+)")


def read_areal(flat: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return an AReaL YAML as a run: backend "fsdp:d4p1t1", or allocation_mode "sglang:d4+fsdp:d4"."""
    s = _settings(_filled(flat), "areal", version)
    mode = str(s.raw("allocation_mode", to="parallel", default=""))
    own = str(
        s.raw("actor.backend", to="parallel", default="") or mode.split("+")[-1].split("|")[-1]
    )
    engine = str(s.raw("rollout.backend", to="engine", default="") or mode.split("+")[0])
    dims, served = _dims(own), _dims(engine)
    for name, letter in (("tensor", "t"), ("pipeline", "p"), ("context", "c"), ("expert", "e")):
        s.values[name] = dims.get(letter)
    s.values["engine_tensor"] = served.get("t")
    gpus = dims.get("d", 1) * dims.get("t", 1) * dims.get("p", 1) * dims.get("c", 1)
    if not as_bool(s.values.get("actor.use_lora")):  # the rank has a default of its own
        s.values.pop("actor.lora_rank", None)
    s.raw("actor.use_lora", "actor.lora_rank", "actor.target_modules", "actor.lora_alpha")
    beta = s.number("actor.kl_ctl", to="beta", default=0.1)
    fsdp = "megatron" not in own
    policy = Policy(
        sharding=Sharding.FSDP2 if fsdp else Sharding.ZERO1,
        gpus=gpus,
        colocated="|" in mode,
        reference=bool(beta) and s.has("ref.path"),
        beta=beta,
        critic=s.has("critic.path"),
        algorithm="grpo",
    )
    if as_bool(s.values.get("actor.is_critic")):
        s.effect("is_critic: a reward model is trained; planned as a policy, an upper bound")
    return read_policy(s, AREAL, policy)


def _dims(word: str) -> dict[str, int]:
    match = _BACKEND.search(word)
    return (
        {key: int(count) for key, count in re.findall(r"([dptce])(\d+)", match["dims"])}
        if match
        else {}
    )


def _filled(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with ${other.key} put in, as OmegaConf does."""
    found = dict(flat)
    for _ in range(5):
        for key, value in found.items():
            if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
                found[key] = found.get(match.group(1), value)
    return found


def read_roll(flat: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return a ROLL pipeline's YAML (rlvr, agentic) as a run."""
    s = _settings(_filled(flat), "roll", version)
    strategy = str(
        s.raw(f"{_A}strategy_args.strategy_name", to="sharding", default="megatron_train")
    )
    megatron = "megatron" in strategy
    trains, infers = (
        _devices(s.raw(f"{name}.device_mapping", to="gpus"))
        for name in ("actor_train", "actor_infer")
    )
    estimator = str(s.raw("adv_estimator", to="task", default="gae"))
    beta = s.number("init_kl_coef", "kl_loss_coef", to="beta", default=0.02)
    zero = next(
        (int(d) for d in re.findall(r"zero(\d)", strategy + str(s.values.get(_S.rstrip("."), "")))),
        3,
    )
    s.quiet(f"{_S}bf16", f"{_S}zero_optimization")
    sharding = (
        Sharding.ZERO1
        if megatron
        else Sharding.FSDP2
        if "fsdp" in strategy
        else {2: Sharding.ZERO2, 3: Sharding.ZERO3}.get(zero, Sharding.ZERO3)
    )
    if any(key in flat for key in ("chosen_key", "rejected_key")):
        return _roll_pairs(s, sharding, len(trains) or None)
    together = bool(trains & infers) if trains and infers else True
    policy = Policy(
        sharding=sharding,
        gpus=len(trains) or s.count("num_gpus_per_node", to="gpus"),
        colocated=together,
        offloaded=together,  # roll/pipeline: actor_train.offload_states before the engine wakes
        reference=any(k.startswith("reference.") for k in flat),
        beta=beta,
        critic=estimator == "gae" and any(k.startswith("critic.") for k in flat),
        algorithm=estimator,
        mixed_precision="none",
        master_weights=True,
        reference_offloaded=True,
    )
    return read_policy(s, ROLL, policy)


def _roll_pairs(s: Settings, sharding: Sharding, gpus: int | None) -> Imported:
    """Return a DPO pipeline, whose rows hold prompt and answer of `sequence_length`."""
    recipe: dict[str, Any] = {"framework": "hf-trainer", "task": Task.DPO, "sharding": sharding}
    model = str(s.raw(*ROLL.model, to="model", default=""))
    lora = read_lora(s, ROLL)
    recipe["method"] = Method.LORA if lora else Method.FULL
    recipe["dtype"], recipe["mixed_precision"] = "bf16", "none"
    recipe["master_weights"] = recipe["method"] is Method.FULL or None
    recipe["context"] = s.count("sequence_length", to="context", default=1024)
    recipe["micro_batch_size"] = s.count(*ROLL.micro, to="micro_batch_size", default=1)
    recipe["beta"] = s.number("beta", to="beta", default=0.1)
    recipe["reference"] = words.reference(recipe["method"], needed=True)
    compute(s, recipe, ROLL)
    s.quiet(*ROLL.quiet, "chosen", "rejected", "prompt_")
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)


def _devices(word: Any) -> set[int]:
    """Return the GPUs of list(range(0,8)) + list(range(16,24)), [0,1] or 0-7."""
    text = str(word or "")
    found: set[int] = set()
    for low, high in re.findall(r"range\((?:(\d+)\s*,\s*)?(\d+)\)", text):
        found |= set(range(int(low or 0), min(int(high), int(low or 0) + 4096)))
    if not found and re.fullmatch(r"\[[\d,\s]+\]", text):
        found = {int(part) for part in re.findall(r"\d+", text)}
    return found
