"""Steps that two gloo ranks and the trace run alike."""

from dataclasses import dataclass, field
from typing import Any

from planner.run.recipe import Checkpointing, Method
from profiler.sharded import Shard
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1031,  # not divided by two ranks
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = LLAMA | {
    "model_type": "gemma2",
    "head_dim": 16,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step."""

    config: dict[str, Any] = field(default_factory=lambda: LLAMA)
    method: Method = Method.FULL
    dtype: str = "bf16"
    checkpointing: Checkpointing = Checkpointing.FULL
    accumulation: int = 1
    prepares: bool = True
    """QLoRA: norms, embeddings and head in fp32."""
    single: bool = False
    """QLoRA: block maxima are not quantised once more."""
    shard: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


CASES = {
    "full": Case(),
    "fp32 stored and bf16 gathered": Case(
        dtype="fp32", shard={"param_dtype": "bf16", "reduce_dtype": "fp32"}
    ),
    "no checkpointing": Case(checkpointing=Checkpointing.NONE),
    "accumulated": Case(accumulation=3),
    "accumulated without sync": Case(accumulation=3, shard={"syncs_each": False}),
    "kept after forward": Case(shard={"reshard_after_forward": False}),
    "kept in part after forward": Case(shard={"reshard_after_forward": 2}, ranks=4),
    "replicated": Case(shard={"replicate": 2}),
    "replicated and accumulated": Case(shard={"replicate": 2}, accumulation=3),
    "replicated once": Case(shard={"replicate": 1}),
    "two shards twice": Case(
        shard={"replicate": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}, ranks=4
    ),
    "offloaded": Case(shard={"offload": True}),
    "offloaded lora accumulated": Case(method=Method.LORA, accumulation=3, shard={"offload": True}),
    "offloaded fp32": Case(
        dtype="fp32", shard={"offload": True, "param_dtype": "bf16", "reduce_dtype": "bf16"}
    ),
    "lora": Case(method=Method.LORA),
    "lora without checkpointing": Case(method=Method.LORA, checkpointing=Checkpointing.NONE),
    "tied": Case(config=GEMMA),
    "qlora": Case(method=Method.QLORA),
    "qlora without checkpointing": Case(method=Method.QLORA, checkpointing=Checkpointing.NONE),
    "qlora with everything in bf16": Case(method=Method.QLORA, prepares=False, single=True),
}


def subject(case: Case, *, rank: int = 0) -> HfSft:
    """Return the case's step as rank `rank` of `ranks`."""
    return HfSft(
        StepOptions(
            config=case.config,
            method=case.method,
            dtype=case.dtype,
            adapter_dtype=case.dtype,
            lora_rank=4,
            prepare_kbit=case.prepares,
            double_quant=not case.single,
            checkpointing=case.checkpointing,
            gradient_accumulation=case.accumulation,
            micro_batch=1,
            length=96,
            workspace_bytes=0,
            shard=Shard(ranks=case.ranks, rank=rank, **case.shard),
        )
    )
