"""VisionSpec: what of a vision tower and its processor decides tokens and activations."""

from dataclasses import dataclass
from enum import StrEnum


class Cut(StrEnum):
    """How a processor cuts an image."""

    NATIVE = "native"
    """Any size, rounded to whole merged patches between two pixel counts (Qwen-VL)."""
    FIXED = "fixed"
    """One square size, whatever comes in (Gemma 3)."""
    TILES = "tiles"
    """A canvas of square tiles, padded to the most there may be (Llama 3.2 Vision)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """A vision tower."""

    cut: Cut
    hidden: int
    heads: int
    depth: int
    """Blocks, all of one kind."""
    intermediate: int
    gated: bool = False
    norm: str = "layernorm"
    activation: str = "gelu_pytorch_tanh"
    fused_qkv: bool = False
    bias: bool = True
    rope: bool = False
    patch: int
    merge: int = 1
    """Patches of one side that become one token."""
    frames: int = 1
    """Video frames in one patch."""
    channels: int = 3
    size: int = 0
    """Side of the fixed size, or of a tile."""
    tokens: int = 0
    """Tokens of an image of fixed size."""
    tiles: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    video_max_pixels: int = 0
    """Of one frame."""
    mergers: int = 1
    """Projections of the merged patches: deepstack has more than one."""
    cross: bool = False
    """The text attends to the features by cross-attention: no tokens of its own."""
    source: str = ""
