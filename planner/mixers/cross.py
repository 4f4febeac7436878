"""Attention to image states (Llama 3.2 Vision): its keys and values do not grow with the text."""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer

MIXER = Mixer(
    record=a.attention,
    assumes="",
    keeps_apart=False,
    reads_images=True,
    divides=False,
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=a.nothing),
    pages=replace(a.PAGES, own_group=True),
    lora_roots=a.ROOTS,
)
