"""A micro-batch's activations at the moments that can be the largest, by hand, at 4,096 tokens.

So many tokens that the toy's weight gradients (74 kB a layer) decide nothing. Bytes a token of one layer are
worked out in test_hand_layers.py: trained 2,456 kept, 3,096 at its largest backward (8,192 weights' gradient);
with fp32 adapters of rank 8: 3,960 and 4,728. Run again from a checkpoint those are 5,208 at up's adapter: the
gradients of the stream 128, down's base 128 and B's 256 wait; middle and norm's output 128 each; kept so far:
norms 520, five adapters 1,440, attention 400, gate and silu 512; base 256, fp32 x 256, A's 32, B's and scaled 512.
"""

from dataclasses import replace
from typing import Any

from planner.families import model_spec_from_config
from planner.layer.costs import checkpointed_costs
from planner.layer.program import OpSettings
from planner.layer.tape import largest
from planner.models.spec import MixerKind, MixerSpec, ModelSpec
from planner.terms.activations import Activations, activations
from tests.planner.toys import CONFIG, LLAMA, MIXED, choices, gpus

T = 4096
ROTARY = 2 * T * 16 * 2
ONE = 128 * T
LORA = {"method": "lora", "lora": {"rank": 8}}
FULL = {"method": "full"}


def of(model: ModelSpec = LLAMA, **fields: Any) -> Activations:
    """Return the activations of one sequence of 4,096 tokens."""
    machine = gpus(fields.pop("ranks", 1))
    r = choices(model, machine, context=T, **fields)
    return activations(model, r, r.tokens)


def moments(found: Activations) -> list[int]:
    """Return the activations of the final norm, the last layer and the first."""
    return [moment.activations for moment in found.backward]


def test_nothing_checkpointed_and_everything_trained() -> None:
    found = of(**FULL, checkpointing="none")
    assert found.kept == ROTARY + 3 * 2456 * T
    assert moments(found) == [
        found.kept + 1536 * T,
        ROTARY + 2 * 2456 * T + 3096 * T,
        ROTARY + 3096 * T,
    ]
    assert [m.layer_grads for m in found.backward] == [0, 16_384, 16_384]
    # a layer's forward: all it keeps and 512, against the norm's 900 on all layers; the embeddings
    assert found.forward == found.kept + 900 * T + ONE
    assert found.layer_per_token == 3096


def test_nothing_checkpointed_and_adapters_trained() -> None:
    found = of(**LORA, checkpointing="none")
    assert found.kept == ROTARY + (3 * 3960 - 260) * T
    # the first layer's norm has no graph
    assert moments(found) == [
        found.kept + 1536 * T,
        found.kept - 3960 * T + 4728 * T,
        ROTARY + 4468 * T,
    ]
    # in down's adapter: kept, and input, middle, norm's output, base 128 each, product, scaled and sum 256 each
    assert found.forward == found.kept + (4 * 128 + 3 * 256) * T + ONE


def test_every_layer_checkpointed() -> None:
    found = of(**FULL, checkpointing="full")
    assert found.kept == ROTARY + 3 * ONE
    assert moments(found) == [
        found.kept + 1536 * T,
        found.kept + 3096 * T,
        ROTARY + 3096 * T + ONE,
    ]
    # one layer without a graph on top of the inputs, its own among them
    assert found.forward == found.kept + 1152 * T - ONE
    assert found.no_grad == ROTARY + 1152 * T


def test_inputs_on_the_host() -> None:
    fields = {**FULL, "checkpointing": "offload"}
    one = of(**fields, offload_keep_layers=1)
    # the next input is on its way
    assert moments(one)[2] == ROTARY + 3096 * T + ONE
    assert of(**fields, offload_keep_layers=2).backward[2].activations == ROTARY + 3096 * T
    # nobody holds the embeddings' output but the model's code
    assert one.forward == one.kept + 1152 * T - ONE + ONE
    none = of(**fields, offload_keep_layers=0)
    assert none.forward == none.kept + 1152 * T + ONE
    # with a frozen embedding its node holds the leaf
    adapted = of(**LORA, checkpointing="offload", offload_keep_layers=1)
    assert adapted.kept == ROTARY + 2 * ONE
    # running again needs its own input; the leaf, and the next input on its way
    assert moments(adapted)[2] == ROTARY + 5208 * T + 3 * ONE
    assert adapted.forward == adapted.kept + 2176 * T - ONE


def test_a_fetched_input_that_something_saves() -> None:
    # fused norms save the input itself: kept 2 x 264 + 400 + 768 = 1,696; backward at swiglu: less the product
    # 256, the stream's 128, the product's 256, gate's and up's 512
    settings = OpSettings(full=True, fused=frozenset({"rmsnorm", "swiglu", "rope"}))
    costs = checkpointed_costs(LLAMA.layers[0], 64, settings)
    assert largest(costs.recompute_fetched, 10**6).per_token == 1696 - 256 + 128 + 256 + 512
    assert largest(costs.recompute, 10**6).per_token == 2336 - 128


