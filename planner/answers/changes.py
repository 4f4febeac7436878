"""Every single change that could lower a recipe's peak, with its price."""

from dataclasses import dataclass
from typing import Any

from planner.run.recipe import Method, Recipe, Task
from planner.run.resolved import Resolved
from planner.terms.kv_cache import rollout_sequences


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change in a recipe."""

    name: str
    """Field and new value, for example "checkpointing=full"."""
    update: dict[str, Any]
    price: str
    """What it costs, in words."""
    rank: int
    """Order of preference: 0 is free."""
    changes_objective: bool = False
    """The trained result changes, not only how it is computed."""


def to_host(change: Change) -> bool:
    """Say whether a change moves something to the host's memory, which is no other where it is unified."""
    moved = {"optimizer_offload", "offload.parameters"} & set(change.update)
    return bool(moved) or any(
        str(each) in ("offload", "offloaded") for each in change.update.values()
    )


def apply(recipe: Recipe, change: Change) -> Recipe:
    """Return the recipe with a change made; a key like "engine.kind" reaches into a section."""
    fields = recipe.model_dump()
    for key, value in change.update.items():
        if "." in key:
            section, name = key.split(".", 1)
            fields[section][name] = value
        else:
            fields[key] = value
    return Recipe.model_validate(fields)


def changes(r: Resolved, recipe: Recipe) -> list[Change]:
    """Return every single change that could lower the peak of this recipe."""
    found = _computation_changes(r) + _state_changes(r) + _storage_changes(r)
    found += _engine_changes(r) + _generation_changes(r)
    return found + _objective_changes(r, recipe)


