"""Every allocation of a layer's forward in order, and of its backward, written down by hand.

Bytes a token of the toy in 16 bit (tests/planner/toys.py); what transformers' code of the family allocates.
"""

from dataclasses import replace
from typing import Any

from planner.families import model_spec_from_config
from planner.layer.blocks import run_layer
from planner.layer.costs import kept_costs
from planner.layer.program import OpSettings, Program
from planner.layer.tape import Storage, Tape
from planner.models.spec import MixerKind, ModelSpec
from tests.planner.toys import CONFIG, LLAMA, MIXTRAL

FULL = OpSettings(full=True)


class Written(Tape):
    """A tape that writes down every allocation; temporaries of an operation are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[float] = []

    def alloc(self, per_token: float, constant: int = 0, *, weight_grad: int = 0) -> Storage:
        """Note one allocation; weights' gradients apart."""
        if per_token:
            self.sizes.append(per_token)
        return super().alloc(per_token, constant, weight_grad=weight_grad)

    def spike(self, per_token: float, constant: int = 0) -> None:
        """Note a temporary."""
        if per_token:
            self.sizes.append(-per_token)
        super().spike(per_token, constant)


def passes(model: ModelSpec, settings: OpSettings = FULL) -> tuple[list[float], list[float]]:
    """Return the allocations of both passes through the first layer, its input 128 left out."""
    tape = Written()
    x = tape.value(model.hidden * settings.residual)
    tape.sizes.clear()
    out = run_layer(Program(tape, settings), x, model.layers[0], model.hidden)
    forward = list(tape.sizes)
    tape.drop(x, out)
    tape.start_backward(out, model.hidden * settings.residual)
    tape.sizes.clear()
    tape.run()
    return forward, list(tape.sizes)


NORM = [256, 256, 4, 4, 256, 128, 128]
"""To fp32, squares, mean, rstd, normalised, back to 16 bit, scaled."""


def norm_back(features: int) -> list[float]:
    """Return the backward of a norm of so many features."""
    two, four = 2 * features, 4 * features
    return [two, -two, four, four, 4, -four, 4, four, four, -2 * four, two]


NORM_BACK = norm_back(64)
"""Of the scale (and its product with the input), cast, normalising: x and rstd and a temporary; rstd,
mean, squares with two temporaries, cast."""


def rotated(size: float) -> list[float]:
    """Cosine part, half beside the turned copy, the copy, sine part, sum."""
    return [size, -1.5 * size, size, size, size]


def turned_back(size: float) -> list[float]:
    """Of the sine part, of x through the turn with its padding, of the cosine part."""
    return [size, size, -size, size]


MLP = [256, 256, 256, 256, 128]
"""Gate, silu, up, their product, down."""
MLP_BACK = [256, 256, 256, 128, 256, 128, 128]
"""Product; silu and up; the input through up; gate through silu; the input through gate, added to the first."""


def test_a_llama_layer() -> None:
    forward, backward = passes(LLAMA)
    attention = [128, 64, 64, *rotated(128), *rotated(64), 16, 128, 128]
    assert forward == [*NORM, *attention, 128, *NORM, *MLP, 128]
    # the norm's gradient is added to the stream's in place
    mlp = [*MLP_BACK, *NORM_BACK]
    attention = [
        128,  # o: the context
        128, 64, 64, -256,  # queries, keys, values, and dq in fp32
        *turned_back(64), *turned_back(128),
        128, 128, 128, 128,  # the input through v and k, which are views: a sum; through q, added in place
    ]  # fmt: skip
    assert backward == [*mlp, *attention, *NORM_BACK]


def test_a_gpt2_layer() -> None:
    model = model_spec_from_config(
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 1000}
    )
    settings = FULL._replace(norm="layernorm", rope=False, hidden_dropout=True)
    forward, backward = passes(model, settings)
    # norm: statistics, output; q, k, v in one; log-sums, context; projection; mask, dropped out; sum;
    # gelu_new: half, power, its scaled copy, sum, its scaled copy, tanh, 1 + tanh, product
    gelu = [512] * 8
    assert forward == [
        8,
        128,
        384,
        16,
        128,
        128,
        64,
        128,
        128,
        8,
        128,
        512,
        *gelu,
        128,
        64,
        128,
        128,
    ]

    # dropout's, down's input 512; both factors'; 1 + tanh's copy, tanh's, sum's: x and the cube's; the cube's
    # copy; the cube's x with two temporaries, added in place; the half's x, added in place; the input; the norm's
    gelu_back = [512, 512, 512, 512, 512, 512, 512, 512, 512, -1024, 512]
    assert backward[:13] == [128, 512, *gelu_back]


