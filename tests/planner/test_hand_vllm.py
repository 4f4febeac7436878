"""vLLM's shards, slots, batches and profile of odd models, by hand on the toy (tests/planner/toys.py)."""

from dataclasses import replace
from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec
from planner.run.engine_law import CURRENT, EngineLaw
from planner.run.resolved import Resolved
from planner.terms.vllm_blocks import vllm_kv
from planner.terms.vllm_profile import dequantised_bytes, layer_width, profile, sampler_buffers
from planner.terms.vllm_weights import adapter_slot_bytes, slot_rank, vllm_weights
from planner.units import GiB
from tests.planner.toys import CONFIG, LLAMA, MIXED, MIXTRAL, choices, gpus

VOCABULARY = 1_024 * 64
"""Rows padded to a multiple of 64."""
PHI3 = model_spec_from_config({**CONFIG, "model_type": "phi3", "pad_token_id": 0})


def served(model: ModelSpec = LLAMA, ranks: int = 1, **fields: Any) -> Resolved:
    """Return the choices of a server."""
    engine = {"tensor_parallel": ranks, **fields.pop("engine", {})}
    usual = {"task": "serve", "framework": "vllm"}
    return choices(model, gpus(ranks), **{**usual, **fields}, engine=engine)


@pytest.mark.parametrize(
    ("ranks", "rows", "rest"),
    [
        # q, k and v in one of 128 rows: 4 + 2 + 2 heads of 16
        (1, 128, 1),
        (2, 64, 2),  # 2 + 1 + 1
        (4, 48, 4),  # 1 + 1 + 1: two ranks hold the same key head
    ],
)
def test_a_fused_projection(ranks: int, rows: int, rest: int) -> None:
    layer = rows * 64 + (64 * 64 + 256 * 64 + 64 * 128) // rest + 128
    ends = 2 * VOCABULARY // ranks + 64
    assert vllm_weights(PHI3, served(PHI3, ranks)).modules == 2 * (3 * layer + ends)


def test_biases_are_split_with_outputs_and_whole_beside_split_inputs() -> None:
    model = model_spec_from_config({**CONFIG, "model_type": "qwen2"})
    # q, k and v have biases of 64, 32, 32: halved like their rows
    layer = (4_096 * 2 + 2_048 * 2 + 3 * 8_192 + 128) // 2 + 128
    assert vllm_weights(model, served(model, 2)).modules == 2 * (3 * layer + VOCABULARY + 64)
    gpt2 = model_spec_from_config(
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 1000, "n_positions": 96}
    )  # fmt: skip
    # c_attn 192 rows and fc 256 with biases, halved; projections' inputs halved, their biases of 64 whole;
    # norms 4 x 64 and a last 2 x 64; positions 96 x 64 whole; the tied vocabulary halved
    layer = (192 * 65 + 256 * 65 + 64 * 64 + 256 * 64) // 2 + 128 + 256
    ends = VOCABULARY // 2 + 96 * 64 + 128
    assert vllm_weights(gpt2, served(gpt2, 2)).modules == 2 * (2 * layer + ends)


def test_stages_divide_layers_and_ends() -> None:
    layer = 36_992
    found = vllm_weights(LLAMA, served(engine={"pipeline_parallel": 3}))
    assert found.modules == 2 * layer + (2 * 2 * VOCABULARY + 128) // 2


def test_gguf_files_are_counted_by_the_weight() -> None:
    # q8_0: 34 B for 32 weights
    found = vllm_weights(LLAMA, served(quantization="gguf-q8_0", ranks=2))
    assert found.modules == 239_040 * 34 // 32 // 2


def test_nf4_linears_are_stored_with_their_constants() -> None:
    r = served(quantization="nf4", double_quant=False)
    # a layer 21,184 (test_hand_terms.py), norms 256 B
    assert vllm_weights(LLAMA, r).modules == 3 * (21_184 + 256) + 2 * 2 * VOCABULARY + 128
    # its matmul dequantises the largest weight, 8,192, for a long batch
    assert dequantised_bytes(LLAMA, r) == 16_384
    assert dequantised_bytes(LLAMA, served(quantization="nf4", ranks=2)) == 8_192
    assert dequantised_bytes(LLAMA, served()) == 0
    many = ModuleSpec(name="mlp.w", kind=ModuleKind.LINEAR, shapes=((256, 64),), count=4)
    single = replace(LLAMA.layers[0], modules=(*LLAMA.layers[0].modules, many))
    assert dequantised_bytes(replace(LLAMA, layers=(single,)), r) == 2 * 16_384


