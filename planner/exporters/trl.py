"""TRL's YAML (TrlParser), with the key names of the stated version."""

from planner.errors import UnsupportedError
from planner.exporters.common import ATTENTION, DTYPES, Exported, Writer
from planner.importers.trl import version_tuple
from planner.run.recipe import Checkpointing, EngineKind, Loss, Method, RunFile, Task

VERSION = "1.16.0"
LIGER_KERNEL = (0, 26)
"""GRPO reads use_liger_kernel from here on, use_liger_loss before."""
VERBS = (Task.SFT, Task.GRPO, Task.DPO, Task.KTO, Task.REWARD)
"""Tasks that `trl` has a command for."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def export(run: RunFile, *, version: str | None = None) -> Exported:
    """Return a run as `trl sft|grpo|dpo` settings."""
    version = version or VERSION
    at = version_tuple(version)
    writer, recipe = Writer(run), run.recipe
    if recipe.task is Task.SERVE:
        raise UnsupportedError("export: TRL trains; a serving run goes to vllm")
    if recipe.task not in VERBS:
        raise UnsupportedError(
            f"export: `trl` has no command for {recipe.task.value}", hint=", ".join(VERBS)
        )
    put = writer.put
    put("model_name_or_path", run.model)
    put("torch_dtype" if at < (0, 24) else "dtype", DTYPES.get(recipe.dtype or "", None))
    put("attn_implementation", ATTENTION.get(recipe.attention) if recipe.attention else None)
    put("bf16", recipe.mixed_precision == "bf16" if recipe.mixed_precision else None)
    put("per_device_train_batch_size", recipe.micro_batch_size)
    put("gradient_accumulation_steps", recipe.gradient_accumulation)
    if recipe.checkpointing is not None:
        put("gradient_checkpointing", recipe.checkpointing is not Checkpointing.NONE)
        if recipe.checkpointing is Checkpointing.OFFLOAD:
            put("activation_offloading", True if recipe.task is not Task.GRPO else None)
            writer.lost(
                "offloaded checkpoints (GRPO has no activation_offloading)",
                when=recipe.task is Task.GRPO,
            )
    writer.quantization()
    put("optim", writer.optimizer())
    _loss(writer, at)
    _adapter(writer)
    _task(writer, at)
    writer.lost(
        f"sharding {recipe.sharding.value}: give it to accelerate",
        when=recipe.sharding.value != "none",
    )
    name = f"{recipe.task.value}.yaml"
    processes = f" --num_processes {run.machine.gpus}" if run.machine.gpus > 1 else ""
    return Exported(
        tool="trl",
        version=version,
        filename=name,
        text=writer.yaml(f"TRL {version}, written by vramwise"),
        command=f"trl {recipe.task.value} --config {name}{processes}",
        left_out=tuple(writer.left_out),
    )


def _loss(writer: Writer, at: tuple[int, int]) -> None:
    """Full logits until 1.14, unless Liger or, in SFT from 1.5 on, chunks are asked for."""
    recipe = writer.run.recipe
    if at >= (1, 15):
        writer.lost(
            "full logits: TRL's loss head is fused from 1.15 on", when=recipe.loss is Loss.FULL
        )
    elif recipe.task is Task.SFT and at >= (1, 5):
        kinds = {Loss.CHUNKED: "chunked_nll", Loss.FULL: "nll", None: None}
        writer.put("loss_type", kinds[recipe.loss])
    elif recipe.loss is Loss.CHUNKED:
        old = recipe.task is Task.GRPO and (0, 16) <= at < LIGER_KERNEL
        writer.put("use_liger_loss" if old else "use_liger_kernel", True)


def _adapter(writer: Writer) -> None:
    recipe, put = writer.recipe, writer.put
    if recipe.method is not Method.FULL:
        put("use_peft", True)
        put("lora_r", recipe.lora.rank)
        put(
            "lora_target_modules",
            writer.targets(all_linear="all-linear", attention=_ATTENTION, mlp=_MLP),
        )
        put("lora_dropout", recipe.lora.dropout)
        put("lora_modules_to_save", list(recipe.lora.modules_to_save) or None)
        put("use_dora", True if recipe.lora.dora else None)
        put("use_rslora", True if recipe.lora.use_rslora else None)
        put("lora_target_parameters", list(recipe.lora.target_parameters) or None)
        writer.adapters("use_rslora", "target_parameters")
    if recipe.method is Method.QLORA:
        put("load_in_4bit", True)
        put("use_bnb_nested_quant", recipe.double_quant)
    elif recipe.quantization == "int8":
        put("load_in_8bit", True)


def _task(writer: Writer, at: tuple[int, int]) -> None:
    recipe, put = writer.recipe, writer.put
    if recipe.task is not Task.GRPO:
        put("max_length", writer.context())
        if recipe.task is Task.SFT:
            put("packing", recipe.packing)
        elif recipe.task is not Task.REWARD:
            put("beta", recipe.beta)
        return
    put("num_generations", recipe.num_generations)
    put("max_completion_length", recipe.completion_length)
    if at < (1, 0):
        put("max_prompt_length", recipe.prompt_length)
    else:
        writer.lost(
            "prompt_length: TRL 1.x does not truncate prompts, filter the data set",
            when=recipe.prompt_length,
        )
    put("beta", recipe.beta)
    engine = recipe.engine
    if engine.kind in (EngineKind.VLLM_PUSH, EngineKind.VLLM_SHARED, EngineKind.VLLM_SERVER):
        put("use_vllm", True)
        put("vllm_mode", "server" if engine.kind is EngineKind.VLLM_SERVER else "colocate")
        put("vllm_gpu_memory_utilization", engine.gpu_memory_utilization)
        put(
            "vllm_enable_sleep_mode",
            bool(engine.sleep_level) if engine.sleep_level is not None and at >= (0, 22) else None,
        )
        put(
            "vllm_tensor_parallel_size",
            engine.tensor_parallel if engine.tensor_parallel > 1 else None,
        )
        writer.lost(
            "weights shared with the engine: TRL keeps a second copy",
            when=engine.kind is EngineKind.VLLM_SHARED,
        )
