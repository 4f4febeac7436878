"""kv_cache: keys, values and states of every sequence that is generated at once (planner/mixers)."""

from planner.dtypes import ELEMENT_BYTES, normal_dtype
from planner.mixers.registry import mixer_of
from planner.models.spec import LayerSpec, ModelSpec
from planner.run.recipe import EngineKind, Task
from planner.run.resolved import Resolved

ENDLESS = 1 << 62
"""Tokens of a sequence that no window holds."""


def layer_bytes_per_token(layer: LayerSpec, element: float) -> float:
    """Return what one layer caches for one token; 0 for layers with a fixed state."""
    return mixer_of(layer.mixer).cache.token(layer.mixer, element)


def tokens_held(layer: LayerSpec, tokens: int) -> int:
    """Return how many of a sequence's tokens one layer keeps."""
    return mixer_of(layer.mixer).cache.tokens_held(layer.mixer, tokens)


def has_window(layer: LayerSpec) -> bool:
    """Say whether one layer keeps no more than a window of tokens, however long a sequence is."""
    return tokens_held(layer, ENDLESS) < ENDLESS


def _beyond(layer: LayerSpec, element: float) -> float:
    """Return what a token adds to one layer however short its window is."""
    return mixer_of(layer.mixer).cache.beyond(layer.mixer, element)


def bytes_per_token(model: ModelSpec, kv_dtype: str = "bf16") -> int:
    """Return cache bytes for one more token while no window is full."""
    element = ELEMENT_BYTES[normal_dtype(kv_dtype, field="kv_dtype")]
    each = (
        layer.count * (layer_bytes_per_token(layer, element) + _beyond(layer, element))
        for layer in model.layers
    )
    return int(sum(each))


def state_bytes(model: ModelSpec, kv_dtype: str = "bf16") -> int:
    """Return the fixed-size state of one sequence (mamba, linear attention)."""
    element = ELEMENT_BYTES[normal_dtype(kv_dtype, field="kv_dtype")]
    total = 0.0
    for layer in model.layers:
        for mixer in layer.mixers:
            total += layer.count * mixer_of(mixer).cache.state(mixer, element)
    return int(total)


def sequence_bytes(
    model: ModelSpec, tokens: int, kv_dtype: str = "bf16", *, capped: bool = True, block: int = 1
) -> int:
    """Return the cache of one sequence of `tokens` tokens.

    `capped`: sliding layers keep only their window; False for engines that reserve full pages.
    `block`: tokens are rounded up to whole blocks.
    """
    element = ELEMENT_BYTES[normal_dtype(kv_dtype, field="kv_dtype")]
    total = 0.0
    for layer in model.layers:
        seen = tokens_held(layer, tokens) if capped else tokens
        seen = -(-seen // block) * block
        total += layer.count * seen * layer_bytes_per_token(layer, element)
        total += layer.count * tokens * _beyond(layer, element)
    return int(total) + state_bytes(model, kv_dtype)


def rollout_sequences(r: Resolved) -> int:
    """Return how many sequences are generated at once."""
    if r.engine is EngineKind.NONE:
        return 0
    if r.task is Task.SERVE:
        return max(r.sequences, 1)
    if r.switches.generates_whole_batch:
        return r.sequences * r.grad_accum
    return min(max(r.sequences, r.num_generations), r.max_num_seqs)
