"""One choice each of a recipe: what was asked for, else what the framework does."""

from typing import Any

from planner.dtypes import TRAIN_DTYPES, normal_dtype
from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.mixers.registry import mixer_of
from planner.models.spec import ModelSpec
from planner.run.compiling import compiled_law
from planner.run.engine_choices import choose
from planner.run.framework import pick
from planner.run.framework_files import Framework, common_laws
from planner.run.logits_law import LogitsLaw
from planner.run.recipe import (
    Attention,
    BucketsSection,
    Checkpointing,
    Loss,
    Method,
    OffloadSection,
    Recipe,
    Reference,
    Sharding,
    Task,
)
from planner.run.switches import Switches
from planner.run.tasks import TASKS, Head
from planner.run.zero import STAGES, Zero, check, zero


def padded(recipe: Recipe, switches: Switches, sequences: int) -> bool:
    """Return whether a mask goes to attention beside the tokens."""
    if switches.mask == "padding":
        return sequences > 1 and not recipe.packing
    if switches.mask == "packed":
        return bool(recipe.packing)
    return switches.mask == "always"


def tiled(recipe: Recipe, switches: Switches, defaults: dict[str, Any]) -> bool:
    """Return whether layers run in tiles of tokens; some frameworks do beside checkpointing."""
    if recipe.tiled_mlp is not None:
        return recipe.tiled_mlp
    checkpointing = choose(recipe.checkpointing, defaults, "checkpointing", "none")
    return switches.tiles_by_default and checkpointing != "none"


NO_SDPA = frozenset({"gpt_oss", "deepseek_v4"})
"""Families that transformers runs in eager attention when SDPA is asked for (_supports_sdpa = False)."""


def attention_of(
    model: ModelSpec, recipe: Recipe, defaults: dict[str, Any], notes: list[str]
) -> Attention:
    """Return the attention that runs."""
    asked = Attention(choose(recipe.attention, defaults, "attention", "sdpa"))
    trains = recipe.task is not Task.SERVE
    if asked is Attention.SDPA and trains and model.model_type in NO_SDPA:
        notes.append(f"transformers has no SDPA for {model.model_type}: planned in eager attention")
        return Attention.EAGER
    return asked


OWN_LINEAR = frozenset({"falcon"})
"""Families whose linears are a subclass: integrations/bitsandbytes.py compares the exact type."""


def kernel_notes(model: ModelSpec) -> list[str]:
    """Return what the plan takes for granted of recurrent layers, and which way it errs if not."""
    assumed = {mixer_of(mixer).assumes for layer in model.layers for mixer in layer.mixers}
    return [
        f"recurrent layers run with the fused kernels of {packages}; without them the reference "
        "code keeps several times the activations, and this plan is too low"
        for packages in sorted(assumed - {""}, reverse=True)
    ]


def reduced(recipe: Recipe, defaults: dict[str, Any]) -> str:
    """Return the dtype in which FSDP2 reduces gradients; empty: their own."""
    name = choose(recipe.reduce_dtype, defaults, "reduce_dtype", "")
    found = normal_dtype(name, field="reduce_dtype") if name else ""
    if found not in ("", "fp32", "bf16", "fp16"):
        raise UsageError(f"reduce_dtype: {name!r}", hint="fp32, bf16 or fp16")
    return found


def offload_of(recipe: Recipe, trains: bool) -> OffloadSection:
    """Return what is offloaded; raises UsageError for what no engine does."""
    asked, sharding = recipe.offload, recipe.sharding
    if not trains:
        return OffloadSection()
    if asked.parameters and sharding not in (Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP2):
        raise UsageError(
            f"offload.parameters: {sharding.value} does not offload weights",
            hint="zero3, fsdp or fsdp2",
        )
    moved = recipe.optimizer_offload or asked.parameters
    if asked.device == "nvme" and moved and sharding is not Sharding.ZERO3:
        raise UsageError(
            f"offload.device: {sharding.value} does not swap to nvme", hint="zero3, or cpu"
        )
    return asked


