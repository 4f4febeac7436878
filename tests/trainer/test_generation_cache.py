"""The rollout's cache in one place against transformers' growing one: the same keys and values, no copies of them."""

import random

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig

from trainer.engines.cache import RoomyLayer, fill, keep, roomy, spread
from trainer.engines.transformers import cache_bytes

HEADS, WIDTH, VALUE_WIDTH, PROMPT, NEW = 2, 8, 6, 5, 12


def _config(window: bool) -> LlamaConfig | Gemma3TextConfig:
    if not window:
        return LlamaConfig(num_hidden_layers=2)
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(num_hidden_layers=2, sliding_window=4, layer_types=kinds)


def _both(window: bool, room: int) -> tuple[DynamicCache, DynamicCache]:
    return DynamicCache(config=_config(window)), roomy(DynamicCache(config=_config(window)), room)


def _add(caches: tuple[DynamicCache, DynamicCache], rows: int, tokens: int) -> None:
    """Add the same tokens to both, and compare what attention would see."""
    for layer in range(2):
        keys = torch.randn(rows, HEADS, tokens, WIDTH)
        values = torch.randn(rows, HEADS, tokens, VALUE_WIDTH)
        grown, placed = (cache.update(keys, values, layer) for cache in caches)
        for one, other in zip(grown, placed, strict=True):
            assert torch.equal(one, other)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize("window", [False, True], ids=["full", "with a window"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_spread_written_and_dropped_as_in_a_growing_cache(seed: int, window: bool) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    caches = _both(window, PROMPT)
    assert sum(isinstance(layer, RoomyLayer) for layer in caches[1].layers) == (1 if window else 2)
    for tokens in (3, 2):  # a prompt in two chunks
        _add(caches, 3, tokens)
    indices = torch.tensor([row for row in range(3) for _ in range(4)])
    caches[0].batch_select_indices(indices)
    spread(caches[1], indices, PROMPT + NEW)
    rows = list(range(12))
    for _ in range(NEW):
        _add(caches, len(rows), 1)
        running = sorted(draw.sample(range(len(rows)), draw.randint(1, len(rows))))
        places = keep(caches[1], running, torch.device("cpu"))
        assert sorted(places) == running
        # whoever stays within what is left does not move
        assert all(places[row] == row for row in running if row < len(running))
        caches[0].batch_select_indices(torch.tensor(places))
        rows = [rows[place] for place in places]


def test_a_token_allocates_nothing_and_rows_that_end_give_nothing_back() -> None:
    _, cache = _both(False, PROMPT + NEW)
    for layer in range(2):
        cache.update(torch.zeros(4, HEADS, PROMPT, WIDTH), torch.zeros(4, HEADS, PROMPT, 8), layer)
    held = 2 * 4 * HEADS * (PROMPT + NEW) * (WIDTH + 8) * 4
    places = {layer.keys.data_ptr() for layer in cache.layers}
    assert cache_bytes(cache) == held
    for layer in range(2):
        cache.update(torch.ones(4, HEADS, 1, WIDTH), torch.ones(4, HEADS, 1, 8), layer)
    keep(cache, [1, 3], torch.device("cpu"))
    assert {layer.keys.data_ptr() for layer in cache.layers} == places
    assert cache_bytes(cache) == held


@pytest.mark.parametrize("window", [False, True], ids=["full", "with a window"])
def test_a_rehearsal_fills_every_layer(window: bool) -> None:
    _, cache = _both(window, PROMPT + NEW)
    for layer in range(2):
        cache.update(torch.zeros(1, HEADS, 3, WIDTH), torch.zeros(1, HEADS, 3, WIDTH), layer)
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            for buffer in layer._buffers:  # what a new buffer may hold
                buffer[:, :, 3:] = torch.nan
    fill(cache, PROMPT + NEW - 1)
    assert not any(layer.keys.isnan().any() or layer.values.isnan().any() for layer in cache.layers)
    assert [layer.keys.shape[-2] for layer in cache.layers] == 2 * [PROMPT + NEW - 1]
