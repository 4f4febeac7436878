"""Attention inside chunks of `window` tokens (Llama 4): the cache holds the running chunk."""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer


def chunk_and_flight(window: int, max_model_len: int, in_flight: int) -> tuple[int, int]:
    """Return pages for a chunk and what is being computed; chunks begin with a block."""
    return min(window + in_flight, max_model_len), 0


MIXER = Mixer(
    record=a.attention,
    assumes="",
    keeps_apart=True,
    reads_images=False,
    divides=True,
    cache=Cache(
        token=a.keys_and_values, beyond=a.nothing, tokens_held=a.last_tokens, state=a.nothing
    ),
    pages=replace(a.PAGES, kind=a.windowed_kind, own_group=True, longest=chunk_and_flight),
    lora_roots=a.ROOTS,
)
