"""OpenRLHF: `openrlhf.cli.train_*` with flat flags (up to 0.9) or dotted ones (0.10 on), shell and Ray job.

Read in 0.11.0: openrlhf/cli/train_{sft,rm,dpo,ppo_ray}.py, utils/deepspeed/deepspeed_utils.py.
"""

import re
from typing import Any

from planner.importers import words
from planner.importers.context import Context
from planner.importers.launch import apply_launch, finish_sharding, from_deepspeed, set_degrees
from planner.importers.launchers import Started
from planner.importers.policy_keys import Policy, PolicyKeys, quiet_prefixes, read_policy
from planner.importers.settings import Imported, Settings
from planner.importers.shell import flags
from planner.run.recipe import Loss, Method, Sharding, Task

VERSION, OLD = "0.11.0", "0.9.0"
_MODULE = re.compile(
    r"openrlhf[./]cli[./]train_(\w+?)(?:\.py)?$|(?:^|/)train_(ppo_ray|ppo|sft|rm|dpo|kto|kd|prm)\.py$"
)
_TASKS = {
    "sft": Task.SFT,
    "rm": Task.REWARD,
    "prm": Task.SFT,
    "dpo": Task.DPO,
    "kto": Task.KTO,
    "kd": Task.DISTILL,
    "ppo": Task.PPO,
    "ppo_ray": Task.PPO,
}
_NEW = {
    "pretrain": ("model.model_name_or_path", "actor.model_name_or_path"),
    "reward_pretrain": ("reward.model_name_or_path",),
    "critic_pretrain": ("critic.model_name_or_path",),
    "remote_rm_url": ("reward.remote_url",),
    "teacher_model": ("teacher.model_name_or_path",),
    "ref_offload": ("ref.offload",),
    "max_len": ("data.max_len",),
    "micro_train_batch_size": ("train.micro_batch_size",),
    "train_batch_size": ("train.batch_size",),
    "zero_stage": ("ds.zero_stage",),
    "param_dtype": ("ds.param_dtype",),
    "gradient_checkpointing": (
        "model.gradient_checkpointing_enable",
        "actor.gradient_checkpointing_enable",
    ),
    "adam_offload": ("ds.adam_offload",),
    "load_in_4bit": ("ds.load_in_4bit",),
    "lora_rank": ("ds.lora.rank",),
    "target_modules": ("ds.lora.target_modules",),
    "lora_dropout": ("ds.lora.dropout",),
    "packing_samples": ("ds.packing_samples",),
    "attn_implementation": ("ds.attn_implementation",),
    "use_liger_kernel": ("ds.use_liger_kernel",),
    "ring_attn_size": ("ds.ring_attn_size",),
    "ds_tensor_parallel_size": ("ds.tensor_parallel_size",),
    "prompt_max_len": ("data.prompt_max_len", "rollout.prompt_max_len"),
    "generate_max_len": ("rollout.max_new_tokens", "data.generate_max_len"),
    "n_samples_per_prompt": ("rollout.n_samples_per_prompt",),
    "max_tokens_per_gpu": ("train.max_tokens_per_gpu",),
    "use_dynamic_batch": ("train.dynamic_batch_enable",),
    "advantage_estimator": ("algo.advantage.estimator",),
    "init_kl_coef": ("algo.kl.init_coef",),
    "colocate_all_models": ("train.colocate_all",),
    "colocate_actor_ref": ("train.colocate_actor_ref",),
    "vllm_num_engines": ("vllm.num_engines",),
    "vllm_tensor_parallel_size": ("vllm.tensor_parallel_size",),
    "vllm_gpu_memory_utilization": ("vllm.gpu_memory_utilization",),
    "vllm_enable_sleep": ("vllm.enable_sleep",),
    "enforce_eager": ("vllm.enforce_eager",),
    "actor_num_nodes": ("actor.num_nodes",),
    "actor_num_gpus_per_node": ("actor.num_gpus_per_node",),
    "beta": ("model.beta",),
    "optim": (),
}
"""Flag up to 0.9 -> what it is called from 0.10 on."""
_QUIET = quiet_prefixes("openrlhf")
KEYS = PolicyKeys(
    law="hf-trainer",
    model=("pretrain",),
    critic=("critic_pretrain",),
    rank=("lora_rank",),
    targets=("target_modules",),
    dropout=("lora_dropout",),
    dtype=("param_dtype",),
    micro=("micro_train_batch_size",),
    token_budget=("token_budget",),
    prompt=("prompt_max_len",),
    prompt_default=1024,
    completion=("generate_max_len",),
    completion_default=1024,
    whole=("max_len",),
    generations=("n_samples_per_prompt",),
    checkpointing=("gradient_checkpointing",),
    optimizer_offload=("adam_offload",),
    attention=("attn_implementation",),
    utilization=("vllm_gpu_memory_utilization",),
    utilization_default=0.95,
    engine_tensor=("vllm_tensor_parallel_size",),
    eager=("enforce_eager",),
    degrees={"tensor": ("ds_tensor_parallel_size",), "context": ("ring_attn_size",)},
    quiet=_QUIET,
)


def from_command(started: Started, context: Context) -> Imported | None:
    """Return the run of an OpenRLHF command, or None."""
    match = _MODULE.search(started.program)
    given = flags(started.arguments)
    if not match or not ({"pretrain", *_NEW["pretrain"]} & set(given)):
        return None
    kind = next(part for part in match.groups() if part)
    return read(
        given, _TASKS.get(kind, Task.SFT), gpus=started.gpus, version=context.version_of("openrlhf")
    )


