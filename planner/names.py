"""Names as people type them: folded to their letters and numbers, words of a recipe's fields, memory as a card's name."""

import re
from collections.abc import Mapping

from planner.errors import UsageError, near_names

TASK_WORDS = {
    "finetune": "sft", "finetuning": "sft", "ft": "sft", "train": "sft", "training": "sft",
    "supervised": "sft", "instruct": "sft", "rl": "grpo", "rlvr": "grpo", "rlhf": "ppo",
    "inference": "serve", "serving": "serve", "infer": "serve", "vllm": "serve",
    "preference": "dpo", "rewardmodel": "reward", "rm": "reward", "distillation": "distill",
    "gkd": "distill", "embedding": "embed", "reranker": "rerank",
}  # fmt: skip
METHOD_WORDS = {"fft": "full", "fullft": "full", "fullfinetune": "full", "4bitlora": "qlora"}
OPTIMIZER_WORDS = {
    "adam": "adamw", "adamwtorch": "adamw", "adamwtorchfused": "adamw-fused", "adamw8bit": "adamw-8bit",
    "adamwbnb8bit": "adamw-8bit", "8bitadam": "adamw-8bit", "adam8bit": "adamw-8bit",
    "pagedadamw32bit": "paged-adamw", "pagedadamw8bit": "paged-adamw-8bit", "lion32bit": "lion",
    "sgdmomentum": "sgd-momentum",
}  # fmt: skip
NOISE = re.compile(
    r"\b(?:nvidia|geforce|gtx|tesla|amd|radeon|instinct|intel|apple|gpu|graphics|card"
    r"|i?mac(?:book)?(?:\s+(?:pro|air|mini|studio))?|air|pro\s+max)\b"
)
"""Words of a card's name that say nothing more: makers, and the computer around an Apple chip."""
COUNTED = re.compile(
    r"(?P<count>\d{1,3})\s*[x\u00d7*]\s*(?P<card>.{2,})|(?P<each>.{2,}?)\s*[x\u00d7*]\s*(?P<times>\d{1,3})",
    re.IGNORECASE,
)
"""Several cards as one name: 2x3090, 8 x H100, 3090 x2."""
_FILE_KIND = re.compile(
    r"[\s:_.(-]+(?:i?q[1-8](?:_[a-z0-9]+)*|\d+[\s-]?bit)\)?(?=$|[\s-])", re.IGNORECASE
)
_SIZE = re.compile(r"\b\d+\s*(?:g|gb|gib)\b|\b(?:with|vram|ram|memory|of)\b")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)(?:\s*(?:gpu|card|vram|of\s+vram))?")


def folded(name: str) -> str:
    """Return letters and digits alone, small, with the points inside numbers."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^a-z0-9.]", "", name.lower())


def memory_named(name: str) -> float | None:
    """Return the GB of a card that is named by its memory alone ("16 GB", "24gb card"), else None."""
    match = _MEMORY.fullmatch(name.strip().lower())
    return float(match.group(1)) if match else None


def without_file_kind(name: str) -> str:
    """Return a model's name without how its weights are stored: "llama 3.1 8b q4_K_M" -> "llama 3.1 8b"."""
    return _FILE_KIND.sub("", name)


def without_memory(name: str) -> str:
    """Return a card's name in small letters without its memory and noise: "nvidia 3090 with 24G" -> "3090"."""
    return NOISE.sub(" ", _SIZE.sub(" ", re.sub(r"[-_]", " ", name.lower()))).strip()


def sized(found: list[str]) -> list[str]:
    """Return words with a number and its unit as one: 16, gb -> 16gb; 4090laptop -> 4090, laptop."""
    parts: list[str] = []
    for word in found:
        split = re.fullmatch(r"(\d{3,4})(laptop|mobile|super|ti)", word)
        pieces = list(split.groups()) if split else [word]
        if pieces[0] in ("g", "gb", "gib") and parts and parts[-1].isdigit():
            parts[-1] += "gb"
            continue
        parts += [
            "laptop" if piece == "mobile" else re.sub(r"^(\d+)(?:g|gib)$", r"\1gb", piece)
            for piece in pieces
        ]
    return parts


def word_of(field: str, name: str, known: list[str], others: Mapping[str, str]) -> str:
    """Return which of the `known` words of a field somebody means; raises UsageError with what is near."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for each in known:
        if plain == re.sub(r"[^a-z0-9]", "", each):
            return each
    if plain in others:
        return others[plain]
    close = near_names(name, known, most=3)
    said = f"did you mean {', '.join(close)}? " if close else ""
    raise UsageError(
        f"{field}: {name[:40]!r} is not allowed", hint=f"{said}known: {', '.join(known)}"
    )
