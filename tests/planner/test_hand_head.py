"""The loss head replayed on the allocator, by hand: 40 rows, vocabulary 1,000, hidden 64, 16 bit.

Blocks are rounded up to 512 B: 40,000 logits are 80,384 B in 16 bit and 160,256 in fp32; the rows' hidden states
5,120; the head's gradient 128,000.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.models.spec import ModelSpec
from planner.replay.head import Head
from planner.replay.player import Player
from planner.run.logits_law import LogitsLaw
from planner.terms.logits import cut
from tests.planner.toys import LLAMA, choices

FULL = LogitsLaw(
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
NARROW, WIDE, ROWS, WEIGHT = 80_384, 160_256, 5_120, 128_000


def head(law: LogitsLaw, model: ModelSpec = LLAMA, **fields: Any) -> tuple[Head, Player]:
    """Return a head and its device."""
    r = replace(choices(model, **{"context": 40, **fields}), law=law)
    player = Player()
    return Head(model, r, 40, player), player


def run(
    law: LogitsLaw, model: ModelSpec = LLAMA, *, accumulate: bool = False, **fields: Any
) -> tuple[int, int]:
    """Return the peak of the loss and what it leaves."""
    played, player = head(law, model, **fields)
    hidden = player.block(ROWS)
    played.run(hidden, [], accumulate=accumulate)
    return player.device.peak_allocated_bytes, player.device.allocated_bytes


def scored(law: LogitsLaw, **fields: Any) -> tuple[int, int]:
    """Return the peak of scoring and what it leaves."""
    played, player = head(law, **fields)
    played.score(player.block(ROWS))
    return player.device.peak_allocated_bytes, player.device.allocated_bytes


def test_full_logits() -> None:
    # backward: three fp32 tensors; a frozen head's input is gone; left is the input's gradient
    assert run(FULL, method="lora") == (3 * WIDE, ROWS)
    # a trained head holds its input and leaves its gradient
    assert run(FULL, method="full") == (3 * WIDE + ROWS, ROWS + WEIGHT)
    # which is added to the one there is
    assert run(FULL, method="full", accumulate=True) == (3 * WIDE + ROWS, ROWS)
    assert scored(FULL, method="lora") == (ROWS + NARROW + 2 * WIDE, 0)


def test_copies_for_the_head() -> None:
    fields = {"dtype": "fp32", "mixed_precision": "bf16"}
    # the head in 16 bit 128,000 and, trained, its input in 16 bit
    assert run(FULL, method="lora", **fields)[0] == 3 * WIDE + 128_000
    assert run(FULL, method="full", **fields)[0] == 3 * WIDE + ROWS + 128_000 + ROWS
    switches = {"quantized_head": True, "kbit_upcast": "none"}
    assert run(FULL, method="qlora", switches=switches)[0] == 3 * WIDE + 256_000


def test_a_soft_cap() -> None:
    capped = replace(LLAMA, softcap=30.0)
    # the tanh is saved; then the gradient of the cap, out of place
    assert run(FULL, capped, method="lora") == (3 * WIDE + NARROW, ROWS)


def test_only_completions() -> None:
    law = FULL.model_copy(update={"rows": "completion"})
    fields = {"context": None, "prompt_length": 30, "completion_length": 10}
    # 10 rows: 40,000 B in fp32 are 40,448; the gradient of all rows beside that of ten, 1,536
    assert run(law, method="lora", **fields) == (3 * 40_448, ROWS)


def test_shifted_rows() -> None:
    order = ("logits: act", "float: upcast shifted", "|", "-float")
    law = LogitsLaw(kind="full", forward=(("logits", "act"),), order=order)
    # a row less for each of two sequences of 20: 38,000 x 4 B are 152,064
    found = run(law, method="lora", context=20, micro_batch_size=2)
    assert found == (ROWS + NARROW + 152_064, ROWS)


def test_chunks() -> None:
    # kept 5,120; one chunk 32,256 + 16,384 beside the input
    chunk = 32_256 + 16_384
    assert run(CHUNKED, method="lora") == (2 * ROWS + chunk, ROWS)
    assert run(CHUNKED, method="full") == (2 * ROWS + WEIGHT, ROWS + WEIGHT)
    assert scored(CHUNKED, method="lora") == (ROWS + chunk, 0)
    dropped = CHUNKED.model_copy(update={"drops_hidden": True})
    assert run(dropped, method="lora") == (ROWS + chunk, ROWS)
    summed = CHUNKED.model_copy(update={"head_grad": (("sum", "fp32"),)})
    # an fp32 sum 256,000; its cast 128,000 at the end is more than a chunk
    assert run(summed, method="full") == (2 * ROWS + 256_000 + WEIGHT, ROWS + WEIGHT)


def test_tiles() -> None:
    # two of 5,120 kept; sums 4,096 twice, a tile 16 x 256 in fp32 and in 16 bit
    tile = 2 * 4_096 + 16_384 + 8_192
    assert run(TILED, method="lora") == (3 * ROWS + tile, ROWS)
    # in fp32 the tile has no copy; two of 10,240 kept
    wide = 2 * 4_096 + 16_384
    assert run(TILED, method="lora", dtype="fp32") == (ROWS + 4 * ROWS + wide, 2 * ROWS)


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_nothing_is_left_but_the_gradient(task: str) -> None:
    for framework in ("vramwise", "trl", "unsloth", "liger", "torchtune"):
        r = choices(task=task, framework=framework, method="lora", context=40)
        player = Player()
        Head(LLAMA, r, 40, player).run(player.block(ROWS), [], accumulate=False)
        assert player.device.allocated_bytes == ROWS


def test_a_heads_own_gradient_of_the_sums_width_needs_no_copy() -> None:
    summed = CHUNKED.model_copy(update={"head_grad": (("sum", "act"),)})
    chunk = 32_256 + 16_384
    assert run(summed, method="full") == (2 * ROWS + WEIGHT + chunk, ROWS + WEIGHT)
    assert run(summed, method="full", accumulate=True) == (2 * ROWS + WEIGHT + chunk, ROWS)


def test_scaled_logits_are_a_second_tensor() -> None:
    law = LogitsLaw(
        kind="full", forward=(("logits", "act"),), backward=(("logits", "act"), ("g", "act"))
    )
    assert run(law, method="lora") == (2 * NARROW, ROWS)
    # scaled out of place while the head's input is there
    scaled = replace(LLAMA, logit_scale=0.25)
    assert run(law, scaled, method="lora") == (ROWS + 2 * NARROW, ROWS)
    # some families multiply by 1 too
    assert run(law, replace(LLAMA, model_type="cohere2"), method="lora") == (
        ROWS + 2 * NARROW,
        ROWS,
    )


def test_how_many_parts_there_are() -> None:
    # 40 rows in tiles of 16 x 256 of 1,000 columns; in chunks of 8
    assert head(TILED, method="lora")[0]._parts() == 3 * 4
    assert head(CHUNKED, method="lora")[0]._parts() == 5


def test_a_tile_has_a_column_at_least() -> None:
    assert cut(16, 3, 1, 16) == (16, 1)
    assert cut(40, 1_000, 6, 16) == (16, 320)  # 375 columns, in steps of 64
