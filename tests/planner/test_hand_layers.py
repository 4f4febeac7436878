"""Whole layers and a model's activations by hand: what autograd keeps of each, and where it is largest.

The toy (tests/planner/toys.py) in 16 bit, bytes a token: hidden 128, MLP 256, q 128, k and v 64, log-sums 16.
An RMS norm keeps its fp32 input 256 and 4, trained its 16-bit result 128 too; its output is kept by what reads it.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.layer.costs import checkpointed_costs, kept_costs, no_grad_costs
from planner.layer.program import OpSettings
from planner.layer.tape import Point, largest
from planner.models.spec import LayerSpec, ModelSpec
from planner.terms.activations import activations, masks, op_settings, pinned
from tests.planner.toys import CONFIG, LLAMA, MIXED, MIXTRAL, choices, gpus

ALL = frozenset("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())  # noqa: SIM905
FULL = OpSettings(full=True)
LORA = OpSettings(adapted=ALL, rank=8)
SDPA = 128 + 64 + 64 + 16 + 128  # q, k, v, log-sums, output
MANY = 10**6


def built(**config: Any) -> ModelSpec:
    """Return a toy of another family."""
    return model_spec_from_config({**CONFIG, **config})


def kept(layer: LayerSpec, settings: OpSettings, hidden: int = 64) -> float:
    """Return what a layer's graph holds, bytes a token."""
    return kept_costs(layer, hidden, settings).kept.per_token


LAYER = LLAMA.layers[0]


def test_a_trained_llama_layer() -> None:
    # two norms 388 and their outputs 128; attention; gate, silu, up and the product 256 each
    assert kept(LAYER, FULL) == 2 * 516 + SDPA + 4 * 256
    costs = kept_costs(LAYER, 64, FULL)
    assert not costs.keeps_input
    # at the end: all that, and input, middle, the MLP's output and the sum: 128 each
    assert largest(costs.forward, MANY).per_token == 2456 + 512
    # backward at the product: all kept less the product, the stream's gradient 128, the product's 256,
    # those of silu and up 512; down's weight has its gradient: 8,192 x 2
    assert largest(costs.backward, MANY) == Point(2456 - 256 + 128 + 256 + 512, 0, 16_384)
    # all weights' gradients in the end
    assert max(point.weight_grads for point in costs.backward) == 2 * 36_992
    assert largest(costs.backward, 0).weight_grads == 2 * 36_992


def test_a_llama_layer_without_a_graph() -> None:
    # input, middle, norm's output 128 each; silu, up and the product 256 each
    assert largest(no_grad_costs(LAYER, 64, FULL), MANY).per_token == 3 * 128 + 3 * 256
    # with adapters in up: the three, silu, base, and fp32: x 256, B's and scaled 512 each
    assert largest(no_grad_costs(LAYER, 64, LORA), MANY).per_token == 384 + 256 + 256 + 256 + 1024


def test_a_llama_layer_with_fp32_adapters() -> None:
    # norms 260; every adapter its fp32 input 256 (down 512) and A's 32; silu 3 x 256
    assert kept(LAYER, LORA) == 520 + 6 * 288 + 544 + SDPA + 3 * 256
    # backward in down's adapter: kept 3,960, stream 128, sum's gradient 256 -> base's 128 and B's 256,
    # then the scaled's and B's: 4,728
    assert largest(kept_costs(LAYER, 64, LORA).backward, MANY).per_token == 3960 + 128 + 256 + 384


def test_a_llama_layer_with_16_bit_adapters() -> None:
    # adapters share the norms' outputs and the context; down keeps the product 256
    settings = LORA._replace(adapter=2)
    assert kept(LAYER, settings) == 2 * (260 + 128) + 7 * 16 + SDPA + 4 * 256


def test_adapters_on_attention_alone() -> None:
    settings = OpSettings(adapted=frozenset({"q_proj", "v_proj"}), rank=8, adapter=2)
    # norm, its output, two A's; attention; the second norm; silu's 3 x 256
    assert kept(LAYER, settings) == 260 + 128 + 32 + SDPA + 260 + 768