def read(
    given: dict[str, Any], task: Task, *, gpus: int | None = None, version: str | None = None
) -> Imported:
    """Return OpenRLHF's flags as a run."""
    dotted = any("." in key for key in given)
    why = "dotted flags are 0.10's" if dotted else "flags without dots are 0.9's and older"
    renamed = {new: old for old, names in _NEW.items() for new in names}
    values = {renamed.get(key, key): value for key, value in given.items()}
    settings = Settings(
        values,
        tool="openrlhf",
        version=version or (VERSION if dotted else OLD),
        assumed=version is None,
        why=why,
    )
    if task is Task.PPO:
        return _policy(settings)
    return _supervised(settings, task, gpus)


def _zero(settings: Settings, recipe: dict[str, Any]) -> None:
    """Write DeepSpeed's stage: 16-bit weights beside fp32 master and states, divided by stage."""
    stage = settings.count("zero_stage", to="sharding", off=True) or (
        0 if settings.has("zero_stage") else 2
    )
    section: dict[str, Any] = {"stage": stage}
    if settings.flag("adam_offload", to="optimizer_offload"):
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    apply_launch(settings, recipe, from_deepspeed({"zero_optimization": section}))


def _supervised(settings: Settings, task: Task, gpus: int | None) -> Imported:
    recipe: dict[str, Any] = {"framework": KEYS.law, "task": task}
    model = str(settings.raw("pretrain", to="model", default=""))
    rank = settings.count("lora_rank", to="lora.rank", off=True)
    four = settings.flag("load_in_4bit", to="quantization")
    recipe["method"] = Method.FULL if not rank else Method.QLORA if four else Method.LORA
    if four and rank:
        recipe["quantization"], recipe["double_quant"] = "nf4", True
    recipe["dtype"] = words.dtype(settings.raw("param_dtype", to="dtype", default="bf16")) or "bf16"
    recipe["mixed_precision"] = "none"
    micro = settings.count("micro_train_batch_size", to="micro_batch_size", default=1) or 1
    recipe["micro_batch_size"] = micro
    whole = settings.count("train_batch_size", to="gradient_accumulation", default=128) or 128
    recipe["gradient_accumulation"] = max(1, whole // (micro * (gpus or 1)))
    recipe["context"] = settings.count("max_len", to="context", default=2048)
    recipe["packing"] = settings.flag("packing_samples", to="packing")
    on = settings.flag("gradient_checkpointing", to="checkpointing")
    recipe["checkpointing"] = words.checkpointing(on)
    chosen = settings.raw("attn_implementation", to="attention")
    recipe["attention"] = words.attention(chosen) or "flash"
    recipe["loss"] = Loss.CHUNKED if settings.flag("use_liger_kernel", to="loss") else Loss.FULL
    recipe["optimizer"] = words.optimizer(settings, settings.raw("optim", default="adam fused"))
    _zero(settings, recipe)
    if task in (Task.DPO, Task.KTO):
        recipe["beta"] = settings.number("beta", to="beta", default=0.1)
        offloaded = settings.flag("ref_offload", to="reference")
        found = words.reference(recipe["method"], needed=True)
        recipe["reference"] = (
            "offloaded" if offloaded and recipe["method"] is Method.FULL else found
        )
    if task is Task.DISTILL:
        recipe["teacher"] = str(settings.raw("teacher_model", to="teacher", default="")) or None
    gpus = set_degrees(
        settings,
        recipe,
        gpus,
        context=settings.count("ring_attn_size", to="parallel.context", off=True),
        tensor=settings.count("ds_tensor_parallel_size", to="parallel.tensor", off=True),
    )
    lora = {}
    if rank:
        named = settings.raw("target_modules", to="lora.targets", default="all-linear")
        lora = {"rank": rank, "targets": words.lora_targets(named)}
    settings.quiet(*_QUIET)
    gpus = finish_sharding(settings, recipe, gpus)
    return settings.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)


def _policy(settings: Settings) -> Imported:
    nodes = settings.count("actor_num_nodes", to="gpus", default=1) or 1
    each = settings.count("actor_num_gpus_per_node", to="gpus", default=8) or 8
    stage = settings.count("zero_stage", to="sharding", off=True) or (
        0 if settings.has("zero_stage") else 2
    )
    shard = {1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}.get(stage, Sharding.DDP)
    estimator = str(settings.raw("advantage_estimator", to="task", default="gae"))
    remote = settings.raw("remote_rm_url", to="reward_model")
    judge = settings.raw("reward_pretrain", to="reward_model")
    beta = settings.number("init_kl_coef", to="beta", default=0.01)
    if settings.flag("use_dynamic_batch", to="micro_batch_size"):
        settings.values["token_budget"] = settings.raw("max_tokens_per_gpu", default=16192)
    together = settings.flag("colocate_all_models", to="engine.kind")
    beside = settings.flag("colocate_actor_ref", to="reference") or together
    critic = estimator == "gae"
    if critic and not together:
        settings.effect(
            "critic and reference have GPUs of their own: planned on the policy's, an upper bound"
        )
    elif beta and not beside:
        settings.effect("the reference has GPUs of its own: none of it is on the policy's")
    engines = settings.count("vllm_num_engines", to="engine.kind", off=True)
    policy = Policy(
        sharding=shard,
        gpus=nodes * each,
        colocated=together,
        sleeps=settings.flag("vllm_enable_sleep", to="engine.sleep_level"),
        reference=bool(beta) and (beside or critic),
        beta=beta,
        critic=critic,
        reward_model=str(judge) if judge and not remote else None,
        mixed_precision="none",
        master_weights=shard is not Sharding.DDP,
        engine=bool(engines),
        reference_offloaded=settings.flag("ref_offload", to="reference"),
    )
    if not engines:
        settings.effect("no vLLM engines: the actor generates itself")
    settings.raw("load_in_4bit", "packing_samples", "optim")
    return read_policy(settings, KEYS, policy)
