"""Bytes per element, and the names of quantisations; planner.quant.schemes has what they take."""

from planner.errors import UsageError

ELEMENT_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
    "int4": 0.5,
    "nf4": 0.5,
    "fp4": 0.5,
}
ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "i8": "int8",
    "u8": "uint8",
}
TRAIN_DTYPES = ("bf16", "fp16", "fp32")

QUANTIZATIONS: dict[str, str] = {
    "none": "",
    "nf4": "nf4",
    "fp4": "fp4",
    "bnb-nf4": "nf4",
    "bnb-fp4": "fp4",
    "4bit": "nf4",
    "int8": "int8",
    "bnb-int8": "int8",
    "8bit": "int8",
    "fp8": "fp8",
    "fp8-block": "fp8-block",
    "gptq": "gptq-4bit",
    "awq": "awq-4bit",
    "gptq-4bit": "gptq-4bit",
    "gptq-8bit": "gptq-8bit",
    "awq-4bit": "awq-4bit",
    "compressed-int4": "gptq-4bit",
    "int4": "gptq-4bit",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "hqq": "hqq-4bit",
    "hqq-4bit": "hqq-4bit",
    "gguf-q8_0": "gguf-q8_0",
    "gguf-q4_0": "gguf-q4_0",
    "gguf-q4_k_m": "gguf-q4_k_m",
}
GGUF_BYTES = {"gguf-q8_0": 34 / 32, "gguf-q4_k_m": 4.85 / 8, "gguf-q4_0": 18 / 32}
"""Bytes per weight, embeddings included: q8_0 and q4_0 blocks of 32 with an fp16 scale; q4_k_m mixes
4.5-bit and 6.6-bit blocks (llama.cpp's own table)."""


def normal_dtype(name: str, *, field: str = "dtype") -> str:
    """Return the short name of a dtype; raises UsageError naming `field`."""
    folded = name.lower().removeprefix("torch.")
    folded = ALIASES.get(folded, folded)
    if folded not in ELEMENT_BYTES:
        raise UsageError(
            f"{field}: {name[:40]!r} is not a dtype vramwise knows",
            hint=f"one of {', '.join(ELEMENT_BYTES)}",
        )
    return folded


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a whole-byte dtype."""
    return int(ELEMENT_BYTES[dtype])
