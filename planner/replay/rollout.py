"""Generation by the training model: keys and values grow by concatenation, layer by layer, or have room from the start."""

from planner.allocator.pool import Chunk
from planner.dtypes import ELEMENT_BYTES, normal_dtype
from planner.models.spec import ModelSpec
from planner.replay.player import Player
from planner.run.resolved import Resolved
from planner.terms.kv_cache import (
    has_window,
    layer_bytes_per_token,
    rollout_sequences,
    state_bytes,
    tokens_held,
)


def play_rollout(model: ModelSpec, r: Resolved, player: Player) -> None:
    """Play a dynamic cache's last step: every tensor that has no room is copied to one token more; then its end.

    Layers with a window keep no more than that (transformers 5.19 DynamicSlidingWindowLayer.update).
    """
    count = rollout_sequences(r)
    element = ELEMENT_BYTES[normal_dtype(r.kv_dtype, field="kv_dtype")]
    layers = [model.layers[index] for index in model.layer_order]
    each = [(layer, layer_bytes_per_token(layer, element) / 2) for layer in layers]
    player.passing(count * state_bytes(model, r.kv_dtype))
    cache: dict[tuple[int, int], Chunk | None] = {}
    for tokens in (max(1, r.seq_tokens - 1), r.seq_tokens):
        for place, (layer, width) in enumerate(each):
            in_place = r.switches.generates_in_place and not has_window(layer)
            if in_place and (place, 0) in cache:
                continue
            held = r.seq_tokens if in_place else tokens_held(layer, tokens)
            for half in (0, 1):
                longer = player.take(int(count * held * width))
                player.give(cache.get((place, half)))
                cache[place, half] = longer
    player.give(*cache.values())
