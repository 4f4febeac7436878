"""Names as people type them -> the catalogue's: models, GPUs and words of a recipe; and what is near a name."""

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache

from planner.errors import UsageError

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
_NOISE = re.compile(
    r"\b(?:nvidia|geforce|tesla|amd|radeon|instinct|intel|apple|gpu|graphics|card|macbook|mac|pro\s+max)\b"
)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)(?:\s*(?:gpu|card|vram|of\s+vram))?")


def folded(name: str) -> str:
    """Return letters and digits alone, small, with the points inside numbers."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^a-z0-9.]", "", name.lower())


def words(name: str) -> list[str]:
    """Return the words of a name: letters, or a number with its unit: "Llama 3.1 8B" -> llama, 3.1, 8b."""
    return re.findall(r"\d+(?:\.\d+)?[a-z]*|[a-z]+", name.lower())


def near(name: str, known: Iterable[str], *, most: int = 4) -> list[str]:
    """Return the known names that are most like one, the likest first."""
    asked, text = set(words(name)), folded(name)
    scored = []
    for each in known:
        shared = len(asked & set(words(each)))
        ratio = difflib.SequenceMatcher(None, text, folded(each)).ratio()
        if shared or ratio >= 0.5:
            scored.append((-ratio - 0.25 * shared, len(each), each))
    return [each for *_, each in sorted(scored)[:most]]


def model_named(name: str) -> str | None:
    """Return the catalogue's short name for what somebody typed; None when it could be several or none."""
    found = models_like(name)
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=512)
def models_like(name: str) -> tuple[str, ...]:
    """Return every catalogue model that a typed name could mean, the likest first."""
    from planner.importers.names import resolve_name
    from planner.models.catalogue import catalogue_names, model_names

    spellings = model_names()
    text = name.strip().lower()
    if text in spellings:
        return (spellings[text],)
    leaf = text.rsplit("/", 1)[-1]
    same = {short for known, short in spellings.items() if folded(known) == folded(leaf)}
    if len(same) == 1:
        return tuple(same)
    hub_id = resolve_name(name)
    if hub_id is not None and hub_id.lower() in spellings:
        return (spellings[hub_id.lower()],)
    asked = words(leaf)
    # a name is all words that were typed, in any order, and perhaps more
    wide = [short for short in catalogue_names() if _has_all(asked, short)]
    return tuple(sorted(wide, key=lambda short: (len(words(short)), len(short))))


def _has_all(asked: list[str], name: str) -> bool:
    own = words(name)
    return bool(asked) and all(
        word in own or (word.isalpha() and any(each.startswith(word) for each in own))
        for word in asked
    )


def memory_named(name: str) -> float | None:
    """Return the GB of a card that is named by its memory alone ("16 GB", "24gb card"), else None."""
    match = _MEMORY.fullmatch(name.strip().lower())
    return float(match.group(1)) if match else None


@lru_cache(maxsize=512)
def gpus_like(name: str) -> tuple[str, ...]:
    """Return the ids of every card that a typed name could mean, the likest first."""
    from planner.machines.machine import gpu_catalogue

    plain = _NOISE.sub(" ", name.lower().replace("-", " ").replace("_", " "))
    asked = [word for word in _sized(words(plain)) if word not in ("with", "vram", "ram", "memory")]
    found = []
    for gpu in gpu_catalogue().values():
        spelled = " ".join((gpu.id, gpu.name, *gpu.aliases)).lower().replace("-", " ")
        own = {*_sized(words(_NOISE.sub(" ", spelled))), f"{gpu.marketed_gb:g}gb"}
        if asked and set(asked) <= own:
            beside = [word for word in _sized(words(gpu.id.replace("-", " "))) if word not in asked]
            found.append((gpu.kind == "mig", len(beside), len(gpu.id), gpu.id))
    return tuple(gpu_id for *_, gpu_id in sorted(found))


def _sized(found: list[str]) -> list[str]:
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


def task_named(name: str) -> str:
    """Return the task that a word means; raises UsageError with what is near."""
    from planner.run.recipe import Task

    return _word("task", name, [task.value for task in Task], TASK_WORDS)


def method_named(name: str) -> str:
    """Return the method that a word means; raises UsageError with what is near."""
    from planner.run.recipe import Method

    return _word("method", name, [method.value for method in Method], METHOD_WORDS)


def optimizer_named(name: str) -> str:
    """Return the optimizer that a word of any trainer means; raises UsageError with what is near."""
    from planner.run.recipe import Optimizer

    return _word("optimizer", name, [each.value for each in Optimizer], OPTIMIZER_WORDS)


def _word(field: str, name: str, known: list[str], others: dict[str, str]) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for each in known:
        if plain == re.sub(r"[^a-z0-9]", "", each):
            return each
    if plain in others:
        return others[plain]
    close = near(name, known, most=3)
    said = f"did you mean {', '.join(close)}? " if close else ""
    raise UsageError(
        f"{field}: {name[:40]!r} is not allowed", hint=f"{said}known: {', '.join(known)}"
    )