def test_slots_of_fused_projections_have_an_a_for_every_slice() -> None:
    engine = {"max_loras": 1, "max_lora_rank": 16}
    # q, k, v: 3 x 64 + 128; o 128; gate and up 2 x 64 + 256; down 192; the head's 1,064
    width = 3 * (320 + 128 + 384 + 192) + 1_064
    assert adapter_slot_bytes(PHI3, served(PHI3, engine=engine)) == 2 * 16 * width
    # on two ranks: 3 x 64 + 64; 32 + 64; 2 x 64 + 128; 64 + 64
    width = 3 * (256 + 96 + 256 + 128) + 1_064
    assert adapter_slot_bytes(PHI3, served(PHI3, 2, engine=engine)) == 2 * 16 * width


def test_old_slots_have_rows_for_new_tokens() -> None:
    engine = {"max_loras": 2, "max_lora_rank": 9}
    # rank 16 is the next with a kernel; 256 more tokens in head and embedding, whose rows are there too
    columns = 3 * 1_024 + 2 * (64 + 1_256)
    rows = 2 * 256 * 64
    r = served(framework="vllm==0.11.0", engine=engine)
    assert adapter_slot_bytes(LLAMA, r) == 2 * 2 * (16 * columns + rows)
    # the vocabulary itself is padded from 1,256 to 1,280
    assert vllm_weights(LLAMA, r).modules == 2 * (3 * 36_992 + 2 * 1_280 * 64 + 64)
    tied = model_spec_from_config({**CONFIG, "tie_word_embeddings": True})
    found = adapter_slot_bytes(tied, served(tied, framework="vllm==0.11.0", engine=engine))
    # the tied head under both names: embedding twice, head once
    assert found == 2 * 2 * (16 * (3 * 1_024 + 3 * 1_320) + 3 * 256 * 64)


@pytest.mark.parametrize(
    ("rank", "slot"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 320), (321, 512), (600, 600)],
)  # fmt: skip
def test_ranks_vllm_has_kernels_for(rank: int, slot: int) -> None:
    assert slot_rank(rank) == slot


def batch(law: EngineLaw = CURRENT, gib: float = 80, **fields: Any) -> tuple[int, int]:
    """Return tokens and sequences of a card's default batch."""
    usual = {"name": "NVIDIA H100", "offline": False, "max_len": 4_096, "multimodal": False}
    return law.batch(vram_bytes=int(gib * GiB), **{**usual, **fields})


def test_default_batches_by_memory() -> None:
    assert batch(gib=160) == (16_384, 1_024)
    assert batch(gib=159) == batch(gib=70) == (8_192, 1_024)
    assert batch(gib=69) == (2_048, 256)
    assert batch(gib=160, offline=True) == batch(gib=70, offline=True) == (16_384, 1_024)
    assert batch(gib=10, offline=True) == (8_192, 256)
    assert batch(name="NVIDIA A100-SXM4-80GB") == (2_048, 256)
    # no more tokens than all sequences have
    assert batch(max_len=4) == (4_096, 1_024)
    assert batch(gib=10, max_len=2) == (512, 256)
    assert batch(gib=10, max_len=1) == (256, 256)


def test_whole_prompts_and_images() -> None:
    whole = EngineLaw(whole_prompts_up_to=32_768, multimodal_tokens=5_120)
    assert batch(whole, gib=10, max_len=20_000) == (20_000, 256)
    assert batch(whole, gib=10, max_len=40_000) == (2_048, 256)
    assert batch(whole, gib=10, max_len=40_000, multimodal=True) == (40_000, 256)
    assert batch(whole, gib=10, max_len=1_000, multimodal=True) == (5_120, 256)


def test_sequences_by_room() -> None:
    law = EngineLaw(sequences_by_room=((2, 10), (4, 20), (8, 30)), multimodal_sequences=7)
    for gib, count in ((1, 10), (2, 10), (2.1, 20), (4, 20), (5, 30), (100, 30)):
        assert law.sequences_in(int(gib * GiB), multimodal=False) == count
    assert law.sequences_in(GiB, multimodal=True) == 7


