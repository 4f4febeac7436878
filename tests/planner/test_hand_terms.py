"""What stands on a GPU whatever the batch, by hand: weights, adapters, gradients, optimizer, overhead.

Every figure is worked out from the toy model's shapes (tests/planner/toys.py), none by the planner.
"""

from dataclasses import replace

import pytest

from planner.machines.machine import find_gpu, make_machine
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec
from planner.quant.schemes import quantized_bytes
from planner.quant.table import scheme_table, stored_bytes
from planner.terms.adapters import lora, trained_parameters
from planner.terms.counts import adapters, base_weights
from planner.terms.gradients import gradient_width, gradients
from planner.terms.optimizer import optimizer
from planner.terms.overhead import blas_workspace_bytes, workspace
from planner.terms.standing import model_of_size, standing
from planner.terms.weights import gathered, trained_width, weights
from planner.units import MiB
from tests.planner.toys import LAYER, LLAMA, MIXED, MIXTRAL, PARAMETERS, TIED, choices, gpus

FULL = {"method": "full", "optimizer": "adamw"}
FOUR = gpus(4)


def test_the_toy_is_what_its_comment_says() -> None:
    assert LLAMA.parameters == PARAMETERS
    assert LLAMA.layers[0].parameters == LAYER
    assert TIED.parameters == PARAMETERS - 64_000


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 2 * 239_040),
        ({"dtype": "fp32"}, 4 * 239_040),
        ({"sharding": "ddp"}, 478_080),
        ({"sharding": "zero1"}, 478_080),
        ({"sharding": "zero2"}, 478_080),
        ({"sharding": "zero3"}, 119_520),  # a quarter
        ({"sharding": "fsdp"}, 119_520),
        # FSDP under autocast upcasts its shards to fp32: a quarter of 956,160
        ({"sharding": "fsdp", "mixed_precision": "bf16"}, 239_040),
        # a second copy for the KL
        ({"task": "dpo"}, 2 * 478_080),
        ({"task": "dpo", "sharding": "zero3"}, 2 * 119_520),
    ],
)
def test_trained_weights(fields: dict[str, object], size: int) -> None:
    r = choices(machine=FOUR, **FULL, **fields)
    assert weights(LLAMA, r).bytes == size


def test_a_weight_formula_shows_its_numbers() -> None:
    r = choices(machine=FOUR, **FULL, task="dpo", sharding="zero3")
    assert weights(LLAMA, r).formula == (
        "239,040 parameters x 2 B / 4 shard(s) + reference copy 119,520 B"
    )


NF4 = 80_040
"""Three layers of NF4 with double quantisation. A matrix of n has n/2 B of codes, one absmax byte for 64
weights, 4 B for 256 of those, an offset of 4 B, tables of 256 and 16 fp32 = 1,088 B:
q, o: 2,048 + 64 + 4 + 4 + 1,088 = 3,208; k, v: 1,024 + 32 + 4 + 4 + 1,088 = 2,152;
gate, up, down: 4,096 + 128 + 4 + 4 + 1,088 = 5,320; a layer 6,416 + 4,304 + 15,960 = 26,680."""
NF4_SINGLE = 63_552
"""Without: n/2 + 4 B for 64 + 64 B: 2,368 and 1,216 and 4,672; a layer 4,736 + 2,432 + 14,016 = 21,184."""
INT8 = 116_736
"""n + 4 B a row: q, o 4,352; k, v 2,176; gate, up 8,704; down 8,448; a layer 38,912."""
REST = 239_040 - 110_592  # embeddings, head, norms


