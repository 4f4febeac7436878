"""Delta nets by hand: what stays for backward is what transformers' code and its kernels save."""

from typing import Any

from planner.families import model_spec_from_config
from planner.layer.program import OpSettings, Program
from planner.layer.tape import Tape
from planner.mixers.registry import mixer_of
from planner.models.spec import LayerSpec

FULL = OpSettings(full=True)
FROZEN = OpSettings()
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
NEXT = model_spec_from_config(
    {
        **SMALL, **HEADS, "model_type": "qwen3_next", "intermediate_size": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }
).layers[0]  # fmt: skip
KIMI = model_spec_from_config(
    {
        **SMALL, "model_type": "kimi_linear", "num_attention_heads": 4, "linear_num_heads": 4,
        "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "kv_lora_rank": 32, "q_lora_rank": None,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }
).layers[0]  # fmt: skip


def kept(layer: LayerSpec, settings: OpSettings) -> float:
    """Return the bytes per token that the mixer's graph holds once its result is gone, the input's too."""
    tape = Tape()
    mixer = mixer_of(layer.mixer)
    assert mixer.record is not None
    x = tape.value(128)
    out = mixer.record(Program(tape, settings), x, layer, mixer.linears(layer), 2)
    tape.drop(x, out)
    return tape.now().per_token


def test_a_gated_delta_net_keeps_q_k_and_v_normalised_and_its_norm_in_fp32() -> None:
    # the convolution's input of 32 + 32 + 64 columns; beta, the decay's argument
    inside = 256 + 8 + 16
    # q and k for each of four heads, v out of the convolution's result; statistics; 64 pairs a head
    kernel = 128 + 128 + 128 + 48 + 512
    # the norm's input in fp32, 1/rms, its scaled result; the gate in fp32 and its silu
    norm = 256 + 16 + 128 + 256 + 256
    assert kept(NEXT, FROZEN) == inside + kernel + norm
    # trained: the stream, softplus, what the norm's weight meets, out_proj's input
    assert kept(NEXT, FULL) == inside + kernel + norm + 128 + 16 + 128 + 128


def test_kimi_s_decay_has_a_number_for_every_channel() -> None:
    # q, k, v in one; the gate's comparison, exp and 1 + exp in fp32; the decay; beta
    inside = 384 + 64 + 256 + 256 + 256 + 8
    # q, k, v; the decay summed up; pairs of queries and keys, and of keys; statistics
    kernel = 3 * 128 + 256 + 2 * 512 + 32
    # the norm's input, 1/rms, its scaled result in fp32, the gate's sigmoid
    norm = 256 + 16 + 256 + 256
    assert kept(KIMI, FROZEN) == inside + kernel + norm
    # trained: the stream, two low ranks of 16, softplus, the norm's result, o_proj's input
    assert kept(KIMI, FULL) == inside + kernel + norm + 128 + 2 * 32 + 256 + 256 + 128


def test_a_convolution_alone_keeps_every_factor() -> None:
    config = {**SMALL, **HEADS, "model_type": "lfm2", "full_attn_idxs": [3], "block_ff_dim": 128}
    layer = model_spec_from_config(config).layers[0]
    # B, C and x in one 384; B * x, and what is convolved
    assert kept(layer, FROZEN) == 384 + 128 + 128
    # trained: the stream, and out_proj's input
    assert kept(layer, FULL) == 384 + 128 + 128 + 2 * 128


def test_the_gradient_of_a_gated_delta_net_needs_the_states_of_every_chunk() -> None:
    tape = Tape()
    mixer = mixer_of(NEXT.mixer)
    assert mixer.record is not None
    x = tape.value(128)
    out = mixer.record(Program(tape, FROZEN), x, NEXT, mixer.linears(NEXT), 2)
    tape.drop(x)
    tape.start_backward(out, 128)
    while len(tape.nodes) > 1 and len(tape.nodes[-1].saved) < 5:  # up to the kernel's node
        tape._run(tape.nodes.pop())
    before = tape.now().per_token
    tape.points.clear()
    tape._run(tape.nodes.pop())
    # gradients of q, k, v, decay and beta; beside them w, u, both v's, dw, dk2 and two states of 16 x 64 / 64
    made = 128 + 128 + 128 + 16 + 8
    assert max(p.per_token for p in tape.points) - before == made + 6 * 128 + 2 * 32
