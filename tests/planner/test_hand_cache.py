"""The KV cache of every kind of mixer, and what generation needs beside it, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from planner.mixers.mla import index_key_bytes
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, ModelSpec
from planner.terms.generation import generating
from planner.terms.kv_cache import bytes_per_token, rollout_sequences, sequence_bytes, state_bytes
from tests.planner.toys import LLAMA, choices


def of(*mixers: dict[str, Any], side: dict[str, Any] | None = None) -> ModelSpec:
    """Return the toy with layers of these mixers, two of the first and one of each other."""
    layers = tuple(_layer(fields, 1 if index else 2, side) for index, fields in enumerate(mixers))
    return replace(LLAMA, layers=layers, layer_order=(0, 0, *range(1, len(layers))))


def _layer(fields: dict[str, Any], count: int, side: dict[str, Any] | None) -> LayerSpec:
    beside = MixerSpec(**side) if side else None
    return replace(LLAMA.layers[0], mixer=MixerSpec(**fields), count=count, side_mixer=beside)


HEADS = {"kind": MixerKind.FULL, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        (HEADS, 2 * 16 + 2 * 16),
        ({**HEADS, "num_kv_heads": 0}, 4 * 32),  # as many as queries
        ({**HEADS, "v_head_dim": 8}, 2 * 24),
        ({**HEADS, "shares_storage": True}, 2 * 16),
        ({**HEADS, "kv_shared": True}, 0),
        ({**HEADS, "index_head_dim": 12}, 64 + 12),
        ({**HEADS, "kind": MixerKind.SLIDING, "window": 8}, 64),
        ({**HEADS, "kind": MixerKind.CROSS}, 0),
        ({"kind": MixerKind.NONE}, 0),
        ({"kind": MixerKind.MLA, "num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8}, 40),
        (
            {
                "kind": MixerKind.MLA,
                "num_heads": 4,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 8,
                "index_head_dim": 16,
            },
            56,
        ),
    ],
)
def test_one_token_in_two_layers(fields: dict[str, Any], each: int) -> None:
    model = of(fields)
    assert bytes_per_token(model) == 2 * 2 * each
    assert bytes_per_token(model, "fp8") == 2 * each
    assert bytes_per_token(model, "fp32") == 2 * 4 * each


@pytest.mark.parametrize("kind", [MixerKind.SLIDING, MixerKind.CHUNKED])
def test_a_window_holds_its_tokens_and_engines_may_not_cap(kind: MixerKind) -> None:
    model = of({**HEADS, "kind": kind, "window": 100}, HEADS)
    # two windowed layers of 128 B a token and one full
    assert sequence_bytes(model, 80) == 3 * 128 * 80
    assert sequence_bytes(model, 1000) == 2 * 128 * 100 + 128 * 1000
    assert sequence_bytes(model, 1000, capped=False) == 3 * 128 * 1000
    # whole blocks of 16: 112 and 1,008
    assert sequence_bytes(model, 1000, block=16) == 2 * 128 * 112 + 128 * 1008
    unlimited = of({**HEADS, "kind": kind}, HEADS)
    assert sequence_bytes(unlimited, 1000) == 3 * 128 * 1000


def test_recurrent_states_do_not_grow() -> None:
    mamba = {"kind": MixerKind.MAMBA, "state_shapes": ((128, 3), (8, 16, 16))}
    # 384 + 2,048 elements
    assert state_bytes(of(mamba)) == 2 * 2 * (384 + 2048)
    # the recurrent state alone in fp32
    assert state_bytes(of({**mamba, "state_fp32": True})) == 2 * (2 * 384 + 4 * 2048)
    model = of(mamba, HEADS)
    assert bytes_per_token(model) == 128
    assert sequence_bytes(model, 50) == 2 * 2 * 2432 + 50 * 128
    both = of(HEADS, side=mamba)  # attention with a mamba beside it
    assert sequence_bytes(both, 50) == 2 * 2 * 2432 + 2 * 50 * 128


def test_compressed_entries_beyond_a_window() -> None:
    # one entry of 16 and an index of 8 for every 4 tokens; the window keeps its own
    fields = {
        **HEADS,
        "kind": MixerKind.SLIDING,
        "window": 10,
        "compress_ratio": 4,
        "index_head_dim": 8,
        "num_kv_heads": 1,
        "shares_storage": True,
    }
    model = of(fields)
    assert bytes_per_token(model) == 2 * (16 * 2 + (16 + 8) * 2 // 4)
    assert sequence_bytes(model, 100) == 2 * (10 * 16 * 2 + 100 * 24 * 2 // 4)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"task": "grpo", "engine": {"kind": "none"}}, 0),
        ({"task": "grpo", "num_generations": 6, "micro_batch_size": 2}, 6),
        ({"task": "grpo", "num_generations": 6, "micro_batch_size": 9}, 9),
        ({"task": "grpo", "num_generations": 6, "engine": {"max_num_seqs": 4}}, 4),
        ({"task": "serve", "framework": "vllm", "micro_batch_size": 5}, 5),
        (
            {"task": "grpo", "framework": "trl", "micro_batch_size": 8, "gradient_accumulation": 3},
            24,
        ),
    ],
)
def test_sequences_generated_at_once(fields: dict[str, Any], count: int) -> None:
    r = choices(**fields)
    assert rollout_sequences(r) == count


def test_what_generate_needs_for_one_token() -> None:
    fields = {"task": "grpo", "engine": {"kind": "transformers"}, "num_generations": 1}
    # fp32 logits of the last position
    assert generating(LLAMA, choices(**fields, micro_batch_size=3)).bytes == 3 * 1000 * 4
    # autocast's 16-bit copies of fp32 weights
    wide = choices(**fields, dtype="fp32", mixed_precision="bf16")
    assert generating(LLAMA, wide).bytes == 2 * 239_040
    # the largest NF4 matrix as fp32
    assert generating(LLAMA, choices(**fields, method="qlora")).bytes == 4 * 8_192
    vllm = choices(task="grpo", engine={"kind": "vllm-push"})
    assert generating(LLAMA, vllm).bytes == 0


def test_an_indexers_fp8_keys_have_a_scale_a_token() -> None:
    indexed = MixerSpec(kind=MixerKind.MLA, kv_lora_rank=32, index_head_dim=128)
    assert index_key_bytes(indexed) == 132
    assert index_key_bytes(MixerSpec(kind=MixerKind.MLA, kv_lora_rank=32)) == 0