@pytest.mark.parametrize(
    ("fields", "switches", "quantized", "rest"),
    [
        ({"double_quant": True}, {"kbit_upcast": "none"}, NF4, 2 * REST),
        ({"double_quant": False}, {"kbit_upcast": "norms"}, NF4_SINGLE, 2 * REST),
        ({"double_quant": True}, {"kbit_upcast": "all"}, NF4, 4 * REST),
        ({"quantization": "fp4", "double_quant": True}, {"kbit_upcast": "none"}, NF4, 2 * REST),
        ({"quantization": "int8"}, {"kbit_upcast": "none"}, INT8, 2 * REST),
        # litgpt's head: 32,000 + 1,000 + 4 x 4 + 4 + 1,088 = 34,108
        (
            {"double_quant": True},
            {"kbit_upcast": "none", "quantized_head": True},
            NF4 + 34_108,
            2 * (REST - 64_000),
        ),
    ],
)
def test_quantised_weights(
    fields: dict[str, object], switches: dict[str, object], quantized: int, rest: int
) -> None:
    r = choices(switches=switches, method="qlora", **fields)
    base = base_weights(LLAMA, r)
    assert (base.quantized, base.rest) == (quantized, rest)
    assert weights(LLAMA, r).bytes == quantized + rest
    head = 64_000 if switches.get("quantized_head") else 8_192
    assert base.largest_quantized == head


def test_quantised_weights_are_divided_and_keep_a_reference() -> None:
    r = choices(
        machine=FOUR,
        switches={"kbit_upcast": "none"},
        method="qlora",
        double_quant=True,
        sharding="zero3",
    )
    whole = NF4 + 2 * REST  # 336,936
    assert weights(LLAMA, r).bytes == whole // 4
    r = choices(
        switches={"kbit_upcast": "none"},
        task="grpo",
        method="qlora",
        double_quant=True,
        reference="separate",
    )
    assert weights(LLAMA, r).bytes == 2 * whole  # loaded as the base is


def test_fused_experts_stay_16_bit_under_bitsandbytes_and_single_ones_do_not() -> None:
    fields = {"method": "qlora", "double_quant": False}
    fused = base_weights(MIXTRAL, choices(MIXTRAL, **fields, switches={"kbit_upcast": "none"}))
    # q, k, v, o alone: 2 x 2,368 + 2 x 1,216 = 7,168 a layer
    assert fused.quantized == 3 * 7_168
    assert fused.largest_quantized == 4_096
    r = choices(MIXTRAL, **fields, switches={"kbit_upcast": "none"})
    single = base_weights(MIXTRAL, replace(r, linear_experts=True))
    # four linears each, every one with its table: gate_up 16,384: 8,192 + 1,024 + 64 = 9,280;
    # down 8,192: 4,096 + 512 + 64 = 4,672
    assert single.quantized == 3 * (7_168 + 37_120 + 18_688)
    assert single.quantized_parameters == 3 * (12_288 + 98_304)
    assert single.largest_quantized == 16_384  # one expert's gate_up


@pytest.mark.parametrize(
    ("scheme", "numel", "columns", "size"),
    [
        ("fp8", 60_000, 200, 60_004),  # one fp32 scale
        ("fp8-block", 60_000, 200, 60_024),  # 300 x 200: 3 x 2 blocks of 128
        ("int8", 60_000, 200, 61_200),  # 300 rows
        ("gptq-8bit", 12_800, 128, 13_100),  # 100 groups: fp16 scale and 8-bit zero
        ("gptq-4bit", 12_800, 128, 6_650),  # 6,400 + 200 + 4-bit zeros 50
        ("awq-4bit", 12_800, 128, 6_650),
        ("mxfp4", 12_800, 128, 6_800),  # one byte for 32
        ("nvfp4", 12_800, 128, 7_204),  # one byte for 16, a global fp32
        ("gguf-q8_0", 3_200, 64, 3_400),  # 34 B for 32
        ("gguf-q4_0", 3_200, 64, 1_800),  # 18 B for 32
        ("gguf-q4_k_m", 32_000, 64, 19_400),  # 4.85 bits
    ],
)
def test_stored_sizes(scheme: str, numel: int, columns: int, size: int) -> None:
    assert quantized_bytes(numel, scheme, double_quant=False, columns=columns) == size


