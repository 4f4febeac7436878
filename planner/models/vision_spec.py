"""What of a tower and its processor decides tokens and activations: images, video and sound."""

from dataclasses import dataclass
from enum import StrEnum


class Cut(StrEnum):
    """How a processor cuts an image."""

    NATIVE = "native"
    """Any size, rounded to whole merged patches between two pixel counts (Qwen-VL)."""
    FIXED = "fixed"
    """One square size, whatever comes in (Gemma 3, LLaVA 1.5)."""
    TILES = "tiles"
    """A canvas of square tiles, padded to the most there may be (Llama 3.2 Vision)."""
    ANYRES = "anyres"
    """The whole image and tiles of the best of some resolutions (LLaVA-NeXT, LLaVA-OneVision)."""
    CROPS = "crops"
    """Tiles of the canvas nearest in aspect ratio, and a thumbnail (InternVL)."""
    EDGE = "edge"
    """Any size up to a longest edge, rounded up to whole merged patches; a token ends each row (Mistral 3)."""
    SPLIT = "split"
    """Scaled to a longest edge, split into tiles, and the whole image (Idefics3, SmolVLM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """What takes a tower's features to the text's width."""

    root: str
    """Its path among the model's towers."""
    wide: int
    """Numbers of one row that enters: of all patches that become one token."""
    out: int
    inner: int = 0
    """Width between its two linears; 0 = there is one."""
    leaves: tuple[str, ...] = ("linear_1", "linear_2")
    norm: str = ""
    """rmsnorm, layernorm, or none."""
    activation: str = "gelu"
    merger: str = ""
    """The linear that makes one row of a token's patches before the others (Mistral 3)."""
    merged: int = 0
    """Width of that row."""
    count: int = 1
    """How many, each on all rows: Qwen3-VL's deepstack has more than one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSpec:
    """A transformer beside the text: its blocks, all of one kind."""

    hidden: int
    heads: int
    depth: int
    intermediate: int
    gated: bool = False
    norm: str = "layernorm"
    activation: str = "gelu_pytorch_tanh"
    fused_qkv: bool = False
    bias: bool = True
    """Of attention's linears."""
    mlp_bias: bool = True
    rope: bool = False
    norm_first: bool = False
    """A layer norm before the first block."""
    scaled: bool = False
    """Each block's two results are multiplied by a trained vector (InternVL)."""
    joined: bool = False
    """But for flash attention's own code the result is copied before its projection, which saves the copy:
    Qwen-VL concatenates images and windows, Whisper's heads lie before the rows."""
    masked: bool = False
    """Attention gets an additive mask of [1, T, T], one for all blocks (Llama 3.2 Vision, Pixtral)."""
    one_sequence: bool = False
    """All of a micro-batch's images are one sequence, which such a mask parts again (Pixtral)."""
    unused: int = 0
    """Last blocks whose output nothing reads: LLaVA takes the features of the last but one."""
    states: int = 0
    """Blocks' outputs that the model's forward holds until it returns (output_hidden_states)."""
    checkpoints: bool = True
    """Its blocks are checkpointed when the model's are; MllamaVisionEncoderLayer is no
    GradientCheckpointingLayer."""
    hooked: bool = True
    """transformers' enable_input_require_grads finds its patch embedding (Qwen3-VL names none)."""
    root: str = ""
    """The blocks' path among the model's towers."""
    names: tuple[tuple[str, str], ...] = ()
    """A block's linears: the name that the layers' programs know, and its own."""
    projector: Projector | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec(TowerSpec):
    """A vision tower and how its processor cuts."""

    cut: Cut
    patch: int
    merge: int = 1
    """Patches of one side that become one token."""
    frames: int = 1
    """Video frames in one patch."""
    channels: int = 3
    size: int = 0
    """Side of the fixed size, or of a tile."""
    class_token: int = 0
    """Rows of a tile before its patches."""
    tokens: int = 0
    """Tokens of an image of fixed size, or of one tile."""
    tiles: int = 1
    """The most there may be."""
    edge: int = 0
    """The longest edge that an image is scaled to before it is split."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """Resolutions (height, width) that images are fitted to."""
    video_tokens: int = 0
    """Tokens of one frame; 0 = videos are not planned."""
    min_pixels: int = 0
    max_pixels: int = 0
    video_max_pixels: int = 0
    """Of one frame."""
    masks_text: bool = False
    """An image's tokens see each other, so the text's attention gets masks in full (Gemma 3)."""
    cross: bool = False
    """The text attends to the features by cross-attention: no tokens of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioSpec(TowerSpec):
    """A Whisper-like encoder: every sound is padded to windows of one length."""

    mels: int
    positions: int
    """Rows of one window inside the blocks."""
    window_s: int = 30
    pool: int = 1
    """Rows that become one token."""
    whole_windows: bool = False
    """Padding has tokens too, and a longer sound has several windows (Voxtral); else it is cut off."""