def _computation_changes(r: Resolved) -> list[Change]:
    if not r.trains:
        return []
    found = []
    batch = r.batch
    if batch > 1:
        half = -(-batch // 2)
        for size in sorted({half, 1}, reverse=True):
            found.append(
                Change(
                    f"micro_batch_size={size}",
                    {
                        "micro_batch_size": size,
                        "gradient_accumulation": r.grad_accum * -(-batch // size),
                    },
                    "same result by gradient accumulation; slower where the GPU was not full",
                    1,
                )
            )
    if r.checkpointing.value == "none":
        found.append(
            Change(
                "checkpointing=full",
                {"checkpointing": "full"},
                "slower: one more forward",
                2,
            )
        )
    if r.checkpointing.value != "offload":
        found.append(
            Change(
                "checkpointing=offload",
                {"checkpointing": "offload"},
                "slower: one more forward, and layer inputs in host RAM",
                3,
            )
        )
    if r.loss.value == "full":
        found.append(
            Change(
                "loss=chunked", {"loss": "chunked"}, "none to a few percent; needs a fused head", 0
            )
        )
    if r.attention.value == "eager":
        found.append(Change("attention=flash", {"attention": "flash"}, "none: faster", 0))
    if not r.tiled_mlp and r.switches.tiled_mlp_available:
        found.append(Change("tiled_mlp", {"tiled_mlp": True}, "a few percent slower", 2))
    return found


def _state_changes(r: Resolved) -> list[Change]:
    if not r.trains:
        return []
    found = []
    if r.optimizer.value in ("adamw", "paged-adamw", "adamw-fused"):
        if r.optimizer.value == "adamw":
            found.append(
                Change("optimizer=adamw-fused", {"optimizer": "adamw-fused"}, "none: faster", 0)
            )
        found.append(
            Change(
                "optimizer=adamw-8bit",
                {"optimizer": "adamw-8bit", "master_weights": False},
                "8-bit states; no measurable loss in most fine-tunes",
                2,
            )
        )
    if not r.optimizer_offload:
        found.append(
            Change(
                "optimizer_offload",
                {"optimizer_offload": True},
                "the step waits for the host link; states in host RAM",
                4,
            )
        )
    return found


def _storage_changes(r: Resolved) -> list[Change]:
    if not r.trains:
        return []
    found = []
    if r.dtype == "fp32":
        found.append(
            Change("dtype=bf16", {"dtype": "bf16"}, "16-bit weights: no fp32 master copy", 3)
        )
    if r.adapter_dtype == "fp32" and r.method is not Method.FULL:
        found.append(Change("lora.dtype=bf16", {"lora.dtype": "bf16"}, "bf16 adapters", 2))
    if r.reference.value == "separate":
        found.append(
            Change(
                "reference=offloaded",
                {"reference": "offloaded"},
                "reference weights stream from host RAM",
                4,
            )
        )
    if r.gpus > 1:
        wanted = "fsdp2" if r.sharding.value in ("none", "ddp", "zero1", "zero2") else ""
        if wanted:
            found.append(
                Change(
                    f"sharding={wanted}",
                    {"sharding": wanted},
                    "weights travel between GPUs every layer",
                    3,
                )
            )
    return found


def _engine_changes(r: Resolved) -> list[Change]:
    found = []
    if r.engine.value.startswith("vllm") and r.task is Task.GRPO:
        if r.engine.value == "vllm-push":
            found.append(
                Change(
                    "engine.kind=vllm-shared",
                    {"engine.kind": "vllm-shared"},
                    "one copy of the weights",
                    1,
                )
            )
        if r.sleep_level == 0 and r.engine.value != "vllm-server":
            found.append(
                Change(
                    "engine.sleep_level=1",
                    {"engine.sleep_level": 1},
                    "wake-up time every step; host RAM",
                    1,
                )
            )
        found.append(
            Change(
                "engine.kind=vllm-server",
                {"engine.kind": "vllm-server"},
                "another GPU generates",
                5,
            )
        )
    return found


def _generation_changes(r: Resolved) -> list[Change]:
    found = []
    waves = rollout_sequences(r)
    if r.task is Task.GRPO and waves > 1 and not r.switches.generates_whole_batch:
        for size in sorted({-(-waves // 2), 1}, reverse=True):
            found.append(
                Change(
                    f"engine.max_num_seqs={size}",
                    {"engine.max_num_seqs": size},
                    "completions are generated in waves: slower",
                    2,
                )
            )
    if r.task in (Task.GRPO, Task.SERVE) and r.kv_dtype in ("bf16", "fp16", "fp32"):
        found.append(
            Change(
                "engine.kv_dtype=fp8",
                {"engine.kv_dtype": "fp8"},
                "slightly different samples",
                3,
                True,
            )
        )
    if r.task is Task.SERVE and not r.quantization:
        found.append(
            Change("quantization=fp8", {"quantization": "fp8"}, "small loss of quality", 3, True)
        )
        found.append(
            Change(
                "quantization=awq-4bit",
                {"quantization": "awq-4bit"},
                "some loss of quality",
                4,
                True,
            )
        )
    return found


def _objective_changes(r: Resolved, recipe: Recipe) -> list[Change]:
    found = []
    if r.trains and r.method is Method.FULL:
        found.append(
            Change("method=lora", {"method": "lora"}, "trains adapters, not all weights", 6, True)
        )
        found.append(
            Change("method=qlora", {"method": "qlora"}, "4-bit base, adapters only", 7, True)
        )
    if r.trains and r.method is Method.LORA:
        found.append(
            Change(
                "method=qlora",
                {"method": "qlora", "quantization": None},
                "4-bit base: 25-40% slower, base rounded",
                5,
                True,
            )
        )
    if r.method is not Method.FULL and r.lora_rank > 8 and not r.started:
        found.append(
            Change(
                f"lora.rank={r.lora_rank // 2}",
                {"lora.rank": r.lora_rank // 2},
                "fewer trained parameters",
                6,
                True,
            )
        )
    if r.reference.value == "separate":
        found.append(Change("beta=0", {"beta": 0.0, "reference": None}, "no KL term", 6, True))
    if r.seq_tokens >= 512:
        found.append(_half_context(r, recipe))
    return found


def _half_context(r: Resolved, recipe: Recipe) -> Change:
    if (
        recipe.prompt_length is not None
        or recipe.completion_length is not None
        or recipe.context is None
    ):
        prompt = r.prompt_tokens // 2 or None
        update: dict[str, Any] = {
            "prompt_length": prompt,
            "completion_length": max(1, r.completion_tokens // 2),
            "context": None,
        }
        name = f"lengths {r.prompt_tokens // 2}+{max(1, r.completion_tokens // 2)}"
    else:
        update = {"context": r.seq_tokens // 2}
        name = f"context={r.seq_tokens // 2}"
    return Change(name, update, "longer sequences are cut", 8, True)