def test_latent_context_of_the_profile() -> None:
    model = model_spec_from_config(
        {
            **CONFIG, "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "first_k_dense_replace": 3, "n_routed_experts": 4, "num_key_value_heads": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        }
    )  # fmt: skip
    engine = {"max_num_batched_tokens": 16, "max_num_seqs": 1}
    # eight requests of 1,000 tokens x 4 heads x (16 + 16) x 2 B
    found = profile(model, served(model, context=1_000, engine=engine))
    assert found.layers == 8 * 1_000 * 4 * 32 * 2
    # at most 65,536 tokens
    model = replace(model, rope_scaled_position=100_000)
    found = profile(model, served(model, context=100_000, engine=engine))
    assert found.layers == 65_536 * 4 * 32 * 2
    halved = profile(model, served(model, 2, context=1_000, engine=engine))
    assert halved.layers == 8 * 1_000 * 2 * 32 * 2


def test_experts_of_a_token() -> None:
    layer = MIXTRAL.layers[0]
    # attention's output 64 and the residual twice; two experts' shared first and third buffer 256 and product
    # 128, and their sum 64
    assert layer_width(MIXTRAL, layer, served(MIXTRAL)) == 192 + 64 + 2 * (256 + 128)
    # chunks of 16,384 tokens: half of a batch of 32,768 passes at once
    engine = {"max_num_batched_tokens": 32_768}
    chunked = served(MIXTRAL, framework="vllm==0.12.0", engine=engine)
    assert layer_width(MIXTRAL, layer, chunked) == 192 + 64 + (256 + 128)
    apart = served(MIXTRAL, framework="vllm==0.32")
    law = apart.framework.engine.model_copy(update={"shares_expert_buffers": False})
    apart = replace(apart, framework=replace(apart.framework, engine=law))
    # first 256 and third 64 apart
    assert layer_width(MIXTRAL, layer, apart) == 192 + 64 + 2 * (256 + 64 + 128)


def test_fp16_bitsandbytes_copies_its_result() -> None:
    layer = LLAMA.layers[0]
    plain = layer_width(LLAMA, layer, served(quantization="nf4"))
    fp16 = layer_width(LLAMA, layer, served(quantization="nf4", dtype="fp16"))
    assert (plain, fp16) == (192 + 3 * 128, 192 + 4 * 128)


def test_a_routers_correction_is_fp32_on_every_rank() -> None:
    bias = ModuleSpec(name="mlp.gate.correction", kind=ModuleKind.BUFFER, shapes=((4,),))
    layer = replace(LLAMA.layers[0], modules=(*LLAMA.layers[0].modules, bias))
    model = replace(LLAMA, layers=(layer,))
    for ranks in (1, 2):
        plain = vllm_weights(LLAMA, served(ranks=ranks)).modules
        assert vllm_weights(model, served(model, ranks)).modules == plain + 3 * 16


@pytest.mark.parametrize(
    ("shared", "ranks", "width"),
    [
        # the routed ones 2 x (256 + 128), what the shared one left 64, their sum 64
        (32, 1, 192 + 64 + 768 + 64),
        # a shared expert so wide that it is the largest: gate, up and product
        (2_048, 1, 192 + 64 + 3 * 2_048),
        (2_048, 2, 160 + 64 + 3 * 1_024),
    ],
)
def test_a_shared_expert(shared: int, ranks: int, width: int) -> None:
    layer = MIXTRAL.layers[0]
    wide = replace(layer, mlp=replace(layer.mlp, shared_intermediate=shared))
    assert layer_width(MIXTRAL, wide, served(MIXTRAL, ranks)) == width


def test_towers_are_divided_among_ranks() -> None:
    tower = ModuleSpec(name="visual.proj", kind=ModuleKind.LINEAR, shapes=((101, 64),))
    model = replace(LLAMA, towers=(tower,))
    for ranks in (1, 2):
        plain = vllm_weights(LLAMA, served(ranks=ranks)).modules
        assert vllm_weights(model, served(model, ranks)).modules == plain + 12_928 // ranks


def buffers(rows: int, **fields: Any) -> list[str]:
    """Return the names of the sampler's buffers in a release that selects in place."""
    r = served(framework="vllm==0.21.0", **fields)
    return [name for name, _ in sampler_buffers(r, rows, 1_000)]


def test_eight_rows_are_selected_in_place() -> None:
    assert buffers(8) == ["logits", "fp32 logits", "probabilities", "exponential noise"]
    assert "sorted logits" in buffers(7)
    assert buffers(8, dtype="fp32") == ["logits", "probabilities", "exponential noise"]


def test_the_widest_of_unequal_layers() -> None:
    # attention's output 64 and the residual twice, an MLP of 256: gate, up and product
    assert profile(MIXED, served(MIXED)).step_width == 2 * (192 + 3 * 256)


def test_mxfp4_experts_are_padded_to_64() -> None:
    layer = MIXTRAL.layers[0]
    rest = tuple(module for module in layer.modules if module.kind is not ModuleKind.EXPERTS)
    bare = replace(MIXTRAL, layers=(replace(layer, modules=rest),))
    # on two ranks an expert's 128 are 64: no padding. 4 x 3 x 64 x 64 weights at 4 bits and a byte for 32;
    # on four 32 are rounded up to 64 again
    for ranks in (2, 4):
        whole, without = (
            vllm_weights(each, served(each, ranks, quantization="mxfp4")).modules
            for each in (MIXTRAL, bare)
        )
        assert whole - without == 3 * (49_152 // 2 + 49_152 // 32)


def test_mxfp4_experts_biases_are_16_bit() -> None:
    layer = MIXTRAL.layers[0]
    biased = tuple(
        replace(module, shapes=(*module.shapes, (4, 256), (4, 64)))
        if module.kind is ModuleKind.EXPERTS
        else module
        for module in layer.modules
    )
    model = replace(MIXTRAL, layers=(replace(layer, modules=biased),))
    # gate and up 256 and down 64 of each of 4 experts in 3 layers; an expert's 32 of four ranks are 64 again
    for ranks, rows in ((1, 256), (4, 2 * 64)):
        bare, found = (
            vllm_weights(each, served(each, ranks, quantization="mxfp4")).modules
            for each in (MIXTRAL, model)
        )
        assert found - bare == 3 * 4 * (rows + 64) * 2


def test_several_heads_and_parameters_of_their_own() -> None:
    assert LLAMA.head is not None
    twice = replace(LLAMA, head=replace(LLAMA.head, count=2))
    plain = vllm_weights(LLAMA, served()).modules
    assert vllm_weights(twice, served(twice)).modules == plain + 2 * VOCABULARY
    own = ModuleSpec(name="self_attn.A_log", kind=ModuleKind.PARAMETER, shapes=((5,),))
    layer = replace(LLAMA.layers[0], modules=(*LLAMA.layers[0].modules, own))
    model = replace(LLAMA, layers=(layer,))
    halved = vllm_weights(LLAMA, served(ranks=2)).modules
    assert vllm_weights(model, served(model, 2)).modules == halved + 3 * 5


LATENT = model_spec_from_config(
    {
        **CONFIG, "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "first_k_dense_replace": 3, "n_routed_experts": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    }
)  # fmt: skip


def test_stages_divide_slots_and_latent_copies() -> None:
    engine = {"pipeline_parallel": 3, "max_loras": 1, "max_lora_rank": 8}
    # 1,024 columns and rows a layer, head and embedding 1,064 each, at rank 8 in 16 bit
    r = served(engine=engine)
    assert adapter_slot_bytes(LLAMA, r) == 16 * (3 * 1_024 + 2 * 1_064)
    assert vllm_weights(LLAMA, r).adapters == 16 * (3 * 1_024 + 2 * 1_064) // 3
    # fp8: W_UK and W_UV of each layer in 16 bit: 4 heads x 32 x (16 + 16)
    whole = vllm_weights(LATENT, served(LATENT, quantization="fp8"))
    third = vllm_weights(
        LATENT, served(LATENT, quantization="fp8", engine={"pipeline_parallel": 3})
    )
    assert (whole.latent, third.latent) == (3 * 2 * 4 * 32 * 32, 2 * 4 * 32 * 32)


def test_slots_of_latent_projections_are_whole_on_every_rank() -> None:
    engine = {"max_loras": 1, "max_lora_rank": 8}
    # q_a 64 + 24 and kv_a 64 + 40 whole; q_b 24 + 96, kv_b 32 + 128, o 64 + 64; gate, up 64 + 128, down
    for ranks in (1, 2):
        split = 24 + 96 // ranks + 32 + 128 // ranks + 64 // ranks + 64
        mlp = 2 * (64 + 128 // ranks) + 128 // ranks + 64
        width = 3 * (88 + 104 + split + mlp) + 64 + 1_000
        found = adapter_slot_bytes(LATENT, served(LATENT, ranks, engine=engine))
        assert found == 16 * width


def test_rows_of_a_latent_cache_are_padded() -> None:
    # 0.7 and older: 32 + 8 elements a row become 640
    law = CURRENT.model_copy(update={"latent_row": 640})
    plain = vllm_kv(LATENT, kv_bytes=10**8, max_model_len=16)
    padded = vllm_kv(LATENT, kv_bytes=10**8, max_model_len=16, law=law)
    assert padded.bytes_per_block == 16 * plain.bytes_per_block
    assert plain.num_blocks // 16 == padded.num_blocks


def test_scales_are_counted_by_the_row() -> None:
    # int8: a byte a weight and an fp32 scale a row: q and o 64 rows, k and v 32, gate and up 128, down 64
    rows = 64 + 32 + 32 + 64 + 128 + 128 + 64
    found = vllm_weights(LLAMA, served(quantization="int8"))
    assert found.modules == 3 * (36_864 + 4 * rows + 256) + 2 * 2 * VOCABULARY + 128