def test_fsdp_holds_frozen_units_inputs() -> None:
    found = of(**LORA, checkpointing="full", sharding="fsdp", ranks=2)
    # three inputs and the third's gradient until the end; the second's is what the layer works on, and
    # the last output's is no layer's input
    assert moments(found)[2] == ROTARY + 5208 * T + 4 * ONE
    assert moments(of(**LORA, checkpointing="full", sharding="zero3", ranks=2))[2] == (
        ROTARY + 5208 * T + ONE
    )


def test_scaled_embeddings_are_a_copy() -> None:
    granite = model_spec_from_config(
        {**CONFIG, "model_type": "granite", "embedding_multiplier": 12.0}
    )
    assert granite.embedding_scale_copy
    found = of(granite, **LORA, checkpointing="full")
    assert found.kept == ROTARY + 4 * ONE
    # without a hook nothing holds it
    bare = {"switches": {"frozen_embedding_leaf": False}}
    assert of(granite, **LORA, checkpointing="full", **bare).kept == ROTARY + 3 * ONE


def test_dropped_out_embeddings() -> None:
    dropped = replace(LLAMA, embedding_dropout=0.1)
    mask = 64 * T
    full = of(dropped, **FULL, checkpointing="full")
    assert full.kept == ROTARY + mask + 3 * ONE
    assert moments(full)[2] == ROTARY + mask + 3096 * T + ONE
    assert full.forward == full.kept + 1152 * T - ONE + ONE
    # frozen: the leaf is what was not dropped out yet
    frozen = of(dropped, **LORA, checkpointing="full")
    assert frozen.kept == ROTARY + mask + 4 * ONE
    plain = of(dropped, **FULL, checkpointing="none")
    assert plain.kept == ROTARY + mask + 3 * 2456 * T
    assert plain.forward == plain.kept + 900 * T + 2 * ONE
    assert moments(plain)[2] == ROTARY + mask + 3096 * T


def test_latent_attention_rotates_a_part() -> None:
    latent = model_spec_from_config(
        {
            **CONFIG, "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "first_k_dense_replace": 3, "n_routed_experts": 4, "num_key_value_heads": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        }
    )  # fmt: skip
    found = of(latent, **FULL, checkpointing="full")
    assert found.kept == 2 * T * 8 * 2 + 3 * ONE


def test_casts_of_trained_weights_under_autocast() -> None:
    found = of(**FULL, checkpointing="full", dtype="fp32", mixed_precision="bf16")
    cache = 2 * 110_592
    assert found.autocast_cache == cache
    # fp32 stream 256 a token; one layer: input, middle, norm's output 256 each, its 16-bit copy 128;
    # silu, up, product 256 each; 16-bit copies of gate, up and down 3 x 16,384 - counted in the cache too
    wide = 256 * T
    assert found.kept == 2 * ROTARY + 3 * wide
    assert found.loss_forward == found.kept + (260 + 256 + 256) * T


def test_parts_add_up() -> None:
    for fields in (FULL, LORA):
        for checkpointing in ("none", "full", "offload"):
            found = of(**fields, checkpointing=checkpointing)
            assert sum(count * each for _, count, each in found.parts) == found.kept


def test_a_wider_layer_in_the_middle() -> None:
    # its MLP's tensors are 512: it keeps 3,480; at its largest backward 3,480 - 512 + 128 + 512 + 1,024 = 4,632;
    # without a graph 3 x 128 + 3 x 512
    again = of(MIXED, **FULL, checkpointing="full")
    assert moments(again) == [
        again.kept + 1536 * T,
        again.kept + 4632 * T,
        ROTARY + 3096 * T + ONE,  # the first layer, a narrow one
        ROTARY + 4632 * T + 2 * ONE,  # the wide one, below which an input more is stored
    ]
    assert [moment.layers_left for moment in again.backward] == [3, 3, 1, 2]
    assert again.no_grad == ROTARY + 1920 * T
    assert again.forward == again.kept + 1920 * T - ONE
    plain = of(MIXED, **FULL, checkpointing="none")
    assert plain.kept == ROTARY + (2 * 2456 + 3480) * T
    # the last layer and the first are of the narrow kind
    assert moments(plain)[1:] == [plain.kept - 2456 * T + 3096 * T, ROTARY + 3096 * T]
    # a segment of two holds the wider one's graph
    pairs = of(MIXED, **FULL, checkpointing="every-k", checkpoint_every=2)
    assert moments(pairs)[1] == pairs.kept + 3480 * T + 4632 * T


def test_a_stack_so_thin_that_the_final_norm_is_the_largest() -> None:
    # an MLP of 16 alone: its norm 900 with the layer's input, which is among the kept ones
    thin = model_spec_from_config({**CONFIG, "intermediate_size": 16}).layers[0]
    modules = tuple(m for m in thin.modules if "attn" not in m.name and "input" not in m.name)
    bare = replace(thin, mixer=MixerSpec(kind=MixerKind.NONE), modules=modules, num_norms=1)
    model = replace(LLAMA, layers=(bare,))
    found = of(model, **FULL, checkpointing="full")
    # without a graph the fp32 copy is gone before the result: input, copy, squares and a mean
    assert found.no_grad == found.kept - 3 * ONE + 644 * T
    assert found.forward == found.kept + 900 * T