def test_what_sharding_gathers() -> None:
    # the root unit: embeddings, head, final norm = 128,064 parameters; a layer 36,992
    r = choices(machine=FOUR, **FULL, sharding="fsdp")
    assert gathered(LLAMA, r, 0).bytes == 2 * 128_064
    assert gathered(LLAMA, r, 2).bytes == 2 * (128_064 + 2 * 36_992)
    # fp32 shards are gathered in the compute dtype
    r = choices(machine=FOUR, **FULL, sharding="fsdp", mixed_precision="bf16")
    assert trained_width(r) == 4
    assert gathered(LLAMA, r, 1).bytes == 2 * (128_064 + 36_992)
    r = choices(TIED, machine=FOUR, **FULL, sharding="fsdp")
    assert gathered(TIED, r, 0).bytes == 2 * 64_064
    r = choices(
        machine=FOUR,
        method="qlora",
        double_quant=True,
        sharding="fsdp",
        switches={"kbit_upcast": "none"},
    )
    # a layer in NF4: 26,680 B and norms
    assert gathered(LLAMA, r, 1).bytes - gathered(LLAMA, r, 0).bytes == pytest.approx(
        26_808, rel=0.002
    )
    for scheme in ("none", "ddp", "zero1", "zero2"):
        assert gathered(LLAMA, choices(machine=FOUR, **FULL, sharding=scheme), 1).bytes == 0
    assert gathered(LLAMA, choices(**FULL, sharding="fsdp"), 1).bytes == 0


RANK_8 = 24_576
"""rank x (in + out): q, o 8 x 128; k, v 8 x 96; gate, up, down 8 x 192; a layer 2,048 + 1,536 + 4,608."""


def test_adapters() -> None:
    r = choices(method="lora", lora={"rank": 8})
    assert lora(LLAMA, r).bytes == 4 * RANK_8  # PEFT makes them fp32
    assert lora(LLAMA, r).formula == "24,576 LoRA parameters of rank 8 in 21 modules x 4 B"
    assert trained_parameters(LLAMA, r) == RANK_8
    r = choices(method="lora", lora={"rank": 8, "dtype": "bf16", "modules_to_save": ("lm_head",)})
    assert lora(LLAMA, r).bytes == 2 * (RANK_8 + 64_000)
    assert trained_parameters(LLAMA, r) == RANK_8 + 64_000
    r = choices(method="lora", lora={"rank": 8, "dora": True})
    # a magnitude for every output: 64 + 32 + 32 + 64 + 128 + 128 + 64 = 512 a layer
    assert lora(LLAMA, r).bytes == 4 * (RANK_8 + 3 * 512)
    assert lora(LLAMA, choices(method="full")).bytes == 0
    assert lora(LLAMA, choices(task="serve", framework="vllm")).bytes == 0


def test_adapters_of_less_than_4096_elements_are_small() -> None:
    # rank 64: A is 64 x 64 = 4,096 and not small, except down's 64 x 128;
    # B of k and v is 32 x 64 = 2,048 and small, the others' 4,096 and 8,192 are not
    found = adapters(LLAMA, choices(method="lora", lora={"rank": 64}))
    assert found.small == 3 * 2 * 2_048
    assert found.modules == 21
    assert found.experts == (0, 0)
    # experts: 4 x 8 rows a factor, twice for gate and up in one tensor:
    # 64 x (64 + 256) + 32 x (128 + 64) a layer; the router 8 x (64 + 4)
    many = adapters(MIXTRAL, choices(MIXTRAL, method="lora", lora={"rank": 8}))
    assert many.experts == (20_480, 6_144)
    assert many.parameters == 3 * (2_048 + 1_536 + 26_624 + 544)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 478_080),
        ({"dtype": "fp32"}, 956_160),
        ({"gradient_dtype": "fp32"}, 956_160),
        ({"sharding": "ddp"}, 478_080),
        # the embedding's alone, until it is in its bucket
        ({"sharding": "ddp", "bucket_views": True}, 128_000),
        ({"sharding": "zero1"}, 478_080),
        ({"sharding": "zero2"}, 119_520),
        ({"sharding": "zero3"}, 119_520),
        ({"sharding": "fsdp"}, 119_520),
        ({"sharding": "fsdp", "mixed_precision": "bf16"}, 239_040),
        # the largest layer has 36,992 parameters, an embedding 64,000
        ({"optimizer_in_backward": True}, 128_000),
        ({"optimizer_in_backward": True, "sharding": "fsdp"}, 32_000),
    ],
)
def test_gradients(fields: dict[str, object], size: int) -> None:
    assert gradients(LLAMA, choices(machine=FOUR, **FULL, **fields)).bytes == size


