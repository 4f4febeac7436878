"""verl Hydra overrides (0.9.1: verl/trainer/config, _generated_ppo_trainer.yaml)."""

import re
from typing import Any

from planner.errors import UnsupportedError
from planner.importers import words
from planner.importers.launch import set_degrees
from planner.importers.launchers import started
from planner.importers.settings import Imported, Settings
from planner.importers.shell import Script
from planner.run.recipe import Checkpointing, EngineKind, Loss, Method, Reference, Sharding, Task

VERSION = "0.9.1"
_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_M, _F = "actor_rollout_ref.model.", "actor_rollout_ref.ref."


def read_script(script: Script, *, version: str | None = None) -> Imported | None:
    """Return the run of the first `verl.trainer` command, or None."""
    for command, environment in zip(script.commands, script.prefixes, strict=True):
        named = any("verl.trainer" in word or "main_ppo" in word for word in command)
        if any(word.startswith("worker.actor.") for word in command):
            raise UnsupportedError(
                "config: this line starts EasyR1 (verl.trainer.main, worker.actor.*), which is not read",
                hint="state the run by flags: vramwise plan MODEL --task grpo --framework verl",
            )
        if named or any(re.match(r"\+*actor_rollout_ref\.model\.path=", word) for word in command):
            program = started(command, environment)
            return read(
                overrides(command),
                version=version,
                sft=any("sft_trainer" in word for word in command),
                gpus=program.gpus if program else None,
            )
    return None


def overrides(words_: list[str]) -> dict[str, Any]:
    """Return Hydra overrides: a.b=c, +a.b=c, ++a.b=c; ~a deletes."""
    values: dict[str, Any] = {}
    for word in words_:
        if "=" in word and not word.startswith("-"):
            key, _, value = word.lstrip("+").partition("=")
            values[key] = value.strip("'\"")
        elif word.startswith("~"):
            values.pop(word[1:], None)
    return values


def read(
    values: dict[str, Any],
    *,
    version: str | None = None,
    sft: bool = False,
    gpus: int | None = None,
) -> Imported:
    """Return verl overrides as a run; `gpus` are the launcher's, which SFT follows."""
    settings = Settings(values, tool="verl", version=version or VERSION, assumed=version is None)
    if sft:
        return _read_sft(settings, gpus)
    adv = str(settings.raw("algorithm.adv_estimator", to="task", default="gae"))
    critic = settings.flag("critic.enable", to="task", default=adv == "gae")
    task = Task.PPO if critic else Task.GRPO
    recipe: dict[str, Any] = {"framework": settings.framework("verl"), "task": task}
    model = str(settings.raw(f"{_M}path", to="model", default=""))
    if task is Task.GRPO:
        recipe["algorithm"] = adv
    strategy = str(settings.raw(f"{_A}strategy", "model_engine", to="sharding", default="fsdp"))
    megatron = "megatron" in strategy or any(".megatron." in key for key in values)
    lora = _lora(settings)
    method = Method.LORA if lora else Method.FULL
    recipe["method"] = method
    _precision(settings, recipe, megatron)
    count = (settings.count("trainer.n_gpus_per_node", to="gpus", default=8) or 8) * (
        settings.count("trainer.nnodes", to="gpus", default=1) or 1
    )
    _batch(settings, recipe, count)
    _model_switches(settings, recipe)
    recipe["optimizer"] = words.optimizer(
        settings, settings.raw(f"{_A}optim.optimizer", to="optimizer", default="AdamW")
    )
    recipe["sharding"] = Sharding.ZERO1 if megatron else Sharding.FSDP
    if strategy == "fsdp2":
        recipe["sharding"] = Sharding.FSDP2
    _reference(settings, recipe, method)
    if task is Task.PPO:
        _companions(settings, recipe, model)
    else:
        settings.quiet("=critic.")  # no critic: what its section says does nothing
    ranks = _degrees(settings, recipe, count, megatron)
    for key in ("param_offload", "optimizer_offload"):
        if settings.flag(f"{_A}fsdp_config.{key}", f"{_A}megatron.{key}", to="engine"):
            if key == "param_offload":
                recipe["offload"] = {"parameters": True}
            else:
                recipe["optimizer_offload"] = True
            settings.effect(
                f"{key}: moved to host memory between rollout and update, not during the update"
            )
    engine = _engine(settings, method)
    _drop_rest(settings)
    return settings.finish(model, recipe=recipe, lora=lora, engine=engine, gpus=ranks)


