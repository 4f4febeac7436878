"""vLLM's own KV cache token counts beside the planner's, for small models of many architectures.

Real vLLM (the CPU build where there is no GPU) starts each model with dummy weights and the same
explicit KV size. Run: python benchmarks/kv_tokens.py [--json]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.families import model_spec_from_config
from planner.terms.vllm_blocks import vllm_kv
from planner.units import MiB

KV_BYTES = 64 * MiB
BLOCK = 32
MAX_LEN = 512
BATCHED_TOKENS = 512

COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def architectures() -> dict[str, dict[str, Any]]:
    """Return small configs by what is special about their cache."""
    from transformers import AutoConfig

    def config(model_type: str, **changes: Any) -> dict[str, Any]:
        made = AutoConfig.for_model(model_type, **(COMMON | changes)).to_dict()
        made["architectures"] = [ARCHITECTURES[model_type]]
        return made

    mla = {
        "kv_lora_rank": 64,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    return {
        "llama MHA": config("llama", num_hidden_layers=3),
        "qwen2 GQA": config("qwen2", num_hidden_layers=4, num_key_value_heads=2),
        "qwen3 head_dim": config("qwen3", num_hidden_layers=2, num_key_value_heads=4, head_dim=64),
        "gpt_bigcode MQA": config(
            "gpt_bigcode", n_layer=2, n_embd=256, n_head=8, n_positions=2048, multi_query=True
        ),
        "mixtral MoE": config(
            "mixtral", num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4
        ),
        "deepseek_v2 MLA": config("deepseek_v2", num_hidden_layers=3, num_key_value_heads=8, **mla),
        "gemma2 windows 1:1": config(
            "gemma2",
            num_hidden_layers=4,
            num_key_value_heads=4,
            head_dim=64,
            sliding_window=128,
        ),
        "gemma3 windows 5:1": config(
            "gemma3_text",
            num_hidden_layers=12,
            num_key_value_heads=2,
            head_dim=64,
            sliding_window=64,
        ),
        "olmo3 windows 3:1": config(
            "olmo3", num_hidden_layers=8, num_key_value_heads=4, sliding_window=96
        ),
        "mistral window": config(
            "mistral", num_hidden_layers=2, num_key_value_heads=4, sliding_window=128
        ),
        "qwen3_next gated delta net": config(
            "qwen3_next",
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        "granitemoehybrid mamba2": config(
            "granitemoehybrid",
            num_hidden_layers=4,
            num_key_value_heads=2,
            layer_types=["mamba", "mamba", "mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_state=64,
            mamba_expand=2,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=128,
        ),
    }


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}


TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def dtype_of(config: dict[str, Any]) -> str:
    """Return fp32, or bf16 for experts that the CPU build takes in 16 bit only."""
    return "bf16" if config["model_type"].startswith("deepseek") else "fp32"


def vllm_tokens(config: dict[str, Any], folder: Path) -> int:
    """Start vLLM on `config` with dummy weights and return the token count it reports."""
    from trainer.engines.vllm_llm import reported_kv_tokens, start_llm
    from trainer.engines.vllm_settings import VllmSettings
    from trainer.engines.vllm_sleep import shutdown

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    llm = start_llm(
        VllmSettings(
            model=str(folder),
            dtype=TORCH_NAMES[dtype_of(config)],
            max_model_len=MAX_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=BATCHED_TOKENS,
            kv_bytes=KV_BYTES,
            extra={"load_format": "dummy", "block_size": BLOCK},
        )
    )
    try:
        return reported_kv_tokens(llm)
    finally:
        shutdown(llm)


def planned_tokens(config: dict[str, Any]) -> int:
    """Return the planner's token count for the same pool."""
    spec = model_spec_from_config(config)
    kv = vllm_kv(
        spec,
        kv_bytes=KV_BYTES,
        max_model_len=MAX_LEN,
        kv_dtype=dtype_of(config),
        block_size=BLOCK,
        in_flight_tokens=BATCHED_TOKENS,
        kernel_block=32,
    )
    return kv.tokens


def rows(names: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row an architecture."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in architectures().items():
            if names and name not in names:
                continue
            yield {
                "architecture": name,
                "vllm_tokens": vllm_tokens(config, Path(scratch) / name.replace(" ", "-")),
                "planned_tokens": planned_tokens(config),
            }


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    result = []
    for row in rows(arguments.only):
        result.append(row)
        if not arguments.json:
            same = "=" if row["vllm_tokens"] == row["planned_tokens"] else "DIFFERS"
            print(
                f"{row['architecture']:28} {row['vllm_tokens']:>10,} {row['planned_tokens']:>10,} {same}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"schema_version": 1, "kv_bytes": KV_BYTES, "rows": result}, indent=1))


if __name__ == "__main__":
    main()
