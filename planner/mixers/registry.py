"""The registry of token mixers. It is total: planner/mixers/KIND.py for every MixerKind, or no import.

A new kind is a word in MixerKind and a file of that name with `MIXER`; nothing else of the planner
asks which kind a layer is.
"""

from collections.abc import Iterable
from enum import StrEnum
from importlib import import_module

from planner.mixers.mixer import Mixer
from planner.models.spec import MixerKind, MixerSpec


def load(kinds: Iterable[StrEnum]) -> dict[StrEnum, Mixer]:
    """Return the mixer of every kind; raises ImportError for a kind without a file or an entry."""
    found: dict[StrEnum, Mixer] = {}
    for kind in kinds:
        mixer = getattr(import_module(f"planner.mixers.{kind}"), "MIXER", None)
        if not isinstance(mixer, Mixer):
            raise ImportError(f"planner/mixers/{kind}.py has no MIXER: what a {kind} layer does")
        found[kind] = mixer
    return found


MIXERS = load(MixerKind)


def mixer_of(spec: MixerSpec) -> Mixer:
    """Return what is known of a layer's mixer."""
    return MIXERS[spec.kind]
