"""Attention to all earlier tokens."""

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer

MIXER = Mixer(
    record=a.attention,
    assumes="",
    cache=Cache(
        token=a.keys_and_values, beyond=a.nothing, tokens_held=a.every_token, state=a.nothing
    ),
    lora_roots=a.ROOTS,
)