def zero_of(model: ModelSpec, recipe: Recipe, framework: Framework) -> Zero | None:
    """Return DeepSpeed's buffers; raises UsageError for buckets of a scheme without them."""
    check(recipe.sharding, recipe.buckets)
    sharding = recipe.sharding
    if framework.switches.offloads_by == "deepspeed" and recipe.optimizer_offload:
        sharding = sharding if sharding in STAGES else Sharding.ZERO2  # one GPU, offloaded by ZeRO
    preset = framework.deepspeed.get(sharding.value, BucketsSection())
    return zero(sharding, recipe.buckets, preset, model.hidden)


def by_deepspeed(recipe: Recipe, machine: Machine) -> bool:
    """Return whether DeepSpeed runs the step, with 16-bit weights and fp32 copies of its own."""
    return recipe.sharding in STAGES and machine.num_gpus > 1 and recipe.task is not Task.SERVE


def has_master(recipe: Recipe, switches: Switches, dtype: str, *, deepspeed: bool) -> bool:
    """Return whether the optimizer keeps an fp32 copy of what is trained."""
    if recipe.master_weights is not None:
        return recipe.master_weights
    if deepspeed:
        return True
    if recipe.task is Task.SERVE or not switches.master_weights:
        return False
    if recipe.method is Method.FULL and dtype == "bf16":
        # our own trainer rounds bf16 weights stochastically instead of keeping a master
        return switches.master_weights_full_bf16
    return True


def on_card(framework: Framework, machine: Machine) -> Framework:
    """Return the law that runs on this card: some releases have another engine for old ones."""
    major = machine.gpu.compute_capability.partition(".")[0] if machine.gpu else ""
    fallback = framework.engine.before_ampere
    older = major.isdigit() and int(major) < AMPERE
    return pick(fallback) if fallback and older else framework


AMPERE = 8
"""Compute capability of the first Ampere cards."""


def checkpointing_of(recipe: Recipe, defaults: dict[str, Any], machine: Machine) -> Checkpointing:
    """Return which layers' graphs are kept; on a CPU what is offloaded stays where it is."""
    chosen = Checkpointing(choose(recipe.checkpointing, defaults, "checkpointing", "none"))
    return Checkpointing.FULL if machine.cpu and chosen is Checkpointing.OFFLOAD else chosen


def dtypes(
    model: ModelSpec, recipe: Recipe, framework: Framework, machine: Machine
) -> tuple[str, str]:
    """Return the dtype of the weights, and the one of autocast ("" for none)."""
    defaults = framework.task_defaults(recipe.task.value)
    dtype, autocast = _asked_dtypes(model, recipe, defaults)
    switches = framework.switches_of(recipe.task.value)
    if switches.fp32_weights_for_fp16 and recipe.method is Method.FULL:
        no_bf16 = machine.gpu is not None and not machine.gpu.bf16_native
        if dtype == "fp16" or (no_bf16 and dtype == "bf16"):
            return "fp32", "fp16"
    return dtype, autocast


def _asked_dtypes(model: ModelSpec, recipe: Recipe, defaults: dict[str, Any]) -> tuple[str, str]:
    name = choose(recipe.dtype, defaults, "dtype", "bf16")
    dtype = normal_dtype(model.checkpoint_dtype if name == "checkpoint" else name)
    if name == "checkpoint" and dtype == "fp32" and recipe.task is Task.SERVE:
        dtype = "bf16"  # vLLM's dtype "auto" loads fp32 checkpoints in 16 bit (config/model.py)
    if dtype not in TRAIN_DTYPES:
        if recipe.dtype is not None:
            raise UsageError(
                f"dtype: {recipe.dtype!r} is not a dtype weights are computed in",
                hint=f"one of {', '.join(TRAIN_DTYPES)}; quantised bases go in quantization",
            )
        dtype = "bf16"
    mixed = choose(recipe.mixed_precision, defaults, "mixed_precision", "none")
    autocast = "" if mixed in ("none", "no", "") else normal_dtype(mixed, field="mixed_precision")
    if autocast not in ("", "bf16", "fp16"):
        raise UsageError(f"mixed_precision: {mixed!r}", hint="none, bf16 or fp16")
    return dtype, autocast