def test_an_eager_llama_layer() -> None:
    # 8 tokens: q and repeated k, v 384, softmax 128 and its copy 64; the output projection's input 128
    settings = FULL._replace(attention="eager", seq=8)
    assert kept(LAYER, settings) == 2 * 516 + 384 + 192 + 128 + 1024


def test_fused_kernels_keep_less() -> None:
    # norms keep their input 128 and 8; swiglu gate and up 512, the product 256 for down
    settings = FULL._replace(fused=frozenset({"rmsnorm", "swiglu", "rope"}))
    # the layer's input, the middle; norms' outputs
    assert kept(LAYER, settings) == 2 * (136 + 128) + SDPA + 3 * 256
    assert kept_costs(LAYER, 64, settings).keeps_input


def test_a_checkpointed_layer_runs_again_up_to_its_last_saved_tensor() -> None:
    costs = checkpointed_costs(LAYER, 64, FULL)
    # the same moment as without: its input is counted elsewhere
    assert largest(costs.recompute, MANY) == Point(2840 + 256, 0, 16_384)
    # fetched from the host it is needed only while the forward runs again: up to the product 2,456,
    # middle and input 128 each, and the gradient 128 is less
    assert largest(costs.recompute_fetched, MANY).per_token == 2840 + 256


def test_gradients_that_exist_already_are_added_and_freed() -> None:
    costs = kept_costs(LAYER, 64, FULL._replace(accumulate=True))
    assert max(point.weight_grads for point in costs.backward) == 16_384  # one linear at a time


def test_a_tiled_mlp_keeps_its_input() -> None:
    settings = FULL._replace(mlp_tile=4)
    # second norm's output alone
    assert kept(LAYER, settings) == 2 * 516 + SDPA
    # a tile of 4, frozen: x 128, gate, silu, up 256 each; backward the product's 256, silu's and up's
    points = kept_costs(LAYER, 64, OpSettings(mlp_tile=4)).backward
    assert max(point.constant for point in points) == 4 * (128 + 768 + 256 + 512)
    both = settings._replace(norm_tile=4)
    # the layer's input for the first norm, its output, the middle for the second, its output
    assert kept(LAYER, both) == 4 * 128 + SDPA


GPT2 = model_spec_from_config(
    {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "vocab_size": 1000,
        "n_positions": 64,
    }
)


def test_a_gpt2_layer() -> None:
    layer = GPT2.layers[0]
    settings = FULL._replace(norm="layernorm", rope=False, hidden_dropout=True)
    # norms: input 128 and 8, output 128; q, k, v in one 384, log-sums 16, context 128, mask 64;
    # gelu_new: x, half, tanh, 1 + tanh 512 each; product 512; mask 64
    assert kept(layer, settings) == 2 * 264 + 384 + 16 + 128 + 64 + 4 * 512 + 512 + 64
    assert kept_costs(layer, 64, settings).keeps_input
    # without dropout the second norm and the output are the same
    assert kept(layer, settings._replace(hidden_dropout=False)) == 3744 - 128


@pytest.mark.parametrize(
    ("activation", "size"),
    [
        ("relu", 512),  # its output, which the second linear keeps too
        ("relu2", 1024),  # relu's output and the square
        ("quick_gelu", 1536),  # x, the gate, the product
        ("gelu", 1024),  # x and the result
        ("gelu_new", 2560),
    ],
)
def test_activation_functions(activation: str, size: int) -> None:
    model = model_spec_from_config(
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 1000,
         "activation_function": activation}
    )  # fmt: skip
    settings = FULL._replace(norm="layernorm", rope=False)
    assert kept(model.layers[0], settings) == 2 * 264 + 384 + 16 + 128 + size


def test_gelu_news_power_is_fp32_under_autocast() -> None:
    settings = OpSettings(
        full=True, norm="layernorm", rope=False, autocast=True, weight=4, residual=4, grad=4
    )
    # fp32 stream: norms keep 256 + 8; their 16-bit casts 128; q, k, v 384, 16, context 128;
    # gelu: x's fp32 1,024, tanh and 1 + tanh 1,024 each, half 512; the product fp32 is cast: 512
    found = kept_costs(GPT2.layers[0], 64, settings)
    assert found.kept.per_token == 2 * (264 + 128) + 384 + 16 + 128 + 3 * 1024 + 512 + 512
    # 16-bit copies of 12 x 64 x 64 weights
    assert found.kept.constant == 2 * 12 * 64 * 64


