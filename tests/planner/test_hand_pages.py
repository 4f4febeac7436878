"""How vLLM cuts a pool where layers differ, by hand: pages, groups, and the blocks one sequence takes."""

from dataclasses import replace
from typing import Any

import pytest

from planner.models.spec import MixerKind, MixerSpec, ModelSpec
from planner.terms.vllm_blocks import VllmKv, kv_ranks, vllm_kv
from tests.planner.toys import LLAMA

HEADS = {"kind": MixerKind.FULL, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
"""128 B a token in 16 bit: a page of 16 tokens is 2,048 B."""
SLIDING = {**HEADS, "kind": MixerKind.SLIDING, "window": 105}
CHUNKED = {**HEADS, "kind": MixerKind.CHUNKED, "window": 104}
MAMBA = {"kind": MixerKind.MAMBA, "state_shapes": ((128, 3), (8, 16, 16))}
"""384 + 2,048 elements: 4,864 B of state."""
LINEAR = {"kind": MixerKind.LINEAR, "state_shapes": ((128, 3), (8, 16, 16))}


def of(*kinds: tuple[int, dict[str, Any]]) -> ModelSpec:
    """Return the toy with so many layers of each mixer."""
    layers = tuple(
        replace(LLAMA.layers[0], mixer=MixerSpec(**fields), count=count) for count, fields in kinds
    )
    order = tuple(index for index, (count, _) in enumerate(kinds) for _ in range(count))
    return replace(LLAMA, layers=layers, layer_order=order)


def cut(*kinds: tuple[int, dict[str, Any]], **options: Any) -> VllmKv:
    """Return a pool of 10 MiB for requests of 1,000 tokens, 200 tokens in flight."""
    usual = {"kv_bytes": 10 * 2**20, "max_model_len": 1000, "in_flight_tokens": 200}
    return vllm_kv(of(*kinds), **{**usual, **options})


FULL_BLOCKS = 63  # 1,000 / 16
WINDOW_BLOCKS = 20  # 104 + 200 tokens are 19, and one that both ends touch
CHUNK_BLOCKS = 19  # 104 + 200


@pytest.mark.parametrize(
    ("kinds", "block", "sequence", "groups"),
    [
        (((5, HEADS),), 5 * 2_048, FULL_BLOCKS, 1),
        # as many of each: two groups
        (((3, SLIDING), (3, HEADS)), 3 * 2_048, WINDOW_BLOCKS + FULL_BLOCKS, 2),
        # nearly as many: the larger, the other padded
        (((4, SLIDING), (3, HEADS)), 4 * 2_048, WINDOW_BLOCKS + FULL_BLOCKS, 2),
        # the rarer kind's count: six groups of one
        (((5, SLIDING), (1, HEADS)), 2_048, 5 * WINDOW_BLOCKS + FULL_BLOCKS, 6),
        (((3, SLIDING), (2, HEADS)), 2 * 2_048, 2 * WINDOW_BLOCKS + FULL_BLOCKS, 3),
        (((3, CHUNKED), (3, HEADS)), 3 * 2_048, CHUNK_BLOCKS + FULL_BLOCKS, 2),
        (((2, SLIDING),), 2 * 2_048, WINDOW_BLOCKS, 1),
    ],
)
def test_groups(kinds: Any, block: int, sequence: int, groups: int) -> None:
    found = cut(*kinds)
    assert found.bytes_per_block == block
    assert found.blocks_per_sequence == sequence
    assert found.groups == groups
    assert found.num_blocks == 10 * 2**20 // block
    assert found.block_tokens == 16
    assert found.tokens == int(found.num_blocks / sequence * 1000)
    assert found.bytes_per_sequence == block * sequence


def test_a_window_longer_than_the_request() -> None:
    found = cut((3, SLIDING), (3, HEADS), max_model_len=150)
    # 150 tokens: 10 blocks, and one more for the window
    assert found.blocks_per_sequence == 11 + 10
    assert cut((3, CHUNKED), (3, HEADS), max_model_len=150).blocks_per_sequence == 20


def test_smaller_pages_hold_more_tokens() -> None:
    one = {**SLIDING, "num_kv_heads": 1}  # 64 B a token
    found = cut((2, one), (2, HEADS))
    # made 2,048 B by 32 tokens: 304 are 10 blocks, and one
    assert found.bytes_per_block == 2 * 2_048
    assert found.blocks_per_sequence == 11 + FULL_BLOCKS
    assert found.block_tokens == 16
    three = {**SLIDING, "num_kv_heads": 3}  # 192 B do not divide
    found = cut((2, three), (2, HEADS))
    assert found.bytes_per_block == 2 * 3_072
    assert found.blocks_per_sequence == WINDOW_BLOCKS + FULL_BLOCKS


@pytest.mark.parametrize(("mixer", "held"), [(MAMBA, 3), (LINEAR, 2)])
def test_states_beside_attention(mixer: dict[str, Any], held: int) -> None:
    # a state of 4,864 B needs 3 x 16 tokens of 128 B: blocks of 48 tokens, 6,144 B
    found = cut((2, mixer), (1, HEADS))
    assert found.bytes_per_block == 6_144
    assert found.blocks_per_sequence == 2 * held + 21  # 1,000 / 48
    assert found.block_tokens == 48
    plain = cut((2, mixer), (1, HEADS), prefix_caching=False)
    assert plain.blocks_per_sequence == 2 + 21
    # fp32 states: 384 x 2 + 2,048 x 4 = 8,960 B: 5 x 16 tokens
    wide = cut((1, {**mixer, "state_fp32": True}), (1, HEADS))
    assert wide.bytes_per_block == 80 * 128
    # a kernel whose blocks are 32: 2 x 32 tokens
    assert cut((1, mixer), (1, HEADS), kernel_block=32).bytes_per_block == 64 * 128


def test_states_alone() -> None:
    found = cut((2, MAMBA))
    assert found.bytes_per_block == 2 * 4_864
    assert found.blocks_per_sequence == 3


@pytest.mark.parametrize(
    ("fields", "ranks", "split"), [(HEADS, 1, 1), (HEADS, 2, 2), (HEADS, 8, 2), ({**HEADS, "num_kv_heads": 0}, 8, 4)]
)  # fmt: skip
def test_over_how_many_ranks_a_cache_is_split(
    fields: dict[str, Any], ranks: int, split: int
) -> None:
    assert kv_ranks(of((2, fields)), ranks) == split
    latent = {"kind": MixerKind.MLA, "num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    assert kv_ranks(of((2, latent)), ranks) == 1
    found = cut((2, fields), ranks=ranks, stages=3)
    heads = fields["num_kv_heads"] or 4
    assert found.bytes_per_block == 2 * 16 * heads * 64 // (split * 3)
    assert found.num_blocks == 10 * 2**20 * split * 3 // (2 * 16 * heads * 64)