def _precision(settings: Settings, recipe: dict[str, Any], megatron: bool) -> None:
    if megatron:
        settings.raw(f"{_A}fsdp_config.model_dtype")
        recipe["dtype"], recipe["mixed_precision"], recipe["master_weights"] = "bf16", "none", True
        settings.effect(
            "Megatron holds bf16 weights and fp32 gradients on each rank, fp32 master and states divided"
        )
        return
    given = settings.raw(f"{_A}fsdp_config.model_dtype", to="dtype", default="fp32")
    recipe["dtype"] = words.dtype(given) or "fp32"
    recipe["mixed_precision"] = "bf16"
    settings.effect(
        "the actor is held in fp32 (4 + 4 + 8 B/parameter) and sharded over the GPUs, computed in bf16"
    )


def _companions(settings: Settings, recipe: dict[str, Any], model: str) -> None:
    """Read the critic, and the judge where one is a model."""
    critic = str(settings.raw("critic.model.path", to="value_model", default="") or "")
    recipe["value_model"] = critic if critic and critic != model else None
    named = settings.raw(
        "reward_model.model.path", "reward.reward_model.model_path", to="reward_model"
    )
    used = settings.flag("reward_model.enable", "reward.reward_model.enable", default=False)
    recipe["reward_model"] = str(named) if named and used else "none"
    own = settings.count("critic.ppo_micro_batch_size_per_gpu", to="micro_batch_size")
    if own and own != recipe.get("micro_batch_size"):
        settings.effect(
            f"the critic's micro-batch is {own}: planned with the actor's {recipe['micro_batch_size']}"
        )
    settings.quiet("=critic.megatron.", "critic.", "reward_model.", "reward.")