def test_a_mixtral_layer() -> None:
    # router logits: softmax fp32 4 x 4, ids, order and inverse 2 x 40, weights 2 x 4; for 2 experts a token:
    # rows 256, gate and up in one 1,024, silu 512, product 512, down's output 256
    mixture = 16 + 80 + 8 + 256 + 1024 + 512 + 512 + 256
    assert kept(MIXTRAL.layers[0], FULL) == 2 * 516 + SDPA + mixture
    costs = kept_costs(MIXTRAL.layers[0], 64, FULL)
    # attention 12,288, experts 4 x 3 x 8,192, router 256, norms 128
    assert max(p.weight_grads for p in costs.backward) == 2 * (12_288 + 98_304 + 256 + 128)


def test_adapters_on_fused_experts_make_the_weight_whole() -> None:
    settings = OpSettings(expert_adapters=(20_480, 6_144), rank=8)
    costs = kept_costs(MIXTRAL.layers[0], 64, settings)
    # W + BA: 98,304 x 2 B, and both factors in 16 bit
    assert costs.kept.constant == 2 * (98_304 + 20_480 + 6_144)
    # backward of gate and up, down's gone: their weight 65,536 and factors, its gradient, and
    # the gradients of down's factors x 4
    assert largest(costs.backward, 0)[1:] == (2 * (2 * 65_536 + 20_480), 4 * 6_144)


def test_an_adapter_on_one_part_of_the_experts_leaves_the_other_as_it_is() -> None:
    down = kept_costs(MIXTRAL.layers[0], 64, OpSettings(expert_adapters=(0, 6_144), rank=8))
    assert down.kept.constant == 2 * (32_768 + 6_144)


def test_a_latent_layer() -> None:
    model = built(
        model_type="deepseek_v3", q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=3, n_routed_experts=4,
        num_key_value_heads=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
    )  # fmt: skip
    # q: norm of 24: 96 + 4 + 48, its output 48; latent of 32: 128 + 4 + 64, its output 64;
    # q and k of 4 x 24: 192 each, k's and v's one projection 256, log-sums 16, context 128
    latent = 148 + 48 + 196 + 64 + 192 + 192 + 256 + 16 + 128
    assert kept(model.layers[0], FULL) == 2 * 516 + latent + 1024


