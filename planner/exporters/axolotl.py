"""axolotl's YAML, keys of the 0.19 schema."""

from planner.errors import UnsupportedError
from planner.exporters.common import ATTENTION, Exported, Writer
from planner.run.recipe import Checkpointing, EngineKind, Loss, Method, RunFile, Sharding, Task

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
    put("micro_batch_size", recipe.micro_batch_size)
    put("gradient_accumulation_steps", recipe.gradient_accumulation)
    put("sequence_len", writer.context())
    put("sample_packing", recipe.packing)
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
    put("optimizer", writer.optimizer())
    if recipe.sharding in (Sharding.FSDP, Sharding.FSDP2):
        put("fsdp_version", 2)
        put("fsdp_config", {"reshard_after_forward": True, "offload_params": False})
    elif recipe.sharding.value.startswith("zero"):
        put("deepspeed", f"deepspeed_configs/{recipe.sharding.value}.json")
        writer.lost(
            "axolotl's zero2.json offloads the optimizer",
            when=recipe.sharding is Sharding.ZERO2 and not recipe.optimizer_offload,
        )
    if recipe.task is Task.GRPO:
        _grpo(writer)
    elif recipe.task is Task.DPO:
        put("rl_beta", recipe.beta)
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
    writer.adapters("from")


def _grpo(writer: Writer) -> None:
    recipe = writer.recipe
    section: dict[str, object] = {
        "num_generations": recipe.num_generations,
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