def lengths(
    model: ModelSpec, recipe: Recipe, defaults: dict[str, Any], notes: list[str]
) -> tuple[int, int]:
    prompt, completion, context = recipe.prompt_length, recipe.completion_length, recipe.context
    if recipe.task is Task.EMBED:  # a query and a document, each a text of its own
        usual = context or completion or prompt or int(defaults.get("context", 512))
        return prompt or 0, completion or usual
    if context is not None:
        if recipe.task is Task.SERVE and (prompt or 0) + (completion or 0) <= context:
            return 0, context  # what a request has is less than what it may have
        if prompt is not None and completion is not None and prompt + completion != context:
            raise UsageError(
                f"context: {context} is not prompt_length {prompt} + completion_length {completion}",
                hint="give context or the two lengths",
            )
        if prompt is not None:
            if prompt >= context:
                raise UsageError(
                    f"prompt_length: {prompt} leaves no completion in context {context}"
                )
            return prompt, context - prompt
        if completion is not None:
            if completion > context:
                raise UsageError(f"completion_length: {completion} is more than context {context}")
            return context - completion, completion
        if TASKS[recipe.task].reference or recipe.task in (Task.ORPO, Task.SIMPO):
            notes.append("all of the context counts as completion: the worst case for the loss")
        return 0, context
    if prompt is None and completion is None:
        if "context" in defaults:
            usual = int(defaults["context"])
            if usual <= (model.longest or usual):
                return 0, usual
            notes.append(
                f"context: {model.longest:,}, all that {model.name or 'the model'} was made for"
            )
            return 0, model.longest
        return int(defaults.get("prompt_length", 512)), int(defaults.get("completion_length", 512))
    one_text = (Task.SFT, Task.DISTILL, Task.RERANK, Task.REWARD)
    if recipe.task in one_text and (prompt is None or completion is None):
        return prompt or 0, completion or 0 if completion else (0 if prompt else 1024)
    return (
        prompt if prompt is not None else int(defaults.get("prompt_length", 512)),
        completion if completion is not None else int(defaults.get("completion_length", 512)),
    )


def batch_of(
    recipe: Recipe,
    framework: Framework,
    defaults: dict[str, Any],
    generations: int,
    notes: list[str],
) -> int:
    rows: int = choose(recipe.micro_batch_size, defaults, "micro_batch_size", 1)
    switches = framework.switches_of(recipe.task.value)
    if recipe.task is Task.GRPO and switches.raise_batch_to_generations and rows % generations:
        notes.append(f"{framework.name} raises the batch from {rows} to {generations} generations")
        return generations
    return rows


def reference_of(recipe: Recipe, task: Task, beta: float) -> Reference:
    if not TASKS[task].reference:
        return Reference.NONE
    if recipe.reference is not None:
        return recipe.reference
    if beta == 0:
        return Reference.NONE
    return Reference.SEPARATE if recipe.method is Method.FULL else Reference.ADAPTER_OFF


PARALLEL = "parallel"
"""What a framework's law of a loss over divided columns adds to its name."""


def law_of(
    framework: Framework,
    task: Task,
    loss: Loss,
    autocast: str,
    *,
    compiled: bool,
    parallel: bool,
) -> LogitsLaw:
    head = TASKS[task].head
    if head is not Head.VOCABULARY:
        return common_laws()[head.value]
    kind, switches = loss.value, framework.switches_of(task.value)
    if compiled:
        return compiled_law(framework, task, kind)
    if parallel and f"{kind}-{PARALLEL}" in framework.logits:
        return framework.logits[f"{kind}-{PARALLEL}"]
    if autocast and switches.fp32_outputs and loss is Loss.FULL:
        kind = "full-fp32"
    return framework.law(task.value, kind)