def test_a_mixtral_layer() -> None:
    forward, backward = passes(MIXTRAL)
    attention = [128, 64, 64, *rotated(128), *rotated(64), 16, 128, 128]
    mixture = [
        8, 16, 80, 8,  # router's logits, softmax in fp32, ids and order, weights
        256, 1024, 512, 512,  # rows, gate and up, silu, product
        256, 512, 512, 256, 128,  # down, weighted in fp32, in the tokens' order, summed, cast
    ]  # fmt: skip
    assert forward == [*NORM, *attention, 128, *NORM, *mixture, 128]
    assert backward[:13] == [
        256, 512,  # the cast's, the order's: the sum's is a view of it
        512, 256, 8, -1024,  # the weighted rows', down's cast, the weights', two fp32 products
        512,  # the product through down
        512, 512,  # silu's and up's
        512, 1024,  # gate through silu; both in one buffer
        256, 128,  # rows, tokens
    ]  # fmt: skip


def test_a_latent_layer() -> None:
    model = model_spec_from_config(
        {
            **CONFIG, "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "first_k_dense_replace": 3, "n_routed_experts": 4, "num_key_value_heads": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        }
    )  # fmt: skip
    forward, backward = passes(model)
    latent = [
        48, 96, 96, 4, 4, 96, 48, 48,  # q_a and its norm of 24
        192, *rotated(64), 192,  # q_b; 4 x 8 rotated; together again
        80, 128, 128, 4, 4, 128, 64, 64,  # kv_a: latent's norm of 32
        *rotated(16), 256, 192,  # one rotated key of 8; kv_b; keys of 24
        16, 128, 128,
    ]  # fmt: skip
    assert forward == [*NORM, *latent, 128, *NORM, *MLP, 128]
    back = [
        128, 192, 192, 128, -384,  # context; queries, keys, values, dq in fp32
        128, 16, 256, 64,  # keys: from kv_b and the rotated one; kv_b's whole; the latent
        *turned_back(16), *norm_back(32), 80, 128,  # the rotated key, the norm, kv_a's whole, the input
        128, 64, *turned_back(64), 192, 48,  # queries: straight and rotated; q_b's whole; its input
        *norm_back(24), 128, 128,  # the norm; the input through q_a, a view: a sum
    ]  # fmt: skip
    assert backward == [*MLP_BACK, *NORM_BACK, *back, *NORM_BACK]


def test_a_gated_attention_layer() -> None:
    model = model_spec_from_config(
        {
            **CONFIG, "model_type": "qwen3_next", "head_dim": 16, "num_hidden_layers": 4,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        }
    )  # fmt: skip
    gated = next(layer for layer in model.layers if layer.mixer.kind is MixerKind.FULL)
    tape = Written()
    x = tape.value(128)
    run_layer(Program(tape, FULL), x, gated, 64)
    start = tape.sizes[1:]
    head_norm = [256, 256, 4, 4, 256, 128, 128]
    key_norm = [128, 128, 4, 4, 128, 64, 64]
    expected = [
        *NORM,
        256, 64, 64,  # queries and their gates, keys, values
        *head_norm, *key_norm, *rotated(128), *rotated(64),
        16, 128,  # log-sums, context
        128, 128,  # the gate's sigmoid, the gated context
        128, 128,  # output projection, sum
    ]  # fmt: skip
    assert start[: len(expected)] == expected


def test_a_linear_attention_layer() -> None:
    model = model_spec_from_config(
        {
            **CONFIG, "model_type": "qwen3_next", "head_dim": 16, "num_hidden_layers": 4,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        }
    )  # fmt: skip
    linear = next(layer for layer in model.layers if layer.mixer.kind is MixerKind.LINEAR)
    tape = Written()
    x = tape.value(128)
    run_layer(Program(tape, FULL), x, linear, 64)
    # q and k 2 x 16 each, v and z 4 x 16 each: 192 columns; b and a 4 each; v and z copied out, b and a
    assert tape.sizes[1:14] == [*NORM, 384, 16, 128, 128, 8, 8]


def test_every_projection_of_a_delta_net_counts() -> None:
    # Qwen3.5: q, k, v 128 columns, z 64, b and a 4 each; inner 64
    dense = {
        "model_type": "qwen3_5_text", "head_dim": 16, "num_hidden_layers": 4,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    assert mixer_of(MixerKind.LINEAR, **dense)[:17] == [
        256, 128, 8, 8,
        256, 8,  # q, k and v convolved; beta
        16, 16, 16, 16,  # a in fp32, shifted, softplus, the decay
        128, 128,  # q and k for each of the four value heads
        128, 128, 128, 48, 512,  # normalised q and k, v, norms and decays, 64 x 64 of a chunk a head
    ]  # fmt: skip
    # Kimi: q, k, v 64 each; the decay 16 and from it 64; b 4; the gate 16 and from it 64
    lists = {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    kimi = {
        "model_type": "kimi_linear", "num_hidden_layers": 4, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 4,
        "num_experts_per_token": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1,
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, **lists},
    }  # fmt: skip
    made = mixer_of(MixerKind.LINEAR, **kimi)
    assert made[:7] == [128, 128, 128, 384, 384, 32, 128]  # in one, convolved; the decay's two
    assert made[15:17] == [8, 8]  # b and beta
    assert made[25:28] == [128, 32, 128]  # the kernel's result, the gate's two


def test_mamba_1s_second_projection_reads_the_convolution() -> None:
    config = {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2,
              "time_step_rank": 4}  # fmt: skip
    # in 2 x 128, convolution 128, x_proj 4 + 2 x 16, scan 128; dt_proj is inside the scan
    assert mixer_of(MixerKind.MAMBA, **config) == [512, 256, 72, 256, 128, 128]


def mixer_of(kind: MixerKind, **config: Any) -> list[float]:
    """Return what the first layer of a kind allocates from its norm to the stream's sum."""
    model = model_spec_from_config({**CONFIG, **config})
    layer = next(layer for layer in model.layers if layer.mixer.kind is kind)
    tape = Written()
    run_layer(Program(tape, FULL), tape.value(128), layer, 64)
    return tape.sizes[1 + len(NORM) :]


def test_adapters_in_order() -> None:
    settings = OpSettings(adapted=frozenset({"q_proj"}), rank=8, dropout=True)
    forward, _ = passes(LLAMA, settings)
    # base; fp32 x; mask, dropped out; A's 8 and B's 64 in fp32, scaled; fp32 sum, 16 bit
    assert forward[7:16] == [128, 256, 64, 256, 32, 256, 256, 256, 128]


def one(**fields: Any) -> list[float]:
    """Return what one linear of 64 in, 32 out allocates."""
    tape = Written()
    x = tape.value(64 * fields.pop("width", 2))
    tape.sizes.clear()
    width = int(x.size / 64)
    Program(tape, OpSettings(**fields)).linear(x, LLAMA.layers[0].modules[1], width)
    return tape.sizes


def test_linears_in_order() -> None:
    assert one() == [64]
    assert one(quantized=True, width=4, residual=4) == [128, -64, 64, 128]
    assert one(quantized=True, saved_input=4) == [256, -64, 64]
    assert one(quantized=True, saved_input=2) == [-64, 64]
    assert one(saved_output=True) == [64, 64]
    assert one(autocast=True, width=4, residual=4, weight=4) == [128, 64]


def test_qwen_s_shared_expert_runs_before_the_routed_ones() -> None:
    model = model_spec_from_config(
        {
            **CONFIG, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 128, "shared_expert_intermediate_size": 32,
        }
    )  # fmt: skip
    forward, _ = passes(model)
    # its gate, silu, up and product 64 each, down; then the router's 4 logits (modeling_qwen2_moe.py)
    assert forward[-22:-16] == [64, 64, 64, 64, 128, 8]
    # at the end its gate's number, the sigmoid and the product with it; the sum of both; the residual's
    assert forward[-5:] == [2, 2, 128, 128, 128]


def test_keys_that_double_as_values() -> None:
    layer = LLAMA.layers[0]
    modules = tuple(module for module in layer.modules if module.leaf != "v_proj")
    model = replace(LLAMA, layers=(replace(layer, modules=modules),))
    forward, _ = passes(model)
    # the values are the keys before they are rotated
    attention = [128, 64, *rotated(128), *rotated(64), 16, 128, 128]
    assert forward == [*NORM, *attention, 128, *NORM, *MLP, 128]
    # q, rotated keys, keys, log-sums, context; norms and the MLP as in test_hand_layers.py
    found = kept_costs(model.layers[0], 64, FULL).kept
    assert found.per_token == 2 * 516 + 128 + 64 + 64 + 16 + 128 + 1024


def test_a_layer_norm_answers_in_fp32_under_autocast() -> None:
    model = model_spec_from_config(
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 1000}
    )
    settings = OpSettings(
        norm="layernorm", rope=False, autocast=True, adapted=frozenset({"c_attn"}), rank=8
    )
    forward, _ = passes(model, settings)
    # the norm: fp32 copy, statistics, result; the base: its 16-bit cast and 192 columns; the adapter takes
    # the fp32 as it is, casts it, A's 8, B's 192, scaled; their sum
    assert forward[:10] == [256, 8, 256, 128, 384, 128, 16, 384, 384, 384]


def test_phi_has_one_norm_for_both_parts() -> None:
    model = model_spec_from_config({**CONFIG, "model_type": "phi"})
    settings = FULL._replace(norm="layernorm", residual=4)
    forward, _ = passes(model, settings)
    # statistics 8 and the normed 256; q, k, v; q rotated, and k; log-sums and context, projected; then fc1 and
    # gelu_new's: x, cube, scaled, sum, times, tanh, 1 + tanh, half, product: 256 each; fc2; attention and
    # MLP together in 16 bit, and with the fp32 stream
    assert forward[:2] == [8, 256]
    assert forward.count(8) == 1
    assert forward[-3:] == [128, 128, 256]


def test_neox_has_a_norm_for_each_part() -> None:
    config = {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 128,
              "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000}  # fmt: skip
    model = model_spec_from_config(config)
    forward, backward = passes(model, FULL._replace(norm="layernorm"))
    # norm; q, k, v in one; q and k rotated: cosine, the half turned and its sine, sum; log-sums, context, projected;
    # a norm of its own; up, gelu, down; the two parts' sum, and with the stream
    rotated = [128, -192, 128, 128, 128]
    assert forward == [
        8, 128, 384, *rotated, *rotated, 16, 128, 128,
        8, 128, 256, 256, 128, 128, 128,
    ]  # fmt: skip
    assert backward[:2] == [256, 256]


def test_experts_answer_in_the_streams_dtype() -> None:
    forward, _ = passes(MIXTRAL, FULL._replace(residual=4))
    # the experts' sum 128 in 16 bit, cast to fp32 256, added to the stream 256
    assert forward[-3:] == [128, 256, 256]


def test_a_scan_without_a_width_of_its_own_is_as_wide_as_the_stream() -> None:
    model = model_spec_from_config(
        {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000,
         "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "conv_kernel": 4}
    )  # fmt: skip
    layer = model.layers[0]
    bare = replace(model, layers=(replace(layer, mixer=replace(layer.mixer, inner_dim=0)),))
    forward, _ = passes(bare)
    # 64 of the stream in 16 bit, though it is fp32 here: convolution and scan 128 each
    wide, _ = passes(bare, FULL._replace(residual=4))
    assert forward.count(592) == wide.count(592) == 1
    at = forward.index(592)
    assert [size for size in forward[at + 1 :] if size > 0][:2] == [128, 128]
    at = wide.index(592)
    assert [size for size in wide[at + 1 :] if size > 0][:2] == [128, 128]
