"""A `vllm serve` line, flags of 0.32."""

import shlex

from planner.errors import UnsupportedError
from planner.exporters.common import DTYPES, Exported, Writer
from planner.run.recipe import RunFile, Task

VERSION = "0.32"
_QUANTIZATION = {"fp8": "fp8", "nf4": "bitsandbytes", "fp4": "bitsandbytes"}
WITHOUT_BITSANDBYTES = (0, 31)
"""vLLM dropped bitsandbytes and GGUF (its issue 39583): "Unknown quantization method"."""


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def export(run: RunFile, *, version: str | None = None) -> Exported:
    """Return a serving run as a command; pre-quantised checkpoints need no flag."""
    recipe = run.recipe
    if recipe.task is not Task.SERVE:
        raise UnsupportedError(
            "export: vllm serves; a training run goes to trl, axolotl or llamafactory"
        )
    writer, engine = Writer(run), recipe.engine
    put = writer.put
    put("--max-model-len", writer.context())
    put("--gpu-memory-utilization", engine.gpu_memory_utilization)
    put("--max-num-seqs", engine.max_num_seqs)
    put("--max-num-batched-tokens", engine.max_num_batched_tokens)
    put("--tensor-parallel-size", engine.tensor_parallel if engine.tensor_parallel > 1 else None)
    put(
        "--pipeline-parallel-size",
        engine.pipeline_parallel if engine.pipeline_parallel > 1 else None,
    )
    put("--data-parallel-size", engine.data_parallel if engine.data_parallel > 1 else None)
    put("--max-loras", engine.max_loras)
    put("--max-lora-rank", engine.max_lora_rank)
    put("--dtype", DTYPES.get(recipe.dtype or ""))
    put("--kv-cache-dtype", "fp8" if engine.kv_dtype and "fp8" in engine.kv_dtype else None)
    put("--kv-cache-memory-bytes", engine.kv_bytes)
    put("--block-size", engine.block_size if engine.block_size != 16 else None)
    named = _QUANTIZATION.get(recipe.quantization or "")
    if named == "bitsandbytes" and _release(version or VERSION) >= WITHOUT_BITSANDBYTES:
        raise UnsupportedError(
            f"export: vLLM {version or VERSION} has no bitsandbytes layers, so it serves no "
            f"{recipe.quantization} weights",
            hint="serve a W4A16 compressed-tensors, GPTQ or AWQ checkpoint, or --quantization fp8",
        )
    put("--quantization", named)
    words = ["vllm", "serve", run.model]
    for key, value in writer.keys.items():
        words += [key, str(value)]
    if engine.cuda_graphs is False:
        words.append("--enforce-eager")
    if engine.prefix_caching is not None:
        words.append(f"--{'' if engine.prefix_caching else 'no-'}enable-prefix-caching")
    if engine.expert_parallel:
        words.append("--enable-expert-parallel")
    if engine.max_loras or engine.max_lora_rank:
        words.append("--enable-lora")
    line = shlex.join(words)
    return Exported(
        tool="vllm",
        version=version or VERSION,
        filename="serve.sh",
        text=line + "\n",
        command=line,
        left_out=(),
    )