def test_gradients_of_adapters_have_the_adapters_dtype() -> None:
    r = choices(method="lora", lora={"rank": 8})
    assert (gradient_width(r), gradients(LLAMA, r).bytes) == (4, 4 * RANK_8)
    r = choices(method="lora", lora={"rank": 8, "dtype": "bf16"})
    assert gradients(LLAMA, r).bytes == 2 * RANK_8
    # adapters beside a quantised base stay outside FSDP
    r = choices(machine=FOUR, method="qlora", lora={"rank": 8}, sharding="fsdp")
    assert gradients(LLAMA, r).bytes == 4 * RANK_8
    assert optimizer(LLAMA, r).states.bytes == 8 * RANK_8
    assert gradients(LLAMA, choices(task="serve", framework="vllm")).bytes == 0


SMALL = 3 * (2 * 2_048 + 128) + 64
"""k, v and the norms: 12,736 parameters in tensors below 4,096 elements."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("adamw", 4 * 239_040),  # two states as wide as the parameter
        ("adamw-fused", 4 * 239_040),
        ("lion", 2 * 239_040),
        ("sgd", 0),
        ("sgd-momentum", 2 * 239_040),
        ("muon", 2 * 239_040),
        # one byte and 4 B for 256 a state: 226,304 x 2 x 1.015625 = 459,680; 12,736 x 8 = 101,888
        ("adamw-8bit", 561_568),
        # one state: 229,840 + 50,944
        ("lion-8bit", 280_784),
        # rows and columns in fp32: vocabulary 1,064 twice, final norm 64, a layer 128 + 96 + 96 + 128
        # + 3 x 192 + 128 = 1,152; all 5,648 x 4
        ("adafactor", 22_592),
    ],
)
def test_optimizer_states(name: str, size: int) -> None:
    r = choices(method="full", optimizer=name, switches={"embeddings_32bit_state": False})
    assert optimizer(LLAMA, r).states.bytes == size


def test_embeddings_keep_32_bit_states_under_hf() -> None:
    # 64,000 more in 32 bit: 162,304 x 2 x 1.015625 + 76,736 x 8
    r = choices(method="full", optimizer="adamw-8bit", switches={"embeddings_32bit_state": True})
    assert optimizer(LLAMA, r).states.bytes == 329_680 + 613_888


def test_tensors_of_4095_elements_are_small_and_of_4096_are_not() -> None:
    bare = tuple(
        ModuleSpec(name=f"m{n}", kind=ModuleKind.PARAMETER, shapes=((n,),)) for n in (4_095, 4_096)
    )
    model = _with_modules(bare)
    r = choices(
        model, method="full", optimizer="lion-8bit", switches={"embeddings_32bit_state": False}
    )
    # 4,095 x 4 B; 4,096 + 64 B; embeddings and head 128,000 x 1.015625; final norm 256
    assert optimizer(model, r).states.bytes == 16_380 + 4_160 + 130_000 + 256


def _with_modules(modules: tuple[ModuleSpec, ...]) -> ModelSpec:
    one = replace(LLAMA.layers[0], count=1, modules=modules)
    return replace(LLAMA, layers=(one,), layer_order=(0,))


def test_mxfp4_packs_experts_alone() -> None:
    # 3 x 98,304 expert weights at 4 bits and a byte for 32; q, k, v, o 12,288, router 256 and norms 128 a layer
    # and the rest 128,064 in 16 bit
    table = scheme_table(MIXTRAL, "mxfp4", quantized_head=True)
    rest = 3 * (12_288 + 256 + 128) + 128_064
    assert stored_bytes(MIXTRAL, table, 2) == 3 * (49_152 + 3_072) + 2 * rest
    assert table.notes == ()
    dense = scheme_table(LLAMA, "mxfp4", quantized_head=True)
    assert stored_bytes(LLAMA, dense, 2) == 2 * PARAMETERS
    assert dense.notes == ("mxfp4 packs nothing in this model",)


def test_adafactor_of_a_stack_of_matrices() -> None:
    # [4, 256, 64]: 4 x 320; [4, 64, 128]: 4 x 192; router [4, 64]: 68; q, k, v, o 448; norms 128
    r = choices(MIXTRAL, method="full", optimizer="adafactor")
    layer = 1_280 + 768 + 68 + 448 + 128
    assert optimizer(MIXTRAL, r).states.bytes == 4 * (2 * 1_064 + 64 + 3 * layer)
    # adapters of rank 8: A and B have in + out + 2 x 8: 144, 112, 112, 144, 3 x 208 = 1,136 a layer
    r = choices(method="lora", optimizer="adafactor", lora={"rank": 8})
    assert optimizer(LLAMA, r).states.bytes == 4 * 3 * 1_136


def test_eight_bit_states_of_small_adapters_are_32_bit() -> None:
    r = choices(method="lora", optimizer="adamw-8bit", lora={"rank": 8})
    assert optimizer(LLAMA, r).states.bytes == 8 * RANK_8


@pytest.mark.parametrize(
    ("fields", "switches", "states", "step"),
    [
        # foreach AdamW takes the square root of every second moment at once
        ({"optimizer": "adamw"}, {}, 956_160, 478_080),
        ({"optimizer": "adamw-fused"}, {}, 956_160, 0),
        ({"optimizer": "adamw", "dtype": "fp32"}, {}, 8 * 239_040, 4 * 239_040),
        # an fp32 master copy, and states as wide as it
        ({"optimizer": "adamw", "master_weights": True}, {}, 12 * 239_040, 4 * 239_040),
        ({"optimizer": "adamw", "master_weights": True, "dtype": "fp32"}, {}, 1_912_320, 956_160),
        ({"optimizer": "adamw"}, {"fp32_optimizer_state": True}, 1_912_320, 956_160),
        # bundle by bundle, here all matrices (the norms are 7 x 64): weights, gradient and a root in fp32
        ({"optimizer": "adamw"}, {"step_scratch_bytes": 10**9}, 956_160, 12 * 238_592),
        # or six numbers of 416 elements, of which three are taken
        ({"optimizer": "adamw"}, {"step_scratch_bytes": 10_000}, 956_160, 12 * 416),
        # fp32 weights, and masters, are stepped in place
        (
            {"optimizer": "adamw", "dtype": "fp32"},
            {"step_scratch_bytes": 10**9},
            1_912_320,
            8 * 238_592,
        ),
        (
            {"optimizer": "adamw", "master_weights": True},
            {"step_scratch_bytes": 10**9},
            2_868_480,
            8 * 238_592,
        ),
        # codes are widened; k and v have 2,048 elements and none
        (
            {"optimizer": "lion-8bit", "dtype": "fp32"},
            {"step_scratch_bytes": 10**9, "embeddings_32bit_state": False},
            280_784,
            12 * (238_592 - 6 * 2_048),
        ),
        ({"optimizer": "sgd", "dtype": "fp32"}, {"step_scratch_bytes": 10**9}, 0, 4 * 238_592),
        # without a master bf16 is rounded by noise, when what the rule made is gone
        ({"optimizer": "sgd"}, {"step_scratch_bytes": 10**9}, 0, 12 * 238_592),
    ],
)
def test_masters_and_the_steps_temporaries(
    fields: dict[str, object], switches: dict[str, object], states: int, step: int
) -> None:
    r = choices(method="full", switches=switches, **fields)
    found = optimizer(LLAMA, r)
    assert (found.states.bytes, found.step.bytes, found.host.bytes) == (states, step, 0)


def test_states_are_divided() -> None:
    sharding = "fsdp"
    found = optimizer(LLAMA, choices(machine=FOUR, **FULL, sharding=sharding))
    assert (found.states.bytes, found.step.bytes) == (239_040, 119_520)
    assert found.states.formula == (
        "239,040 trained parameters x 4 B (2 state(s), master copy 0 B) / 4 shard(s)"
    )
    assert found.step.formula == "59,760 x 2 B: foreach sqrt of the second moment"
    r = choices(machine=FOUR, **FULL, sharding=sharding, switches={"step_scratch_bytes": 10**9})
    assert optimizer(LLAMA, r).step.bytes == 12 * 238_592 // 4
    ddp = optimizer(LLAMA, choices(machine=FOUR, **FULL, sharding="ddp"))
    assert ddp.states.bytes == 956_160


@pytest.mark.parametrize(
    ("fields", "step"),
    [
        # half of 4,000 elements at once: weights, gradient, root; the moments of three such bundles
        ({"optimizer": "adamw"}, 2_000 * 12 + 6_000 * 8),
        # a master is stepped where it has come: no weights beside it
        ({"optimizer": "adamw", "master_weights": True}, 2_000 * 8 + 6_000 * 12),
        # codes come with their scales, and 4 B are made of them: 38,093; of k and v, which have none, more comes
        ({"optimizer": "lion-8bit"}, 2_000 * 12 + 6_000 * 4),
        # nothing comes
        ({"optimizer": "sgd", "dtype": "fp32"}, 2_000 * 4),
    ],
)
def test_streamed_states_come_and_go_beside_what_is_stepped(
    fields: dict[str, object], step: int
) -> None:
    r = choices(
        method="full", optimizer_offload=True, switches={"step_scratch_bytes": 24 * 4_000}, **fields
    )
    assert optimizer(LLAMA, r).step.bytes == step


@pytest.mark.parametrize(
    "fields", [{"optimizer": "adamw", "optimizer_offload": True}, {"optimizer": "paged-adamw"}]
)
def test_offloaded_states_are_the_hosts(fields: dict[str, object]) -> None:
    found = optimizer(LLAMA, choices(method="full", **fields))
    assert (found.states.bytes, found.step.bytes) == (0, 0)
    assert found.host.bytes == 956_160


@pytest.mark.parametrize(
    ("card", "size"),
    [("t4", 8_519_680), ("a100-40gb", 8_519_680), ("rtx-4090", 8_519_680), ("h100-sxm", 32 * 2**20),
     ("b200", 32 * 2**20), ("rtx-5090", 32 * 2**20)],
)  # fmt: skip
def test_cublas_workspace_by_capability(card: str, size: int) -> None:
    assert workspace(make_machine(card), trains=False).bytes == size
    assert workspace(make_machine(card), trains=True).bytes == 2 * size
    assert workspace(make_machine(vram="8GiB"), trains=False).bytes == 8_519_680


def test_standing_bytes_are_the_sum() -> None:
    found = standing(LLAMA, choices(**FULL))
    assert found == (478_080, 0, 478_080, 956_160)
    assert found.total == 1_912_320
    served = standing(LLAMA, choices(task="serve", framework="vllm", engine={"tensor_parallel": 2}))
    # vLLM splits linears (110,592 B of 221,184) and vocabularies padded to 1,024 (65,536 B each); norms
    # 768 + 128 B and the rotary table of 4,096 x 16 x 2 B are whole
    assert served == (110_592 + 2 * 65_536 + 896 + 131_072, 0, 0, 0)


@pytest.mark.parametrize("count", [1, 4_096 * 4_096 - 1, 4_096 * 4_096, 7_000_000_000])
def test_a_model_known_by_its_size_has_that_many_parameters(count: int) -> None:
    model = model_of_size(count)
    assert model.parameters == count
    matrices = [m for m in model.layers[0].modules if m.name == "matrices"]
    assert sum(m.count for m in matrices) == count // 4_096**2
    assert all(m.shapes == ((4_096, 4_096),) for m in matrices)


def test_the_largest_layer_decides_what_is_gathered_and_stepped() -> None:
    assert MIXED.parameters == 263_616
    r = choices(MIXED, machine=FOUR, **FULL, sharding="fsdp")
    assert gathered(MIXED, r, 1).bytes == 2 * (128_064 + 61_568)
    small = replace(MIXED, vocab=500)  # a vocabulary of 32,000 elements
    r = choices(small, **FULL, optimizer_in_backward=True)
    assert gradients(small, r).bytes == 2 * 61_568


@pytest.mark.parametrize(
    ("card", "size"),
    [
        ("mi300x", 76 * MiB),
        ("mi210", 76 * MiB),
        ("rx-9070-xt", 76 * MiB),
        ("rx-7900-xtx", 32 * MiB),
    ],
)
def test_workspaces_of_rocm(card: str, size: int) -> None:
    assert blas_workspace_bytes(find_gpu(card)) == size


def test_modules_to_save_are_counted_among_adapters() -> None:
    r = choices(
        method="lora", lora={"rank": 8, "targets": ("q_proj",), "modules_to_save": ("lm_head",)}
    )
    # 3 x 8 x 128 in fp32, and a copy of the head's 64,000 as the base has them, in bf16
    term = lora(LLAMA, r)
    assert term.bytes == 3_072 * 4 + 64_000 * 2
    assert term.formula == (
        "3,072 LoRA parameters of rank 8 in 3 modules x 4 B + copies of modules_to_save 64,000 x 2 B"
    )


def test_a_server_has_no_optimizer() -> None:
    found = optimizer(LLAMA, choices(task="serve"))
    assert (found.states.bytes, found.host.bytes, found.step.bytes) == (0, 0, 0)


def test_adafactor_has_rows_and_columns_of_every_matrix() -> None:
    # four more matrices of 256 x 64 in each of three layers: 4 B x 320 each
    many = ModuleSpec(name="mlp.w", kind=ModuleKind.LINEAR, shapes=((256, 64),), count=4)
    layer = replace(LLAMA.layers[0], modules=(*LLAMA.layers[0].modules, many))
    model = replace(LLAMA, layers=(layer,))
    sizes = [
        optimizer(each, choices(each, method="full", optimizer="adafactor")).states.bytes
        for each in (LLAMA, model)
    ]
    assert sizes[1] - sizes[0] == 3 * 4 * 4 * (256 + 64)


def test_small_tensors_of_8_bit_optimizers_are_counted_one_by_one() -> None:
    # four more vectors of 10 in each of three layers, two states in fp32
    many = ModuleSpec(name="mlp.s", kind=ModuleKind.PARAMETER, shapes=((10,),), count=4)
    layer = replace(LLAMA.layers[0], modules=(*LLAMA.layers[0].modules, many))
    model = replace(LLAMA, layers=(layer,))
    sizes = [
        optimizer(each, choices(each, method="full", optimizer="adamw-8bit")).states.bytes
        for each in (LLAMA, model)
    ]
    assert sizes[1] - sizes[0] == 3 * 4 * 10 * 2 * 4
