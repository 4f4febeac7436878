"""Everything of vocabulary width, law by law, by hand: 40 rows, vocabulary 1,000, hidden 64.

40 rows x 1,000 = 40,000 logits; the head has 64,000 elements, the rows' hidden states 2,560.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.models.spec import ModelSpec
from planner.run.logits_law import LogitsLaw
from planner.terms.logits import Logits, chunk_rows, head_width, logits, tile_shape
from tests.planner.toys import LLAMA, choices, gpus

FULL_LAW = LogitsLaw(
    kind="full",
    forward=(("logits", "act"), ("float copy", "upcast"), ("log-softmax", "fp32")),
    backward=(("log-softmax", "fp32"), ("a", "fp32"), ("b", "fp32")),
)
CHUNKED = LogitsLaw(
    kind="chunked",
    chunk_rows=8,
    chunk=(("logits", "fp32"), ("gradient", "act")),
    hidden=(("gradient of hidden", "act"),),
)
TILED = LogitsLaw(
    kind="tiled",
    max_chunk_bytes=36_000,
    min_chunk_bytes=12_000,
    head_share=4,
    tile_rows=16,
    hidden=(("rows", "act"), ("U", "act")),
)


def of(law: LogitsLaw, model: ModelSpec = LLAMA, machine: Any = None, **fields: Any) -> Logits:
    """Return the loss head's bytes of 40 tokens under a law."""
    usual = {"context": 40, "optimizer": "adamw"}
    r = choices(model, machine or gpus(1), **{**usual, **fields})
    return logits(model, replace(r, law=law))


def sizes(found: Logits) -> tuple[int, int, int]:
    """Return forward, backward and score."""
    return found.forward.bytes, found.backward.bytes, found.score.bytes


def test_full_logits() -> None:
    # 16 bit: 2 + 4 + 4 and 4 + 4 + 4 B a logit
    assert sizes(of(FULL_LAW, method="lora")) == (400_000, 480_000, 400_000)
    # fp32 logits need no float copy: 4 + 4
    assert sizes(of(FULL_LAW, method="lora", dtype="fp32")) == (320_000, 480_000, 320_000)


def test_only_completions_meet_the_vocabulary() -> None:
    law = FULL_LAW.model_copy(update={"rows": "completion"})
    fields = {"context": None, "prompt_length": 30, "completion_length": 10}
    assert of(law, method="lora", **fields).forward.bytes == 100_000
    assert of(FULL_LAW, method="lora", **fields).forward.bytes == 400_000


def test_every_width_of_a_law() -> None:
    widths = (("a", "bf16"), ("b", "fp16"), ("c", "int64"), ("d", "bool"), ("e", "fp32"))
    law = LogitsLaw(kind="full", forward=widths, backward=(("g", "act"),))
    assert sizes(of(law, method="lora")) == (40_000 * 17, 80_000, 40_000 * 17)


def test_a_soft_cap_keeps_its_tanh() -> None:
    capped = replace(LLAMA, softcap=30.0)
    assert sizes(of(FULL_LAW, capped, method="lora")) == (480_000, 560_000, 480_000)


def test_a_formula_names_its_tensors() -> None:
    term = of(FULL_LAW, method="lora").forward
    assert term.formula == (
        "40 rows x 1,000 vocabulary x 10 B (logits 2, float copy 4, log-softmax 4)"
    )


def test_autocast_copies_an_fp32_head_and_its_input_if_trained() -> None:
    fields = {"dtype": "fp32", "mixed_precision": "bf16"}
    # 16-bit copies: the head 128,000 B; trained, its input is saved too: 5,120 B
    assert of(FULL_LAW, method="lora", **fields).forward.bytes == 400_000 + 128_000
    assert of(FULL_LAW, method="full", **fields).forward.bytes == 400_000 + 133_120
    assert of(FULL_LAW, method="full", **fields).backward.bytes == 480_000 + 133_120
    # a head in 16 bits is not copied
    assert of(FULL_LAW, method="full", mixed_precision="bf16").forward.bytes == 400_000


def test_a_quantised_head_is_dequantised_to_fp32() -> None:
    switches = {"quantized_head": True, "kbit_upcast": "none"}
    assert of(FULL_LAW, method="qlora", switches=switches).forward.bytes == 400_000 + 256_000


def test_head_width() -> None:
    assert head_width(choices(method="qlora", switches={"kbit_upcast": "all"})) == 4
    assert head_width(choices(method="qlora", switches={"kbit_upcast": "none"})) == 2
    assert head_width(choices(method="full", dtype="fp32")) == 4
    sharded = {"sharding": "fsdp", "mixed_precision": "bf16"}
    # fp32 shards are gathered in the compute dtype, so autocast has nothing to copy
    assert head_width(choices(machine=gpus(2), method="full", **sharded)) == 2
    assert head_width(choices(machine=gpus(2), method="lora", **sharded)) == 2


