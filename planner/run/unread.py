"""Recipe fields that a run does not read: said by name, never ignored in silence."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel

from planner.run.recipe import VLLM, Checkpointing, EngineKind, Loss, Method, Recipe, Sharding, Task
from planner.run.tasks import TASKS, Head

if TYPE_CHECKING:
    from planner.run.resolved import Resolved

FIELDS_WITHOUT_BYTES = {
    "buckets.allgather": "torch gathers in place",
    "engine.url": "an address",
    "engine.timeout_s": "a time",
    "lora.use_rslora": "a factor",
    "parallel.data_shard": "what the other degrees leave of the GPUs",
    "parallel.schedule": "says again what virtual_stages says, and is refused where it contradicts it",
}
"""Recipe fields that move no byte of any plan, and why they are in a recipe."""
ALGORITHMS = frozenset(
    {
        # groups of completions, and the losses TRL and verl name for them
        "grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "luspo", "vespo", "gdpo",
        "rloo", "reinforce", "reinforce_plus_plus", "remax", "ppo", "gae",
        # pairs
        "dpo", "ipo", "orpo", "kto", "simpo", "cpo", "nca", "robust", "hinge", "sigmoid",
        "sft", "serve",
    }
)  # fmt: skip
"""Algorithms whose tensors are those of their task, the reference apart."""
_RULES: tuple[tuple[tuple[str, ...], Callable[["Resolved"], bool], str], ...] = (
    (
        ("lora.rank", "lora.targets", "lora.target_parameters", "lora.dtype", "lora.dora", "lora.from", "lora.init", "lora.bias", "lora.use_rslora", "lora.modules_to_save",
         "lora.dropout"),
        lambda r: r.trains and r.method is not Method.FULL,
        "no adapters are trained",
    ),
    (
        ("optimizer", "optimizer_offload", "offload.parameters", "offload.device", "offload.pinned", "optimizer_in_backward", "master_weights", "gradient_dtype",
         "gradient_accumulation", "checkpointing", "loss", "loss_chunk_rows", "tiled_mlp", "beta",
         "reference", "mixed_precision", "compile", "compile_loss", "float8", "float8_all_gather"),
        lambda r: r.trains,
        "nothing is trained",
    ),
    (("optimizer_in_backward", "gradient_dtype"), lambda r: r.method is Method.FULL, "the weights are frozen"),
    (("evaluation.samples", "save", "resume"), lambda r: r.trains, "nothing is trained"),
    (("evaluation.batch_size", "evaluation.logits"), lambda r: r.eval_samples > 0, "nothing is evaluated"),
    (("evaluation.accumulation_steps",), lambda r: r.eval_samples > 0 and r.eval_logits, "no logits are kept"),
    (
        ("checkpoint_every",),
        lambda r: r.checkpointing in (Checkpointing.EVERY_K, Checkpointing.SELECTIVE_LAYER),
        "checkpointing is neither every-k nor selective-layer",
    ),
    (("compile_loss",), lambda r: r.task is Task.SFT, "only sft's loss is compiled"),
    (("float8_all_gather",), lambda r: r.placement.gathers, "no weights are gathered"),
    (("offload_keep_layers",), lambda r: r.checkpointing is Checkpointing.OFFLOAD, "checkpointing is not offload"),
    (("entropy",), lambda r: r.trains and r.law.kind == "full", "an entropy from logits in parts takes no copies"),
    (("loss_chunk_rows",), lambda r: r.loss is Loss.CHUNKED, "the loss is not chunked"),
    (("double_quant",), lambda r: r.quantization in ("nf4", "fp4"), "the base is not in nf4 or fp4"),
    (("num_generations",), lambda r: r.task is Task.GRPO, "only grpo generates"),
    (("beta", "reference"), lambda r: TASKS[r.task].reference, "only grpo, dpo, kto and ppo have a reference"),
    (("loss", "loss_chunk_rows"), lambda r: TASKS[r.task].head is Head.VOCABULARY, "the task has no logits"),
    (
        ("engine.kv_dtype", "engine.max_num_seqs"),
        lambda r: r.engine is not EngineKind.NONE,
        "nothing is generated",
    ),
    (
        ("engine.kv_bytes", "engine.gpu_memory_utilization", "engine.max_num_batched_tokens",
         "engine.block_size", "engine.sleep_level", "engine.cuda_graphs", "engine.tensor_parallel",
         "engine.pipeline_parallel", "engine.data_parallel", "engine.expert_parallel", "engine.max_loras", "engine.max_lora_rank", "engine.prefix_caching"),
        lambda r: r.engine in VLLM,
        "no vLLM engine runs",
    ),
    (("engine.offline",), lambda r: r.task is Task.SERVE, "only serving has other defaults in LLM()"),
    (("neftune",), lambda r: r.neftune, "noise is for sft"),
    (
        ("router_loss",),
        lambda r: r.task is Task.SFT and bool(r.experts) and r.switches.trace_step == "own",
        "only vramwise's own sft of a mixture of experts has it",
    ),
    (("offload.device", "offload.pinned"), lambda r: r.placement.offload.by in ("zero", "zero3", "fsdp"), "no engine offloads"),
    (("experts_implementation", "expert_capacity_factor"), lambda r: bool(r.experts), "no experts are trained through"),
    (
        ("sharding", "parallel.data_replicate"),
        lambda r: r.gpus > 1,
        "there is one GPU",
    ),
    (
        ("reshard_after_forward", "reduce_dtype"),
        lambda r: r.sharding is Sharding.FSDP2 and r.gpus > 1,
        "no fsdp2 divides the run",
    ),
    (
        ("accumulate_sync",),
        lambda r: r.placement.reduces and r.placement.ranks > 1 and r.grad_accum > 1,
        "no gradients of several ranks accumulate",
    ),
    (("parallel.sequence", "parallel.expert_tensor"), lambda r: r.layout.tensor > 1, "nothing is tensor-parallel"),
    (("parallel.schedule", "parallel.virtual_stages"), lambda r: r.layout.pipeline > 1, "there is no pipeline"),
    (("parallel.context_kind",), lambda r: r.layout.context > 1, "no sequence is divided"),
    (("bucket_views",), lambda r: r.placement.buckets, "no ddp has buckets"),
    (("engine.transfer",), lambda r: r.trains and r.engine is EngineKind.VLLM_SERVER, "no server gets weights"),
    (("engine.sync",), lambda r: r.pushes and r.placement.gathers, "no divided weights are pushed to an engine"),
    (("loads",), lambda r: r.placement.weight_shards > 1, "no weights are divided"),
    (
        ("buckets.reduce", "buckets.prefetch", "buckets.live", "buckets.reuse", "buckets.persistence",
         "buckets.sub_group", "buckets.overlap", "buckets.contiguous", "buckets.dtype"),
        lambda r: r.placement.zero is not None,
        "DeepSpeed neither divides nor offloads",
    ),
    (("buckets.overlap",), lambda r: not r.placement.window, "stage 3 has one bucket either way"),
)  # fmt: skip


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Return every field that is no section itself, with the section that holds it."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + (type(section).model_fields[name].alias or name), section


def unread(recipe: Recipe, r: "Resolved") -> list[str]:
    """Return a sentence for the fields that somebody set and this run does not read."""
    notes: dict[str, list[str]] = {}
    said = _set(recipe)
    for names, used, why in _RULES:
        left = [name for name in names if name in said]
        if left and not used(r):
            notes.setdefault(why, []).extend(left)
            said.difference_update(left)
    found = [f"not read, {why}: {', '.join(names)}" for why, names in notes.items()]
    if recipe.algorithm is not None and recipe.algorithm.lower() not in ALGORITHMS:
        found.append(f"algorithm {recipe.algorithm[:40]} is not known: planned as {r.task.value}")
    return found


@cache
def _defaults(section: type[BaseModel]) -> dict[str, object]:
    return {name: field.default for name, field in section.model_fields.items()}


def _set(section: BaseModel, prefix: str = "") -> set[str]:
    """Return the fields that differ from what a recipe without a word would hold."""
    found: set[str] = set()
    defaults = _defaults(type(section))
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= _set(value, f"{prefix}{name}.")
        elif value != defaults[name]:
            found.add(prefix + (type(section).model_fields[name].alias or name))
    return found
