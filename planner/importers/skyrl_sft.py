"""SkyRL's supervised runs: `python -m skyrl.train.main_sft strategy=fsdp model.path=...`.

Read in SkyRL a956457, skyrl/train/config/sft_config.py: fields and their defaults.
"""

from typing import Any

from planner.importers.launch import finish_sharding, set_degrees
from planner.importers.policy_keys import PolicyKeys, compute, quiet_prefixes, read_lora
from planner.importers.settings import Imported, Settings
from planner.run.recipe import Method, Sharding, Task

MODEL = "Qwen/Qwen3-0.6B"
_M = "megatron_config."
KEYS = PolicyKeys(
    law="verl",
    model=("model.path",),
    rank=("model.lora.rank",),
    targets=("model.lora.target_modules",),
    dropout=("model.lora.dropout",),
    checkpointing=("gradient_checkpointing",),
    checkpointing_default=True,
    parameter_offload=("fsdp_config.cpu_offload",),
)


def read(flat: dict[str, Any], *, version: str | None, assumed: str) -> Imported:
    """Return the run of an SFT's overrides."""
    s = Settings(flat, tool="skyrl", version=version or assumed, assumed=version is None)
    megatron = "megatron" in str(s.raw("strategy", to="sharding", default="megatron"))
    model = str(s.raw("model.path", to="model", default=MODEL))
    recipe: dict[str, Any] = {"framework": KEYS.law, "task": Task.SFT}
    lora = read_lora(s, KEYS)
    recipe["method"] = Method.LORA if lora else Method.FULL
    recipe["dtype"], recipe["mixed_precision"] = ("bf16", "none") if megatron else ("fp32", "bf16")
    if megatron and recipe["method"] is Method.FULL:
        recipe["master_weights"] = True
    recipe["context"] = s.count("max_length", to="context")
    if recipe["context"] is None:
        s.effect("max_length is not set: nothing is cut off; planned at 4,096 tokens (--context)")
        recipe["context"] = 4096
    rows = s.count("micro_train_batch_size_per_gpu", to="micro_batch_size", default=2)
    budget = s.count("max_tokens_per_microbatch", to="micro_batch_size", off=True)
    recipe["packing"] = budget is not None
    recipe["micro_batch_size"] = max(1, budget // recipe["context"]) if budget else rows
    nodes = s.count("placement.num_nodes", to="gpus", default=1) or 1
    gpus = nodes * (s.count("placement.num_gpus_per_node", to="gpus", default=4) or 4)
    compute(s, recipe, KEYS)
    recipe["sharding"] = Sharding.ZERO1 if megatron else Sharding.FSDP2
    degrees: dict[str, Any] = {}
    if megatron:
        for name, default in (("tensor", 2), ("pipeline", 2)):
            key = f"{_M}{name}_model_parallel_size"
            degrees[name] = s.count(key, to=f"parallel.{name}", default=default)
        degrees["context"] = s.count(f"{_M}context_parallel_size", to="parallel.context", off=True)
        degrees["expert"] = s.count(
            f"{_M}expert_model_parallel_size", to="parallel.expert", off=True
        )
    else:
        degrees["context"] = s.count("sequence_parallel_size", to="parallel.context", off=True)
        degrees["context_kind"] = "ulysses"
    ranks = finish_sharding(s, recipe, set_degrees(s, recipe, gpus, **degrees))
    s.quiet(*quiet_prefixes("skyrl"))
    return s.finish(model, recipe=recipe, lora=lora, engine={}, gpus=ranks)