def test_where_a_trained_heads_gradient_is_made() -> None:
    found = of(FULL_LAW, method="full")
    # beside it the logits' gradient and that of the head's input: 40 x 1,064 x 2 B
    assert (found.weight_grad, found.ending.bytes) == (128_000, 85_120)
    # autocast: gradients fp32, casts of the head (128,000) and of its input (5,120), and the
    # gradient of the head's cast (128,000)
    found = of(FULL_LAW, method="full", dtype="fp32", mixed_precision="bf16")
    assert (found.weight_grad, found.ending.bytes) == (256_000, 85_120 + 133_120 + 128_000)
    assert found.ending.formula == (
        "40 rows x (1,000 vocabulary + hidden 64) x 2 B + casts 261,120 B"
    )


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"method": "full"}, 128_000),
        ({"method": "full", "dtype": "fp32"}, 256_000),
        ({"method": "lora"}, 0),
        ({"method": "full", "gradient_accumulation": 2}, 0),
        ({"method": "full", "machine": gpus(2)}, 128_000),  # two runs that share nothing
        ({"method": "full", "machine": gpus(2), "sharding": "zero3"}, 0),
    ],
)
def test_when_a_heads_gradient_is_new(fields: dict[str, Any], made: int) -> None:
    found = of(FULL_LAW, **fields)
    assert found.weight_grad == made
    assert bool(found.ending.bytes) is bool(made)


@pytest.mark.parametrize(
    ("law", "fields", "rows"),
    [
        ({"chunk_rows": 8}, {}, 8),
        ({"chunk_rows": 100}, {}, 40),
        ({"chunk_rows": 8}, {"loss_chunk_rows": 5}, 5),
        ({"chunk_rows": 8}, {"loss_chunk_rows": 500}, 40),
        ({"chunk_rows": 0, "chunk_count": 3}, {}, 14),  # 40 / 3, up
        # ceil(1,000 / 64) = 16; ceil(40 / 16) = 3; the next power of two
        ({"chunk_rows": 0, "chunk_ratio": True}, {}, 4),
        # 6 B a logit: 30,000 / 6,000
        ({"chunk_rows": 0, "max_chunk_bytes": 30_000}, {}, 5),
        ({"chunk_rows": 0, "max_chunk_bytes": 5_999}, {}, 1),
        ({"chunk_rows": 0, "max_chunk_bytes": 10**6}, {}, 40),
    ],
)
def test_rows_of_a_chunk(law: dict[str, Any], fields: dict[str, Any], rows: int) -> None:
    found = CHUNKED.model_copy(update=law)
    r = choices(context=40, method="lora", **fields)
    assert chunk_rows(LLAMA, r, found, 40, 2) == rows


def test_chunks_with_a_frozen_head() -> None:
    # kept: 40 x 64 x 2 = 5,120; a tile 8 x 1,000 x 6 = 48,000
    # scoring has no gradients: one fp32 tile 8 x 1,000 x 4
    assert sizes(of(CHUNKED, method="lora")) == (53_120, 53_120, 32_000)
    # a part of the vocabulary: 8 x 100 x 6
    narrow = CHUNKED.model_copy(update={"chunk_vocab": 100})
    assert of(narrow, method="lora").forward.bytes == 5_120 + 4_800
    wide = CHUNKED.model_copy(update={"chunk_vocab": 5_000})
    assert of(wide, method="lora").forward.bytes == 53_120
    # an fp32 head is cast for a tile: 128,000
    fields = {"method": "lora", "dtype": "fp32", "mixed_precision": "bf16"}
    assert of(CHUNKED, **fields).forward.bytes == 53_120 + 128_000
    # a law that copies the head in fp32: 256,000
    copied = CHUNKED.model_copy(update={"head_copy": (("head", "fp32"),)})
    assert of(copied, method="lora").forward.bytes == 53_120 + 256_000
    assert of(CHUNKED, method="lora").weight_grad == 0


def test_chunks_with_a_trained_head() -> None:
    # kept 5,120 + the head's gradient 128,000 + the larger of a tile 48,000 and the end 40 x 64 x 2
    assert of(CHUNKED, method="full").forward.bytes == 181_120
    # with accumulation that gradient is there already
    assert of(CHUNKED, method="full", gradient_accumulation=2).forward.bytes == 53_120
    # made in fp32, 256,000, cast at the end: 128,000 + 5,120 are more than a tile
    fp32 = CHUNKED.model_copy(update={"head_grad": (("sum", "fp32"),)})
    assert of(fp32, method="full").forward.bytes == 5_120 + 256_000 + 133_120
    # of an fp32 head it is the gradient itself: nothing is cast but the rows'
    found = of(fp32, method="full", dtype="fp32")
    # kept 10,240; tile 8 x 1,000 x 8 = 64,000 against 10,240
    assert found.forward.bytes == 10_240 + 256_000 + 64_000
    small = CHUNKED.model_copy(update={"chunk_rows": 1, "chunk_vocab": 10})
    # tile 60 B against the rows' cast 5,120
    assert of(small, method="full").forward.bytes == 5_120 + 128_000 + 5_120


