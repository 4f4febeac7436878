"""kv_cache: keys, values and states of every sequence that is generated at once, by mixer kind."""

from math import prod

from planner.dtypes import ELEMENT_BYTES, normal_dtype
from planner.models.spec import LayerSpec, MixerKind, ModelSpec
from planner.run.recipe import EngineKind, Task
from planner.run.resolve import Resolved

WINDOWED = (MixerKind.SLIDING, MixerKind.CHUNKED)
STATEFUL = (MixerKind.LINEAR, MixerKind.MAMBA)
WITHOUT_TEXT_CACHE = (*STATEFUL, MixerKind.CROSS, MixerKind.NONE)


def layer_bytes_per_token(layer: LayerSpec, element: float) -> float:
    """Return what one layer caches for one token; 0 for layers with a fixed state."""
    mixer = layer.mixer
    if mixer.kind in WITHOUT_TEXT_CACHE or mixer.kv_shared:
        return 0
    if mixer.kind is MixerKind.MLA:
        latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        return (latent + mixer.index_head_dim) * element
    heads = mixer.num_kv_heads or mixer.num_heads
    values = 0 if mixer.shares_storage else mixer.v_head_dim or mixer.head_dim
    index = 0 if mixer.compress_ratio else mixer.index_head_dim
    return (heads * (mixer.head_dim + values) + index) * element


def compressed_bytes_per_token(layer: LayerSpec, element: float) -> float:
    """Return what the compressed entries beyond the window cache for one token (DeepSeek-V4)."""
    mixer = layer.mixer
    if not mixer.compress_ratio:
        return 0
    return (mixer.head_dim + mixer.index_head_dim) * element / mixer.compress_ratio


def bytes_per_token(model: ModelSpec, kv_dtype: str = "bf16") -> int:
    """Return cache bytes for one more token while no window is full."""
    element = ELEMENT_BYTES[normal_dtype(kv_dtype, field="kv_dtype")]
    each = (
        layer.count
        * (layer_bytes_per_token(layer, element) + compressed_bytes_per_token(layer, element))
        for layer in model.layers
    )
    return int(sum(each))


def state_bytes(model: ModelSpec, kv_dtype: str = "bf16") -> int:
    """Return the fixed-size state of one sequence (mamba, linear attention)."""
    element = ELEMENT_BYTES[normal_dtype(kv_dtype, field="kv_dtype")]
    total = 0.0
    for layer in model.layers:
        for mixer in layer.mixers:
            for index, shape in enumerate(mixer.state_shapes):
                wide = mixer.state_fp32 and index == len(mixer.state_shapes) - 1
                total += layer.count * prod(shape) * (4 if wide else element)
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
        seen = tokens
        if capped and layer.mixer.kind in WINDOWED and layer.mixer.window:
            seen = min(tokens, layer.mixer.window)
        seen = -(-seen // block) * block
        total += layer.count * seen * layer_bytes_per_token(layer, element)
        total += layer.count * tokens * compressed_bytes_per_token(layer, element)
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
