"""Attention to the last `window` tokens: the cache holds no more of them.

DeepSeek-V4 also keeps one compressed entry, and an indexer key where it has an indexer, for every
`compress_ratio` tokens of the whole sequence. Training allocates as full attention does: flash and SDPA
kernels save queries, keys and values of all tokens whatever the window.
"""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer
from planner.models.spec import MixerSpec


def compressed(mixer: MixerSpec, element: float) -> float:
    """Return bytes that every token adds to the compressed entries beyond the window."""
    if not mixer.compress_ratio:
        return 0
    return (mixer.head_dim + mixer.index_head_dim) * element / mixer.compress_ratio


def window_and_flight(window: int, max_model_len: int, in_flight: int) -> tuple[int, int]:
    """Return pages for the window, what is being computed, and a block that both ends touch."""
    return min(window - 1 + in_flight, max_model_len), 1


MIXER = Mixer(
    record=a.attention,
    assumes="",
    keeps_apart=True,
    reads_images=False,
    divides=True,
    cache=Cache(
        token=a.keys_and_values, beyond=compressed, tokens_held=a.last_tokens, state=a.nothing
    ),
    pages=replace(a.PAGES, kind=a.windowed_kind, own_group=True, longest=window_and_flight),
    lora_roots=a.ROOTS,
)
