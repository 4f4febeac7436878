"""A layer that mixes no tokens: an MLP alone (Nemotron-H)."""

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer

MIXER = Mixer(
    record=None,
    assumes="",
    keeps_apart=True,
    reads_images=False,
    divides=True,
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=a.nothing),
    pages=a.PAGES,
    lora_roots=frozenset(),
)
