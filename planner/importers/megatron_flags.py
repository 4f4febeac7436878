"""Megatron's flags: `megatron sft|pt|rlhf` of ms-swift (4.6) and slime's train.py.

Read in ms-swift 4.6.0 (swift/megatron/arguments) and slime 624b824 (2026-08): Megatron-LM's own arguments and theirs.
"""

from pathlib import Path
from typing import Any

from planner.importers import words
from planner.importers.context import Context
from planner.importers.launch import finish_sharding, set_degrees, visible_devices
from planner.importers.launchers import Started
from planner.importers.policy_keys import Policy, PolicyKeys, quiet_prefixes, read_policy
from planner.importers.settings import Imported, Settings, as_int
from planner.importers.shell import flags
from planner.run.recipe import Checkpointing, Loss, Method, Optimizer, Sharding, Task

SWIFT, SLIME = "4.6.0", "0.3"
_TASKS = {"dpo": Task.DPO, "kto": Task.KTO, "rm": Task.REWARD, "grpo": Task.GRPO}
DEGREES = {
    "tensor": ("tensor_model_parallel_size",),
    "sequence": ("sequence_parallel",),
    "pipeline": ("pipeline_model_parallel_size",),
    "context": ("context_parallel_size",),
    "expert": ("expert_model_parallel_size",),
    "expert_tensor": ("expert_tensor_parallel_size",),
}
_QUIET = quiet_prefixes("megatron")


def renamed(words_: list[str]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in flags(words_).items()}


def swift_command(started: Started, context: Context) -> Imported | None:
    """Return the run of a `megatron sft|pt|rlhf` line, or None."""
    names = [started.name, *(Path(word).name for word in started.arguments[:2])]
    if "megatron" not in names[:2]:
        return None
    verb = next((word for word in started.arguments[:2] if word in ("sft", "pt", "rlhf")), None)
    if verb is None:
        return None
    values = renamed(started.arguments)
    environment = started.environment
    gpus = as_int(environment.get("NPROC_PER_NODE")) or visible_devices(environment) or 1
    gpus *= as_int(environment.get("NNODES")) or 1
    return read_swift(values, gpus, verb=verb, version=context.version_of("ms-swift"))