@pytest.mark.parametrize(
    ("law", "rows", "chunk", "shape"),
    [
        # a share 2 x 64,000 / 4 = 32,000 B: 5 rows x 1,000 = 5,000 elements over 16 rows: 312 -> 256
        ({}, 40, 0, (16, 256)),
        ({"max_chunk_bytes": 24_000}, 40, 0, (16, 192)),  # 4,000 / 16 = 250
        ({"min_chunk_bytes": 36_000}, 40, 0, (16, 320)),  # 6,000 / 16 = 375
        ({}, 4, 0, (4, 960)),  # 5,000 / 4 is more than 1,000 columns
        ({}, 40, 1, (16, 62)),  # 1,000 / 16: less than a step is left as it is
        ({"tile_rows": 1000, "head_share": 1000}, 40, 0, (40, 50)),  # 12,000 B: 2 rows
    ],
)
def test_the_shape_of_a_tile(
    law: dict[str, Any], rows: int, chunk: int, shape: tuple[int, int]
) -> None:
    fields = {"loss_chunk_rows": chunk} if chunk else {}
    r = choices(context=40, method="lora", **fields)
    assert tile_shape(LLAMA, r, TILED.model_copy(update=law), rows) == shape


def test_tiles_with_a_frozen_head() -> None:
    found = of(TILED, method="lora")
    # kept: two of [40, 64] in 16 bit = 10,240. A tile of 16 x 256 in fp32 and 16 bit: 24,576; sum and
    # product 8 B of 16 x 64: 8,192; the last block's U 4,096
    assert found.forward.bytes == 10_240 + 24_576 + 8_192 + 4_096
    assert found.backward.bytes == found.forward.bytes
    # scoring keeps the rows alone and has no 16-bit copy: 5,120 + 16,384
    assert found.score.bytes == 5_120 + 16_384
    # one block only: no last one's U
    fields = {"method": "lora", "context": 16}
    assert of(TILED, **fields).forward.bytes == 2 * 16 * 64 * 2 + 24_576 + 8_192
    # a tile of 4 rows x 10 columns: the target's rows of W at the end are more: 10 B of 4 x 64
    thin = TILED.model_copy(update={"tile_rows": 4})
    found = of(thin, method="lora", loss_chunk_rows=1, context=4)
    # 1,000 elements over 4 rows: 250 -> 192 columns; 4 x 192 x 6 = 4,608 + 8 x 256 = 6,656
    assert found.forward.bytes == 2 * 4 * 64 * 2 + 6_656
    small = replace(LLAMA, vocab=8)
    # 4 x 8 x 6 = 192 + 2,048 is less than (8 + 2) x 256 = 2,560
    assert of(thin, small, method="lora", loss_chunk_rows=1, context=4).forward.bytes == (
        1_024 + 2_560
    )


def test_tiles_of_an_fp32_head_and_of_a_soft_cap() -> None:
    fields = {"method": "lora", "dtype": "fp32", "mixed_precision": "bf16"}
    # + the tile's columns of W in 16 bit: 256 x 64 x 2 = 32,768
    assert of(TILED, **fields).forward.bytes == 10_240 + 24_576 + 32_768 + 8_192 + 4_096
    assert of(TILED, **fields).score.bytes == 5_120 + 16_384 + 32_768
    # fp32 everywhere: no 16-bit copy of the tile, 4 B kept
    plain = of(TILED, method="lora", dtype="fp32")
    assert plain.forward.bytes == 20_480 + 16_384 + 8_192 + 4_096
    capped = replace(LLAMA, softcap=30.0)
    assert of(TILED, capped, method="lora").forward.bytes == 10_240 + 40_960 + 8_192 + 4_096


def test_tiles_with_a_trained_head() -> None:
    # accumulators 16 x 64 x (2 + 4) = 6,144; a tile 24,576, or it being gone its 16-bit copy 8,192 and
    # a product of 256 columns x 64 x 4 = 65,536
    found = of(TILED, method="full")
    assert found.forward.bytes == 10_240 + 6_144 + 73_728
    assert found.weight_grad == 128_000
    # few columns: 62 x 64 x 4 = 15,872 + 16 x 62 x 2 = 1,984, against a tile of 5,952
    assert of(TILED, method="full", loss_chunk_rows=1).forward.bytes == 10_240 + 6_144 + 17_856
    # fp32: accumulators 4 B, the rows times their gradient, the tile itself 16,384 beside the product
    found = of(TILED, method="full", dtype="fp32")
    assert found.forward.bytes == 20_480 + 2 * 4_096 + 16_384 + 65_536
    # an fp32 head under autocast: its columns in 16 bit 32,768
    found = of(TILED, method="full", dtype="fp32", mixed_precision="bf16")
    assert found.forward.bytes == 10_240 + 6_144 + 32_768 + 73_728


def test_formulas_have_the_numbers() -> None:
    assert of(CHUNKED, method="full").forward.formula == (
        "40 rows: 5,120 B kept + head 128,000 B + the larger of a tile 8 x 1,000 x 6 B (+ cast 0 B) "
        "and the last casts 5,120 B"
    )
    assert of(TILED, method="lora").forward.formula == (
        "40 rows: 10,240 B kept + a tile of 16 x 256: 24,576 B, with its fp32 sums of 16 x hidden 36,864 B"
    )
