"""vLLM's block arithmetic on hand-worked cases; real vLLM checks it in tests/trainer."""

from dataclasses import replace

import pytest

from planner.errors import UsageError
from planner.models.hub import find_model
from planner.models.spec import MixerKind
from planner.terms.vllm_blocks import vllm_kv
from planner.units import GiB


def test_one_kind_of_layer_is_plain_division():
    # Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 B = 131,072 B a token
    kv = vllm_kv(find_model("llama-3.1-8b"), kv_bytes=10 * GiB, max_model_len=8192)
    assert kv.tokens == 10 * GiB // 131072
    assert kv.bytes_per_sequence == GiB


def test_windows_cost_full_pages_in_equal_groups():
    # Gemma-2-9B: 21 full and 21 windowed layers are two groups of 21; at 8192 tokens with a window
    # of 4096 and 8192 tokens in flight a windowed group holds as much as a full one, and one more
    kv = vllm_kv(find_model("gemma-2-9b"), kv_bytes=10 * GiB, max_model_len=8192)
    assert kv.bytes_per_block == 21 * 16 * 8 * 2 * 256 * 2
    assert kv.blocks_per_sequence == 512 + 513


def test_an_indexer_shares_the_block_table_of_its_latent():
    # DeepSeek-V3.2: 61 layers x 64 tokens x (576 x 2 B latent + 128 fp8 B and a scale of 4 B). Both are
    # MLAAttentionSpec (vLLM 0.32 v1/kv_cache_interface.py, is_uniform_type): one group, two page sizes
    kv = vllm_kv(find_model("deepseek-v3.2"), kv_bytes=10 * GiB, max_model_len=8192, block_size=64)
    assert kv.bytes_per_block == 61 * 64 * (576 * 2 + 132)
    assert (kv.groups, kv.blocks_per_sequence) == (1, 128)
    assert kv.tokens == 10 * GiB // kv.bytes_per_block * 64


def test_latent_attention_caches_one_vector():
    kv = vllm_kv(find_model("deepseek-v3"), kv_bytes=10 * GiB, max_model_len=4096)
    assert kv.bytes_per_sequence == 4096 * 70272


def test_a_pool_too_small_for_a_block_holds_nothing():
    kv = vllm_kv(find_model("llama-3.1-8b"), kv_bytes=1000, max_model_len=8192)
    assert (kv.num_blocks, kv.tokens) == (0, 0)


def test_a_model_without_cache_is_refused():
    model = find_model("llama-3.1-8b")
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, kind=MixerKind.NONE)) for layer in model.layers
    )
    with pytest.raises(UsageError, match="no KV cache"):
        vllm_kv(replace(model, layers=layers), kv_bytes=GiB, max_model_len=16)