def read_swift(
    values: dict[str, Any], gpus: int, *, verb: str = "sft", version: str | None = None
) -> Imported:
    """Return ms-swift's Megatron arguments as a run of Megatron-LM."""
    s = Settings(values, tool="ms-swift", version=version or SWIFT, assumed=version is None)
    kind = str(s.raw("rlhf_type", to="task", default="dpo" if verb == "rlhf" else ""))
    if kind == "grpo":
        return _swift_grpo(s, gpus)
    recipe: dict[str, Any] = {"framework": "megatron", "task": _TASKS.get(kind, Task.SFT)}
    model = str(s.raw("model", "mcore_model", "load", to="model", default=""))
    s.raw("template", "model_type", "mcore_model", "load")
    tuner = str(s.raw("train_type", "tuner_type", to="method", default="full"))
    method = Method.LORA if tuner == "lora" else Method.FULL
    recipe["method"] = method
    recipe["dtype"] = words.dtype(s.raw("torch_dtype")) or "bf16"
    recipe["mixed_precision"] = "none"
    micro = s.count("micro_batch_size", to="micro_batch_size", default=1) or 1
    recipe["micro_batch_size"] = micro
    recipe["context"] = s.count("max_length", "seq_length", to="context", default=2048)
    recipe["packing"] = s.flag("packing", to="packing") or s.flag("padding_free")
    recompute(s, recipe)
    recipe["optimizer"] = Optimizer.ADAMW_FUSED
    whole = s.flag("use_distributed_optimizer", to="sharding", default=True)
    recipe["sharding"] = Sharding.MEGATRON if whole else Sharding.DDP
    if s.flag("optimizer_cpu_offload", to="optimizer_offload"):
        recipe["optimizer_offload"] = True
    recipe["attention"] = "flash"
    if recipe["task"] in (Task.DPO, Task.KTO):
        recipe["beta"] = s.number("beta", to="beta", default=0.1)
        recipe["reference"] = words.reference(method, needed=True)
    found = {
        name: s.flag(*keys, to="parallel.sequence")
        if name == "sequence"
        else s.count(*keys, to=f"parallel.{name}", off=True)
        for name, keys in DEGREES.items()
    }
    found["virtual_stages"] = s.count(
        "virtual_pipeline_model_parallel_size", to="parallel.virtual_stages", off=True
    )
    if recipe["task"] is not Task.SFT:
        recipe["framework"] = "ms-swift"
        recipe["sharding"] = Sharding.ZERO1 if whole else Sharding.DDP
        recipe["master_weights"] = method is Method.FULL or None
        s.effect("preference tasks are planned without Megatron's own layers: an estimate")
    total = set_degrees(s, recipe, gpus, **found)
    batch = s.count("global_batch_size", to="gradient_accumulation", default=16) or 16
    inner = 1
    for name in ("tensor", "pipeline", "context"):
        inner *= found.get(name) or 1
    data = max(1, (total or 1) // inner)
    recipe["gradient_accumulation"] = max(1, batch // (micro * data))
    lora = {}
    if method is Method.LORA:
        named = s.raw("target_modules", to="lora.targets", default="all-linear")
        s.raw("lora_alpha")
        rank = s.count("lora_rank", to="lora.rank", default=8)
        lora = {"rank": rank, "targets": words.lora_targets(named)}
    s.quiet(*_QUIET)
    gpus_found = finish_sharding(s, recipe, total)
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=gpus_found)


def recompute(s: Settings, recipe: dict[str, Any]) -> None:
    """Read Megatron's recomputation: full (uniform, N layers), selective (attention's core), none."""
    granularity = str(s.raw("recompute_granularity", to="checkpointing", default="selective"))
    how = s.raw("recompute_method")
    layers = s.count("recompute_num_layers", to="checkpoint_every", off=True) or 1
    if granularity == "full":
        recipe["checkpointing"] = (
            Checkpointing.FULL if layers == 1 or how == "block" else Checkpointing.EVERY_K
        )
        if recipe["checkpointing"] is Checkpointing.EVERY_K:
            recipe["checkpoint_every"] = layers
        if how == "block":
            s.effect(f"recompute block: {layers} layers of a stage are recomputed, planned as all")
    else:
        recipe["checkpointing"] = Checkpointing.NONE
        named = s.raw("recompute_modules")
        if granularity == "selective" and named not in (None, "core_attn", ["core_attn"]):
            s.unread(
                "recompute_modules",
                named,
                "those modules are recomputed: planned as kept, an upper bound",
            )
    s.raw("recompute_modules")


SWIFT_KEYS = PolicyKeys(
    law="verl",
    model=("model", "mcore_model", "load"),
    rank=("adapter_rank",),
    targets=("target_modules",),
    micro=("micro_batch_size",),
    prompt=("max_length", "seq_length"),
    prompt_default=2048,
    completion=("max_completion_length",),
    completion_default=512,
    generations=("num_generations",),
    generations_default=8,
    recompute=("recompute_granularity",),
    checkpointing=("recomputes",),
    optimizer_offload=("optimizer_cpu_offload",),
    utilization=("vllm_gpu_memory_utilization",),
    utilization_default=0.9,
    engine_tensor=("vllm_tensor_parallel_size",),
    max_num_seqs=("vllm_max_num_seqs",),
    eager=("vllm_enforce_eager",),
    degrees=DEGREES,
    quiet=_QUIET,
)


def _swift_grpo(s: Settings, gpus: int) -> Imported:
    """Return a `megatron rlhf --rlhf_type grpo` run: a Megatron policy beside vLLM (megatron/arguments/rlhf_args.py)."""
    s.raw("template", "model_type", "recompute_method", "recompute_num_layers", "lora_alpha")
    s.raw("steps_per_generation", "vllm_max_model_len", "padding_free", "packing")
    if str(s.raw("train_type", "tuner_type", to="method", default="full")) == "lora":
        s.values["adapter_rank"] = s.count("lora_rank", to="lora.rank", default=8)
    beta = s.number("beta", to="beta", default=0.04)
    mode = str(s.raw("vllm_mode", to="engine.kind", default="colocate"))
    level = s.count("sleep_level", to="engine.sleep_level", off=True)
    s.raw("use_vllm")
    for name in ("offload_model", "offload_optimizer"):
        if s.flag(name):
            s.effect(f"{name}: in host memory while vLLM generates, not while the policy trains")
    policy = Policy(
        sharding=Sharding.ZERO1,
        gpus=gpus,
        colocated=mode == "colocate",
        sleeps=level is not None,
        reference=bool(beta),
        beta=beta,
        algorithm="grpo",
        mixed_precision="none",
        master_weights=True,
    )
    return read_policy(s, SWIFT_KEYS, policy)


SLIME_KEYS = PolicyKeys(
    law="verl",
    model=("hf_checkpoint",),
    critic=("critic_load",),
    micro=("micro_batch_size",),
    token_budget=("max_tokens_per_gpu",),
    prompt=("rollout_max_prompt_len",),
    prompt_default=1024,
    completion=("rollout_max_response_len",),
    completion_default=1024,
    generations=("n_samples_per_prompt",),
    checkpointing=("recomputes",),
    optimizer_offload=("optimizer_cpu_offload",),
    utilization=("sglang_mem_fraction_static",),
    utilization_default=0.9,
    engine_tensor=("rollout_num_gpus_per_engine",),
    degrees=DEGREES,
    quiet=_QUIET,
)


def slime_command(started: Started, context: Context) -> Imported | None:
    """Return the run of slime's train.py, or None."""
    values = renamed(started.arguments)
    if "hf_checkpoint" not in values or not {
        "rollout_batch_size",
        "advantage_estimator",
        "rm_type",
    } & set(values):
        return None
    version = context.version_of("slime")
    s = Settings(values, tool="slime", version=version or SLIME, assumed=version is None)
    nodes = s.count("actor_num_nodes", to="gpus", default=1) or 1
    each = s.count("actor_num_gpus_per_node", to="gpus", default=8) or 8
    estimator = str(s.raw("advantage_estimator", to="task", default="grpo"))
    kl = s.flag("use_kl_loss", to="reference")
    beta = s.number("kl_loss_coef", "kl_coef", to="beta", default=0.0)
    s.values["recomputes"] = s.raw("recompute_granularity", to="checkpointing") == "full"
    s.raw("recompute_method", "recompute_num_layers", "use_dynamic_batch_size", "max_seq_len")
    s.used.add("recomputes")
    colocated = s.flag("colocate", to="engine.kind")
    # slime/utils/arguments.py: offload_train follows colocate where nobody says otherwise
    moved = s.flag("offload", "offload_train", default=colocated)
    policy = Policy(
        sharding=Sharding.ZERO1,
        gpus=nodes * each,
        colocated=colocated,
        offloaded=moved and not s.flag("no_offload_train", "no_offload"),
        reference=kl or bool(beta),
        beta=beta,
        critic=estimator == "ppo",
        algorithm=estimator if estimator in ("grpo", "gspo", "cispo") else None,
        mixed_precision="none",
        master_weights=True,
        loss=Loss.FULL,
        reference_offloaded=True,
    )
    s.effect(
        "Megatron holds bf16 weights and fp32 gradients on each rank, fp32 master and states divided"
    )
    return read_policy(s, SLIME_KEYS, policy)