def _degrees(settings: Settings, recipe: dict[str, Any], gpus: int, megatron: bool) -> int | None:
    ulysses = settings.count(
        f"{_A}ulysses_sequence_parallel_size",
        f"{_A}fsdp_config.ulysses_sequence_parallel_size",
        "ulysses_sequence_parallel_size",
        to="parallel.context",
    )
    settings.raw(f"{_F}ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")
    if not megatron:
        if str(settings.values.get(f"{_A}fsdp_config.fsdp_size")) == "-1":  # all GPUs
            settings.raw(f"{_A}fsdp_config.fsdp_size")
        size = settings.count(f"{_A}fsdp_config.fsdp_size", to="parallel.data_shard", off=True)
        if size and size < gpus and gpus % size == 0:
            recipe["parallel"] = {"data_shard": size, "data_replicate": gpus // size}
        return set_degrees(settings, recipe, gpus, context=ulysses, context_kind="ulysses")
    prefix = f"{_A}megatron."
    degrees = {
        "tensor": settings.count(f"{prefix}tensor_model_parallel_size", to="parallel.tensor"),
        "pipeline": settings.count(f"{prefix}pipeline_model_parallel_size", to="parallel.pipeline"),
        "context": settings.count(f"{prefix}context_parallel_size", to="parallel.context"),
        "expert": settings.count(f"{prefix}expert_model_parallel_size", to="parallel.expert"),
    }
    settings.quiet(prefix, f"={_F}megatron.", "=critic.megatron.")
    return set_degrees(settings, recipe, gpus, **degrees)


def _lora(settings: Settings) -> dict[str, Any]:
    rank = settings.count(f"{_M}lora_rank", f"{_M}lora.rank", to="lora.rank", off=True)
    if rank is None:  # 0, the default, is full fine-tuning
        settings.defaulted("method", "full (lora_rank 0)")
        return {}
    named = settings.raw(
        f"{_M}target_modules", f"{_M}lora.target_modules", to="lora.targets", default="all-linear"
    )
    settings.quiet(f"={_M}lora.")
    return {"rank": rank, "targets": words.lora_targets(named)}


def _batch(settings: Settings, recipe: dict[str, Any], gpus: int) -> None:
    prompt = (
        settings.count(
            "data.max_prompt_length", f"{_R}prompt_length", to="prompt_length", default=512
        )
        or 512
    )
    completion = (
        settings.count(
            "data.max_response_length", f"{_R}response_length", to="completion_length", default=512
        )
        or 512
    )
    recipe["prompt_length"], recipe["completion_length"] = prompt, completion
    recipe["num_generations"] = settings.count(f"{_R}n", to="num_generations", default=1)
    if settings.flag(f"{_A}use_dynamic_bsz", to="micro_batch_size"):
        tokens = (
            settings.count(f"{_A}ppo_max_token_len_per_gpu", to="micro_batch_size", default=16384)
            or 16384
        )
        recipe["micro_batch_size"] = max(1, tokens // (prompt + completion))
        recipe["packing"] = True
        settings.effect(
            f"dynamic batches: at most {tokens:,} tokens a micro-batch, planned as {recipe['micro_batch_size']} full sequences"
        )
        settings.raw(f"{_A}ppo_micro_batch_size_per_gpu", f"{_A}ppo_micro_batch_size")
    else:
        recipe["micro_batch_size"] = _fixed_batch(settings, gpus)


def _fixed_batch(settings: Settings, gpus: int) -> int | None:
    """Return sequences a GPU; the old key without _per_gpu counts all GPUs together."""
    old = settings.count(f"{_A}ppo_micro_batch_size", to="micro_batch_size")
    if old and not settings.has(f"{_A}ppo_micro_batch_size_per_gpu"):
        return max(1, old // gpus)
    return settings.count(f"{_A}ppo_micro_batch_size_per_gpu", to="micro_batch_size", default=1)


def _model_switches(settings: Settings, recipe: dict[str, Any]) -> None:
    on = settings.flag(f"{_M}enable_gradient_checkpointing", to="checkpointing", default=True)
    offload = settings.flag(f"{_M}enable_activation_offload", to="checkpointing")
    inner = f"{_A}megatron.override_transformer_config.recompute"
    if again := settings.raw(f"{inner}_granularity", to="checkpointing"):  # Megatron's own word
        on = str(again) == "full"
    settings.raw(f"{inner}_method", f"{inner}_num_layers", f"{inner}_modules")
    recipe["checkpointing"] = (
        Checkpointing.OFFLOAD
        if offload and on
        else Checkpointing.FULL
        if on
        else Checkpointing.NONE
    )
    recipe["attention"] = words.attention(
        settings.raw(
            f"{_M}override_config.attn_implementation", to="attention", default="flash_attention_2"
        )
    )
    fused = settings.flag(f"{_M}use_fused_kernels", to="loss")
    recipe["loss"] = Loss.CHUNKED if fused else Loss.FULL
    if not fused:
        settings.effect(
            "use_fused_kernels is off: logits of a whole micro-batch are made, and the entropy's copy of them"
        )
    settings.raw(f"{_M}use_remove_padding", f"{_M}use_liger", f"{_M}lora_alpha")


def _reference(settings: Settings, recipe: dict[str, Any], method: Method) -> None:
    used = settings.flag(f"{_A}use_kl_loss", to="reference") or settings.flag(
        "algorithm.use_kl_in_reward", to="reference"
    )
    offload = settings.flag(f"{_F}fsdp_config.param_offload", to="reference")
    if not used:
        recipe["reference"], recipe["beta"] = Reference.NONE, 0.0
        return
    recipe["beta"] = settings.number(f"{_A}kl_loss_coef", to="beta", default=0.001)
    recipe["reference"] = (
        Reference.ADAPTER_OFF
        if method is not Method.FULL
        else Reference.OFFLOADED
        if offload
        else Reference.SEPARATE
    )


def _engine(settings: Settings, method: Method) -> dict[str, Any]:
    name = str(settings.raw(f"{_R}name", to="engine.kind", default="vllm"))
    if name == "hf":
        return {"kind": EngineKind.TRANSFORMERS}
    if name != "vllm":
        settings.effect(f"rollout.name {name} is planned as vLLM")
    sleeps = settings.flag(f"{_R}free_cache_engine", to="engine.sleep_level", default=True)
    return {
        "kind": EngineKind.VLLM_PUSH,
        "gpu_memory_utilization": settings.number(
            f"{_R}gpu_memory_utilization", to="engine.gpu_memory_utilization", default=0.5
        ),
        "tensor_parallel": settings.count(
            f"{_R}tensor_model_parallel_size", to="engine.tensor_parallel", default=2
        ),
        "max_num_seqs": settings.count(f"{_R}max_num_seqs", to="engine.max_num_seqs", default=256),
        "max_num_batched_tokens": settings.count(
            f"{_R}max_num_batched_tokens", to="engine.max_num_batched_tokens", default=8192
        ),
        "sleep_level": (1 if method is Method.LORA else 2) if sleeps else 0,
        "cuda_graphs": not settings.flag(f"{_R}enforce_eager"),
    }


def _drop_rest(settings: Settings) -> None:
    """Keys about scheduling, kernels and data that the plan does not need."""
    prefixes = (
        "data.",
        "trainer.",
        "algorithm.",
        "reward",
        "custom_reward",
        f"{_R}log_prob",
        f"{_F}log_prob",
        f"{_A}ppo_mini",
        f"{_A}kl_",
        f"{_A}entropy",
        f"{_A}clip",
        f"{_R}load_format",
        f"{_R}layered_summon",
        f"{_A}optim",
        f"{_R}val_kwargs",
        f"{_R}mode",
        "ray_",
        "global_profiler",
        "transfer_queue",
        f"{_A}loss_agg",
        f"{_A}policy_loss",
        f"{_A}ppo_epochs",
        f"{_A}grad_clip",
        f"{_A}checkpoint",
        f"{_A}shuffle",
        f"{_A}data_loader",
        f"{_R}temperature",
        f"{_R}top_",
        f"{_R}multi_turn",
        f"{_R}agent",
        f"{_R}calculate_log_probs",
        f"{_R}disable_log",
        f"{_R}enable_",
        f"{_F}log_prob",
        "=actor_rollout_ref.hybrid_engine",
        f"={_A}megatron.grad_offload",
        f"={_A}use_torch_compile",
        f"={_A}fsdp_config.use_orig_params",
        f"={_A}ppo_max_token_len_per_gpu",
        f"={_R}max_model_len",
        f"={_R}async_engine",
        f"={_F}strategy",
        "=data.image_key",
        "=use_remove_padding",
    )
    settings.quiet(*prefixes)


def _read_sft(settings: Settings, launched: int | None) -> Imported:
    recipe: dict[str, Any] = {
        "framework": settings.framework("verl"),
        "task": Task.SFT,
        "sharding": Sharding.FSDP,
        "mixed_precision": "bf16",
    }
    model = str(settings.raw("model.partial_pretrain", "model.path", to="model", default=""))
    rank = settings.count("model.lora_rank", to="lora.rank", off=True)
    method = Method.LORA if rank else Method.FULL
    recipe["method"] = method
    recipe["dtype"] = (
        words.dtype(
            settings.raw(
                "engine.model_dtype", "model.fsdp_config.model_dtype", to="dtype", default="fp32"
            )
        )
        or "fp32"
    )
    length = settings.count("data.max_length", to="context", default=1024) or 1024
    recipe["context"] = length
    if settings.flag("data.use_dynamic_bsz", to="micro_batch_size", default=True) and settings.has(
        "data.max_token_len_per_gpu"
    ):
        tokens = (
            settings.count("data.max_token_len_per_gpu", to="micro_batch_size", default=8192)
            or 8192
        )
        recipe["micro_batch_size"] = max(1, tokens // length)
    else:
        recipe["micro_batch_size"] = settings.count(
            "data.micro_batch_size_per_gpu", to="micro_batch_size", default=4
        )
    recipe["checkpointing"] = (
        Checkpointing.FULL
        if settings.flag("model.enable_gradient_checkpointing", to="checkpointing", default=True)
        else Checkpointing.NONE
    )
    told = settings.count("trainer.n_gpus_per_node", to="gpus", default=launched or 1) or 1
    told *= settings.count("trainer.nnodes", to="gpus") or 1
    shared = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size")
    gpus = set_degrees(
        settings,
        recipe,
        launched or told,
        context=settings.count(*shared, to="parallel.context", off=True),
        context_kind="ulysses",
    )
    named = settings.raw("model.target_modules", to="lora.targets", default="all-linear")
    lora = {"rank": rank, "targets": words.lora_targets(named)} if rank else {}
    _drop_rest(settings)
    return settings.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus)
