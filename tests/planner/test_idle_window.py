"""A sliding window that no layer uses: before transformers 4.53 it brought a mask all the same."""

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.units import GiB

SEQUENCES, LAYERS, WINDOW = 3, 2, 1024


def model(window: int | None, **changes: object) -> ModelSpec:
    """Return a small Qwen2 whose config has a window that it says is not used."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
        "sliding_window": window,
        "use_sliding_window": False,
    }
    return model_spec_from_config(config | changes)


def more(length: int, framework: str = "hf-trainer==4.52", **changes: object) -> int:
    """Return the bytes of the loss phase that the window adds."""
    usual = {"method": "full", "attention": "sdpa", "checkpointing": "none", "packing": True}
    recipe = make_recipe(
        framework=framework, context=length, micro_batch_size=SEQUENCES, **(usual | changes)
    )
    with_window, without = (
        plan(model(window), recipe, Machine(vram_bytes=1024 * GiB)).phase("loss").total_bytes
        for window in (WINDOW, 4096)
    )
    return with_window - without


def test_rows_that_are_aligned_share_one_mask() -> None:
    # 1,032 = 129 x 8: one [T, T] in bf16, expanded over sequences and layers
    assert more(1032) == 2 * 1032 * 1032


def test_other_rows_are_copied_in_every_layer() -> None:
    # 1,028 elements a row become 1,032 in each layer's copy, one a sequence
    copies = LAYERS * SEQUENCES * 1028 * 1032 * 2
    assert more(1028) == 2 * 1028 * 1028 + copies


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (1020, {}),
        (1028, {"framework": "hf-trainer==4.54"}),
        (1028, {"framework": "trl==0.22"}),
        (1028, {"attention": "flash"}),
    ],
)
def test_nothing_is_added_below_it_later_or_by_flash(
    length: int, changes: dict[str, object]
) -> None:
    assert more(length, **changes) == 0


def test_only_configs_that_keep_it_have_one() -> None:
    assert model(WINDOW).idle_window == WINDOW
    assert model(None).idle_window == 0
    assert model(WINDOW, use_sliding_window=True).idle_window == 0
    assert model(WINDOW, model_type="llama").idle_window == 0
