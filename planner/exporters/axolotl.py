"""axolotl's YAML, keys of the 0.19 schema."""

import math

from planner.errors import UnsupportedError
from planner.exporters.common import ATTENTION, Exported, Writer
from planner.run.recipe import (
    Checkpointing,
    EngineKind,
    Loss,
    Method,
    Optimizer,
    RunFile,
    Sharding,
    Task,
)

VERSION = "0.19.0"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_CCE = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


TASKS = (Task.SFT, Task.GRPO, Task.DPO, Task.KTO, Task.ORPO, Task.SIMPO)
"""Tasks whose word is axolotl's `rl`, and sft."""


def export(run: RunFile, *, version: str | None = None) -> Exported:
    """Return a run as an axolotl config."""
    writer, recipe = Writer(run), run.recipe
    if recipe.task is Task.SERVE:
        raise UnsupportedError("export: axolotl trains; a serving run goes to vllm")
    if recipe.task not in TASKS:
        raise UnsupportedError(
            f"export: axolotl is not written for {recipe.task.value}", hint=", ".join(TASKS)
        )
    put = writer.put
    put("base_model", run.model)
    if recipe.task is not Task.SFT:
        put("rl", recipe.task.value)
    if recipe.method is not Method.FULL:
        _adapter(writer)
    half = recipe.dtype in (None, "bf16")
    put("bf16", bool(half))
    put("fp16", True if recipe.dtype == "fp16" else None)
    put("micro_batch_size", recipe.micro_batch_size or 1)
    writer.lost("micro_batch_size: axolotl asks for one", when=recipe.micro_batch_size is None)
    put("gradient_accumulation_steps", recipe.gradient_accumulation)
    put("sequence_len", writer.context())
    if recipe.task is Task.SFT:
        put("sample_packing", recipe.packing)
    else:
        writer.lost("packing: axolotl packs sft alone", when=recipe.packing)
    if recipe.checkpointing is Checkpointing.OFFLOAD:
        put("gradient_checkpointing", True)
        put("activation_offloading", True)
    elif recipe.checkpointing is not None:
        put("gradient_checkpointing", recipe.checkpointing is Checkpointing.FULL)
    put("attn_implementation", ATTENTION.get(recipe.attention) if recipe.attention else None)
    if recipe.loss is Loss.CHUNKED:
        put("plugins", [_CCE])
    put("tiled_mlp", recipe.tiled_mlp)
    writer.quantization()
    fsdp = recipe.sharding in (Sharding.FSDP, Sharding.FSDP2)
    if fsdp and recipe.optimizer is Optimizer.ADAMW_8BIT:
        writer.lost("optimizer adamw-8bit: axolotl has it under FSDP2 as paged-adamw-8bit alone")
    else:
        put("optimizer", writer.optimizer())
    if fsdp:
        _refuse_quantized_preferences(writer)
        put("fsdp_version", 2)
        put("fsdp_config", {"reshard_after_forward": True, "offload_params": False})
    elif recipe.sharding.value.startswith("zero"):
        put("deepspeed", f"deepspeed_configs/{recipe.sharding.value}.json")
        writer.lost(
            "axolotl's zero2.json offloads the optimizer",
            when=recipe.sharding is Sharding.ZERO2 and not recipe.optimizer_offload,
        )
    writer.lost(
        "optimizer_offload: of axolotl's own DeepSpeed files zero2.json alone does it",
        when=recipe.optimizer_offload and recipe.sharding is not Sharding.ZERO2,
    )
    if recipe.task is Task.GRPO:
        _grpo(writer)
    elif recipe.task is not Task.SFT:
        put("rl_beta", recipe.beta)
    if recipe.task is Task.KTO:
        put("remove_unused_columns", False)
    writer.lost("datasets: axolotl asks for them, and a run file has none")
    return Exported(
        tool="axolotl",
        version=version or VERSION,
        filename="axolotl.yaml",
        text=writer.yaml(f"axolotl {version or VERSION}, written by vramwise"),
        command="axolotl train axolotl.yaml",
        left_out=tuple(writer.left_out),
    )


def _adapter(writer: Writer) -> None:
    recipe, put = writer.recipe, writer.put
    put("adapter", recipe.method.value)
    if recipe.method is Method.QLORA:
        put("load_in_4bit", True)
    elif recipe.quantization == "int8":
        put("load_in_8bit", True)
    put("lora_r", recipe.lora.rank)
    put("lora_alpha", 2 * recipe.lora.rank)
    put("lora_dropout", recipe.lora.dropout)
    if recipe.lora.targets == "all-linear":
        put("lora_target_linear", True)
    else:
        put("lora_target_modules", writer.targets(all_linear="", attention=_ATTENTION, mlp=_MLP))
    put("lora_modules_to_save", list(recipe.lora.modules_to_save) or None)
    put("lora_model_dir", recipe.lora.start_from)
    put("peft_use_dora", True if recipe.lora.dora else None)
    put("peft_use_rslora", True if recipe.lora.use_rslora else None)
    writer.adapters("from", "use_rslora")


def _refuse_quantized_preferences(writer: Writer) -> None:
    """Raise UnsupportedError for a quantized base under FSDP2 in a task for which axolotl refuses it."""
    task = writer.recipe.task
    quantized = {"load_in_4bit", "load_in_8bit"} & set(writer.keys)
    if quantized and task in (Task.DPO, Task.KTO, Task.ORPO):
        raise UnsupportedError(
            f"export: axolotl has no FSDP2 of a quantized base for {task.value}",
            hint="sharding zero3, or a base that is not quantized",
        )


def _grpo(writer: Writer) -> None:
    recipe, gpus = writer.recipe, writer.run.machine.gpus
    own = (recipe.micro_batch_size or 1) * recipe.gradient_accumulation
    group = recipe.num_generations
    if group and (group < 2 or own * gpus % group or own < group):
        raise UnsupportedError(
            f"export: axolotl's grpo needs whole groups of {group} on each GPU: micro_batch_size x "
            f"gradient_accumulation is {own}",
            hint="num_generations of 2 or more, and gradient_accumulation of "
            f"{math.lcm(group, recipe.micro_batch_size or 1) // (recipe.micro_batch_size or 1)}",
        )
    section: dict[str, object] = {
        "num_generations": group,
        # what TRL takes by itself; axolotl's check of several GPUs counts one GPU's unless it is said
        "generation_batch_size": own * gpus if group and gpus > 1 else None,
        "max_completion_length": recipe.completion_length,
        "beta": recipe.beta,
    }
    if recipe.engine.kind in (EngineKind.VLLM_PUSH, EngineKind.VLLM_SHARED, EngineKind.VLLM_SERVER):
        section["use_vllm"] = True
        section["vllm_mode"] = (
            "server" if recipe.engine.kind is EngineKind.VLLM_SERVER else "colocate"
        )
        if recipe.engine.gpu_memory_utilization:
            writer.put("vllm", {"gpu_memory_utilization": recipe.engine.gpu_memory_utilization})
    writer.put("trl", {key: value for key, value in section.items() if value is not None})
