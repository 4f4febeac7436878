"""Who trains a quantised checkpoint, and what it then holds: read in transformers 5.19's quantizers."""

from dataclasses import dataclass
from enum import StrEnum


class Held(StrEnum):
    """What a trainer has in memory of a quantised base."""

    STORED = "stored"
    """The checkpoint's own bytes."""
    HALF = "16-bit"
    """Decompressed or dequantised while loading or by the first forward."""
    NOTHING = "nothing"
    """No library trains it."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a scheme trains."""

    held: Held
    how: str
    """Why, and what loads it."""


BNB = Training(Held.STORED, "transformers with bitsandbytes trains adapters over it")
HQQ = Training(Held.STORED, "transformers with hqq trains adapters over it")
GPTQ = Training(Held.STORED, "transformers with gptqmodel trains adapters over it")
AWQ = Training(Held.STORED, "transformers with gptqmodel 5 or later trains adapters over it")
EETQ = Training(Held.STORED, "transformers with eetq trains adapters over it")
QUANTO = Training(Held.STORED, "transformers with optimum-quanto trains adapters over it")
AQLM = Training(Held.STORED, "transformers with aqlm 1.0.2 or later trains adapters over it")
TORCHAO8 = Training(Held.STORED, "transformers with torchao trains adapters over 8-bit weights")
COMPRESSED = Training(
    Held.HALF,
    "transformers loads compressed-tensors and decompresses them to 16 bits in the first forward",
)
MXFP4 = Training(Held.HALF, "transformers dequantises it: Mxfp4Config(dequantize=True)")
FP8 = Training(Held.HALF, "transformers dequantises it: FineGrainedFP8Config(dequantize=True)")
TORCHAO4 = Training(
    Held.NOTHING, "transformers loads torchao's 4-bit weights for inference only (is_trainable)"
)
FBGEMM = Training(Held.NOTHING, "transformers with fbgemm-gpu and vLLM load it, for inference only")
QUARK = Training(Held.NOTHING, "transformers with amd-quark and vLLM load it, for inference only")
ROUND = Training(Held.NOTHING, "transformers with auto-round and vLLM load it, for inference only")
MODELOPT = Training(Held.NOTHING, "vLLM, SGLang and TensorRT-LLM load it, for inference only")
EXL = Training(Held.NOTHING, "ExLlama loads it, for inference only")
BITNET = Training(Held.NOTHING, "transformers loads packed BitNet weights for inference only")
