"""Attention inside chunks of `window` tokens (Llama 4): the cache holds the running chunk."""

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer

MIXER = Mixer(
    record=a.attention,
    assumes="",
    cache=Cache(
        token=a.keys_and_values, beyond=a.nothing, tokens_held=a.last_tokens, state=a.nothing
    ),
    lora_roots=a.ROOTS,
)
