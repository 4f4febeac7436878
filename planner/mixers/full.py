"""Attention to all earlier tokens."""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer
from planner.models.spec import MixerKind, MixerSpec


def as_full(mixer: MixerSpec) -> MixerSpec:
    """Return the mixer as one that sees all tokens."""
    return replace(mixer, kind=MixerKind.FULL, window=0)


MIXER = Mixer(
    record=a.attention,
    assumes="",
    keeps_apart=True,
    reads_images=False,
    divides=True,
    cache=Cache(
        token=a.keys_and_values, beyond=a.nothing, tokens_held=a.every_token, state=a.nothing
    ),
    pages=a.PAGES,
    lora_roots=a.ROOTS,
)
