"""LLaMA-Factory's YAML (v0 schema), keys of 0.9.5."""

from planner.errors import UnsupportedError
from planner.exporters.common import Exported, Writer
from planner.run.recipe import Attention, Checkpointing, Loss, Method, RunFile, Sharding, Task

VERSION = "0.9.5"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_FLASH = {Attention.EAGER: "disabled", Attention.SDPA: "sdpa", Attention.FLASH: "fa2"}


def export(run: RunFile, *, version: str | None = None) -> Exported:
    """Return a run as a LLaMA-Factory config."""
    writer, recipe = Writer(run), run.recipe
    if recipe.task not in (Task.SFT, Task.DPO):
        raise UnsupportedError(
            f"export: LLaMA-Factory has no {recipe.task.value}", hint="trl or axolotl has"
        )
    put = writer.put
    put("model_name_or_path", run.model)
    put("stage", recipe.task.value)
    put("do_train", True)
    put("finetuning_type", "full" if recipe.method is Method.FULL else "lora")
    _adapter(writer)
    _precision(writer)
    put("per_device_train_batch_size", recipe.micro_batch_size)
    put("gradient_accumulation_steps", recipe.gradient_accumulation)
    put("cutoff_len", writer.context())
    put("packing", recipe.packing)
    if recipe.checkpointing is not None:
        put("disable_gradient_checkpointing", recipe.checkpointing is Checkpointing.NONE)
        put("use_unsloth_gc", True if recipe.checkpointing is Checkpointing.OFFLOAD else None)
    put("flash_attn", _FLASH.get(recipe.attention) if recipe.attention else None)
    if recipe.loss is Loss.CHUNKED:
        put("enable_liger_kernel", True)
        writer.lost("a fused loss: Liger's works for pt and sft only", when=recipe.task is Task.DPO)
    writer.quantization()
    put("optim", writer.optimizer())
    if recipe.task is Task.DPO:
        put("pref_beta", recipe.beta)
    if recipe.sharding in (Sharding.ZERO2, Sharding.ZERO3):
        offload = "_offload" if recipe.optimizer_offload else ""
        put("deepspeed", f"examples/deepspeed/ds_z{recipe.sharding.value[-1]}{offload}_config.json")
    writer.lost(
        "zero1: LLaMA-Factory has files of zero2 and zero3", when=recipe.sharding is Sharding.ZERO1
    )
    writer.lost(
        "fsdp: give it to accelerate (examples/accelerate/fsdp_config.yaml)",
        when=recipe.sharding.value in ("fsdp", "fsdp2"),
    )
    writer.lost("dataset: LLaMA-Factory asks for one, and a run file has none")
    launched = run.machine.gpus > 1 or "deepspeed" in writer.keys
    prefix = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={run.machine.gpus} " if launched else ""
    return Exported(
        tool="llamafactory",
        version=version or VERSION,
        filename="llamafactory.yaml",
        text=writer.yaml(f"LLaMA-Factory {version or VERSION}, written by vramwise"),
        command=f"{prefix}llamafactory-cli train llamafactory.yaml",
        left_out=tuple(writer.left_out),
    )


def _adapter(writer: Writer) -> None:
    recipe, put = writer.recipe, writer.put
    if recipe.method is Method.QLORA:
        put("quantization_bit", 4)
        put("double_quantization", recipe.double_quant)
    elif recipe.quantization == "int8":
        put("quantization_bit", 8)
    if recipe.method is not Method.FULL:
        put("lora_rank", recipe.lora.rank)
        put("lora_target", _words(writer.targets(all_linear="all", attention=_ATTENTION, mlp=_MLP)))
        put("lora_dropout", recipe.lora.dropout)
        put("use_dora", True if recipe.lora.dora else None)
        put("use_rslora", True if recipe.lora.use_rslora else None)
        put("adapter_name_or_path", recipe.lora.start_from)
        writer.adapters("use_rslora", "from")
        put("additional_target", ",".join(recipe.lora.modules_to_save) or None)


def _precision(writer: Writer) -> None:
    recipe = writer.recipe
    pure = recipe.method is Method.FULL and recipe.dtype == "bf16" and not recipe.master_weights
    zero3 = recipe.sharding is Sharding.ZERO3
    writer.lost("weights of bf16 alone: LLaMA-Factory refuses them in ZeRO-3", when=pure and zero3)
    if pure and not zero3:
        writer.put("pure_bf16", True)
    elif recipe.dtype == "fp16" or recipe.mixed_precision == "fp16":
        writer.put("fp16", True)
    elif recipe.dtype != "fp32" or recipe.mixed_precision == "bf16":
        writer.put("bf16", True)


def _words(targets: object) -> str:
    return (
        targets
        if isinstance(targets, str)
        else ",".join(map(str, targets))
        if isinstance(targets, list)
        else "all"
    )