def test_a_mamba_2_layer() -> None:
    model = model_spec_from_config(
        {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000,
         "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "conv_kernel": 4}
    )  # fmt: skip
    # norm and its output; in_proj 2 x 128 + 2 x 16 + 8 = 296 columns; conv's and scan's results 256 each
    assert kept(model.layers[0], FULL) == 516 + 592 + 512
    costs = kept_costs(model.layers[0], 64, FULL)
    # backward of the convolution: norm 388 and its output 128, projections 592 and their gradient 592,
    # incoming 256, scratch 592, the stream's gradient 128 — the scanned part is gone
    assert largest(costs.backward, MANY).per_token == 516 + 3 * 592 + 256 + 128


def test_a_gemma_2_layer_has_norms_around_its_blocks() -> None:
    model = built(model_type="gemma2", head_dim=16, query_pre_attn_scalar=16)
    settings = FULL._replace(norm="rmsnorm_gemma")
    # four norms keep fp32 x 256, 4 and the fp32 normed 256; the first of each block its output 128
    assert kept(model.layers[0], settings) == 4 * 516 + 2 * 128 + SDPA + 1024


def test_a_fused_gate_and_up() -> None:
    model = built(model_type="phi3", pad_token_id=0)
    # q, k, v in one 256 (nothing rotated is a view: q and k are new); gate and up in one 512
    q_k_v = 128 + 64 + 256
    assert kept(model.layers[0], FULL) == 2 * 516 + q_k_v + 16 + 128 + 512 + 256 + 256


def of(model: ModelSpec = LLAMA, **fields: Any) -> Any:
    """Return the activations of a run of 16 tokens."""
    machine = gpus(fields.pop("gpus", 1))
    r = choices(model, machine, **fields)
    return activations(model, r, r.tokens)


T = 16
ROTARY = 2 * 16 * 16 * 2  # cosines and sines of 16 positions x 16 in 16 bit
TOP = 516, 260 + 128, 1536  # the final norm trained, frozen with its output, and backward


def test_full_fine_tuning_without_checkpointing() -> None:
    found = of(method="full", checkpointing="none")
    assert found.kept == ROTARY + 3 * 2456 * T
    # the final norm 900, and the embeddings' output that the model's code holds
    assert found.forward == found.kept + 900 * T + 128 * T
    assert found.no_grad == ROTARY + 1152 * T
    assert found.loss_forward == found.loss_backward == found.kept + 516 * T
    assert found.loss_copied == found.kept + 388 * T
    norm, last, first = found.backward
    assert norm == (found.kept + 1536 * T, 0, 3)
    # the largest with all its weights' gradients, near the layer's end, or with few of them: at 16
    # tokens the gradients win
    assert last.layers_left == 3
    assert first.layers_left == 1
    assert last.activations - first.activations == 2 * 2456 * T
    assert found.host == found.autocast_cache == 0


def test_lora_without_checkpointing() -> None:
    found = of(method="lora", lora={"rank": 8}, checkpointing="none")
    # nothing before the first adapters needs a gradient: the first norm keeps nothing
    assert found.kept == ROTARY + (3 * 3960 - 260) * T
    assert found.loss_forward == found.kept + 388 * T
    assert found.loss_backward == found.kept + 260 * T
    assert found.backward[0] == (found.kept + 1536 * T, 0, 3)


def test_lora_with_checkpointing() -> None:
    found = of(method="lora", lora={"rank": 8}, checkpointing="full")
    one = 128 * T
    assert found.kept == ROTARY + 3 * one
    assert found.no_grad == ROTARY + 2176 * T
    assert found.forward == found.kept + 2176 * T - one
    norm, last, first = found.backward
    assert norm == (found.kept + 1536 * T, 0, 3)
    # one layer again: 4,728 a token at its largest; then its input's own gradient beside the input
    assert last.activations - found.kept == first.activations - ROTARY - one
    assert found.host == 0


def test_checkpoints_of_two_layers() -> None:
    found = of(method="lora", lora={"rank": 8}, checkpointing="every-k", checkpoint_every=2)
    single = of(method="lora", lora={"rank": 8}, checkpointing="full")
    assert found.kept == ROTARY + 2 * 128 * T  # ceil(3 / 2)
    # the other layer's graph while one runs backward
    assert found.backward[1].activations == single.backward[1].activations - 128 * T + 3960 * T


def test_reentrant_checkpoints_hold_the_recomputed_output() -> None:
    plain = of(method="full", checkpointing="full")
    held = of(method="full", checkpointing="full", switches={"reentrant": True})
    for index, more in ((0, 0), (1, 128 * T), (2, 128 * T)):
        assert held.backward[index].activations - plain.backward[index].activations == more


def test_offloaded_inputs_wait_on_the_host() -> None:
    fields = {"method": "full", "checkpointing": "offload"}
    found = of(**fields, offload_keep_layers=1)
    one = 128 * T
    assert found.kept == ROTARY + one
    assert found.host == 2 * 2048
    assert of(**fields, offload_keep_layers=0).kept == ROTARY
    assert of(**fields, offload_keep_layers=0).host == 3 * 2048
    assert of(**fields, offload_keep_layers=9).kept == ROTARY + 3 * one
    assert of(**fields, offload_keep_layers=9).host == 0
    # a frozen embedding's output is a leaf that its node holds
    frozen = of(method="lora", lora={"rank": 8}, checkpointing="offload", offload_keep_layers=1)
    assert frozen.kept == ROTARY + 2 * one
    no_leaf = of(
        method="lora", lora={"rank": 8}, checkpointing="offload", offload_keep_layers=1,
        switches={"frozen_embedding_leaf": False},
    )  # fmt: skip
    assert no_leaf.kept == ROTARY + one


def test_pinned_blocks_are_powers_of_two_and_one_slab_is_exact() -> None:
    assert [pinned(size, choices()) for size in (0, 1, 2, 3, 2048, 2049)] == [
        0,
        1,
        2,
        4,
        2048,
        4096,
    ]
    exact = choices(switches={"exact_host_slab": True})
    assert pinned(2049, exact) == 2049
    fields = {"method": "full", "checkpointing": "offload", "context": 17}
    assert of(**fields).host == 2 * 4096  # 128 x 17 = 2,176
    assert of(**fields, switches={"exact_host_slab": True}).host == 2 * 2176


def test_autocast_holds_its_casts_until_the_forward_is_over() -> None:
    found = of(method="full", checkpointing="full", dtype="fp32", mixed_precision="bf16")
    assert found.autocast_cache == 2 * 110_592
    # fp32 stream: inputs 256 a token, positions in fp32
    assert found.kept == 2 * ROTARY + 3 * 256 * T
    # fp32 adapters of rank 16: q and o 2,048 each, k and v 1,536, gate, up and down 3,072; three layers
    factors = 3 * (2 * 2048 + 2 * 1536 + 3 * 3072)
    lora = of(method="lora", checkpointing="full", dtype="fp32", mixed_precision="bf16")
    assert lora.autocast_cache == 2 * factors


def test_an_embeddings_dropout_keeps_a_mask() -> None:
    dropped = replace(GPT2, embedding_dropout=0.1)
    found = of(dropped, method="full", checkpointing="full")
    # no positions to rotate but the law's table: mask 64 a token, two inputs
    table = 2 * 16 * 16 * 2
    assert found.kept == table + 64 * T + 2 * 128 * T
    plain = of(dropped, method="full", checkpointing="none")
    assert plain.kept == table + 64 * T + 2 * 3744 * T


def test_masks_of_the_models_forward() -> None:
    eager = of(method="full", checkpointing="none", attention="eager")
    bare = choices(method="full", checkpointing="none", attention="eager")
    # [16, 16] in 16 bit; an eager layer without a graph 1,152 or more a token
    settings = op_settings(LLAMA, bare)
    assert masks(LLAMA, bare, settings) == 512
    graph = largest(no_grad_costs(LAYER, 64, settings), T).at(T)
    assert eager.no_grad == ROTARY + graph + 512
    # SDPA's is boolean, and there where rows are padded
    padded = replace(choices(method="full", checkpointing="none"), padded=True)
    found = activations(LLAMA, padded, T)
    assert masks(LLAMA, padded, op_settings(LLAMA, padded)) == 256
    graph = largest(no_grad_costs(LAYER, 64, op_settings(LLAMA, padded)), T).at(T)
    assert found.no_grad == ROTARY + graph + 256
    assert found.forward == found.kept + (900 + 128) * T + 256


def test_what_outlives_a_step_with_its_outputs() -> None:
    held = {"keeps_outputs": True, "frozen_embedding_leaf": True, "reentrant": False}
    lora = {"method": "lora", "checkpointing": "full", "lora": {"rank": 8}}
    # a leaf of 128 a token and its gradient; a reentrant checkpoint's positions too
    assert of(switches=held, **lora).outliving == 2 * 128 * T
    assert of(switches={**held, "reentrant": True}, **lora).outliving == 2 * 128 * T + ROTARY
    assert of(switches={**held, "keeps_outputs": False}, **lora).outliving == 0
    assert of(switches={**held, "frozen_embedding_leaf": False}, **lora).outliving == 0


def test_settings_follow_the_recipe() -> None:
    full = op_settings(LLAMA, choices(method="full", dtype="fp32", mixed_precision="bf16"))
    assert (full.act, full.weight, full.residual, full.grad) == (2, 4, 4, 4)
    lora = op_settings(LLAMA, choices(method="lora", lora={"rank": 8}))
    assert (lora.act, lora.weight, lora.residual, lora.adapter, lora.grad) == (2, 2, 2, 4, 0)
    upcast = op_settings(LLAMA, choices(method="qlora", switches={"kbit_upcast": "all"}))
    assert (upcast.act, upcast.residual) == (2, 4)
    sharded = choices(LLAMA, gpus(2), method="full", sharding="fsdp", mixed_precision="bf16")
    assert op_settings(LLAMA, sharded)[:1] + op_settings(LLAMA, sharded)[5:6] == (True, 2)
    tiled = choices(method="full", tiled_mlp=True, context=4096)
    assert op_settings(LLAMA, tiled).mlp_tile == 2048
    assert op_settings(LLAMA, choices(method="full", tiled_mlp=True, context=2048)).mlp_tile == 0
    eager = op_settings(LLAMA, choices(method="full", attention="eager", context=24))
    assert eager.seq == 24
    # fp32 leaves SDPA its math kernel
    assert op_settings(LLAMA, choices(method="full", dtype="fp32")).seq == 16
    assert op_settings(LLAMA, choices(method="full")).seq == 0


def test_experts_without_a_gate() -> None:
    mixtral = MIXTRAL.layers[0]
    experts = tuple(
        replace(module, shapes=((4, 128, 64), (4, 64, 128))) if "experts" in module.name else module
        for module in mixtral.modules
    )
    layer = replace(mixtral, mlp=replace(mixtral.mlp, expert_gated=False), modules=experts)
    # router 104; rows 256, up 512, silu 512, down 256
    costs = kept_costs(layer, 64, FULL)
    assert costs.kept.per_token == 2 * 516 + SDPA + 104 + 256 + 512 + 512 + 256
    assert max(p.weight_grads for p in costs.backward) == 2 * (12_288 + 65_536 + 256 + 128)


def test_casts_of_weights_while_a_checkpoint_runs_again() -> None:
    settings = OpSettings(full=True, autocast=True, weight=4, residual=4, grad=4)
    costs = checkpointed_costs(LAYER, 64, settings)
    # all 36,864 weights of its linears in 16 bit, once
    assert max(point.constant for point in costs.recompute) == 73_728
    # frozen, with the 8,192 weights of its adapters: no gradients that hide a second copy
    adapted = LORA._replace(autocast=True, weight=4, residual=4)
    costs = checkpointed_costs(LAYER, 64, adapted)
    assert max(point.constant for point in costs.recompute) == 73_728 + 16_384


def test_fp32_adapters_make_the_recomputed_forward_the_largest() -> None:
    costs = checkpointed_costs(LAYER, 64, LORA)
    # when down's B runs again all that backward needs is there, 3,960, beside the middle 128, the product 256,
    # the base's output 128, and what waits: the stream's gradient 128 and the scaled output's in fp32, 256
    assert largest(costs.recompute, MANY).per_token >= 3_960 + 128 + 256 + 128 + 128 + 256


def test_the_last_layer_is_not_the_first() -> None:
    # the toy with a last layer of an MLP of 256: gate, silu, up and product 4 x 512 kept, not 4 x 256
    model = replace(MIXED, layer_order=(0, 0, 1))
    found = of(model, method="full", checkpointing="none")
    assert found.kept == ROTARY + (3 * 2456 + 1024) * T
    _, last, first = found.backward
    # few tokens: largest when all of a layer's gradients are there, of 61,568 and of 36,992 weights
    assert (last.layer_grads, first.layer_grads) == (2 * 61_568, 2 * 36_992)


def test_an_input_that_a_fused_norm_saves_stays_when_it_came_from_the_host() -> None:
    settings = LORA._replace(fused=frozenset({"rmsnorm", "swiglu", "rope"}))
    costs = checkpointed_costs(LAYER, 64, settings)
    # from the host its 128 are this layer's own
    stored, fetched = largest(costs.recompute, MANY), largest(costs.recompute_fetched, MANY)
    assert fetched.per_token == stored.per_token + 128


def test_the_parts_of_what_is_kept_add_up() -> None:
    dropped = replace(GPT2, embedding_dropout=0.1)
    for model, fields in (
        (dropped, {"method": "full", "checkpointing": "full"}),
        (LLAMA, {"method": "lora", "checkpointing": "offload", "offload_keep_layers": 1}),
    ):
        found = of(model, **fields)
        assert sum(count * each for _, count, each in found.parts) == found.kept


def test_nothing_is_the_largest_of_no_points() -> None:
    assert largest((), MANY) == Point(0, 0, 0)


def test_a_checkpointed_losss_copy_lacks_the_norms_output() -> None:
    found = of(method="full", checkpointing="full")
    # the final norm's 516 a token without its output of 128
    assert found.loss_copied == found.kept + 388 * T
