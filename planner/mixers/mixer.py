"""What the planner knows of one kind of token mixer. No part has a default: an entry says them all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from planner.layer.program import Program
from planner.layer.tape import Value
from planner.models.spec import LINEARS, LayerSpec, MixerKind, MixerSpec, ModuleSpec

OUT_LEAVES = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "output_proj"})


class Linears(NamedTuple):
    """The linears of a layer's token mixer, in the order of its code."""

    ins: list[ModuleSpec]
    out: ModuleSpec | None


Record = Callable[[Program, Value, LayerSpec, Linears, int], Value]
"""(program, input, layer, linears, bytes an element of the input) -> output; the caller drops the input."""
Bytes = Callable[[MixerSpec, float], float]
"""(mixer, bytes an element) -> bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """What one layer keeps of a sequence while it generates; elements have the cache's dtype."""

    token: Bytes
    """Bytes of one cached token."""
    beyond: Bytes
    """Bytes that every token of the sequence adds however short the window is."""
    tokens_held: Callable[[MixerSpec, int], int]
    """Of so many tokens, how many stay cached."""
    state: Bytes
    """Bytes that do not grow with the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """How vLLM cuts the cache of a layer into pages (v1/kv_cache_interface.py, a KVCacheSpec a kind)."""

    kind: Callable[[MixerSpec], MixerKind]
    """Whose pages they are: its own kind's, or full attention's where nothing limits them."""
    own_group: bool
    """Layers of the kind have a group of their own; releases before groups page them like full attention."""
    longest: Callable[[int, int, int], tuple[int, int]]
    """(window, max_model_len, tokens in flight) -> tokens a sequence has pages for at most, and
    blocks beside them."""
    states: Callable[[MixerSpec], int]
    """States a sequence holds under prefix caching; 0: the kind has none."""
    divided: bool
    """Tensor-parallel ranks share the cache by key heads; False: each holds all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """One kind of token mixer."""

    record: Record | None
    """Its program: what it allocates and autograd saves. None: it mixes no tokens."""
    assumes: str
    """Packages whose fused kernels the program takes for granted; empty: none beyond torch."""
    keeps_apart: bool
    """Positions and a mask tell packed samples apart in it: no state runs from one to the next."""
    reads_images: bool
    """Its keys and values are the images', not the text's."""
    divides: bool
    """Tensor-parallel ranks each take a part of its heads."""
    cache: Cache
    pages: Pages
    lora_roots: frozenset[str]
    """First path component of its modules in a layer; the LoRA word `attention` means their linears."""

    def linears(self, layer: LayerSpec) -> Linears:
        """Return the projections into the mixer of `layer`, and the one out of it."""
        found = [m for m in layer.modules if m.kind in LINEARS and self.owns(m)]
        out = next((m for m in reversed(found) if m.leaf in OUT_LEAVES), None)
        return Linears([m for m in found if m is not out], out)

    def owns(self, module: ModuleSpec) -> bool:
        """Say whether a module of a layer is the mixer's."""
        return module.name.split(".", 1)[0] in self.lora_roots
