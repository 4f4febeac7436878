"""Names as people write them -> catalogue models: suffixes, re-uploads, fine-tunes of known shapes."""

import json
import re
from functools import lru_cache
from typing import Any

from planner.datafiles import data_dir
from planner.errors import VramwiseError
from planner.families import model_spec_from_config
from planner.models.catalogue import catalogue_names, load_catalogue
from planner.models.hub import find_model
from planner.models.spec import ModelSpec

_QUANTIZED = (
    (re.compile(r"bnb-4bit|[-_]4bit\b|nf4", re.IGNORECASE), "nf4"),
    (re.compile(r"gptq.*(?:int8|8bit)", re.IGNORECASE), "gptq-8bit"),
    (re.compile(r"gptq", re.IGNORECASE), "gptq-4bit"),
    (re.compile(r"awq", re.IGNORECASE), "awq-4bit"),
    (re.compile(r"w4a16|int4", re.IGNORECASE), "gptq-4bit"),
    (re.compile(r"w8a8|w8a16|int8", re.IGNORECASE), "int8"),
    (re.compile(r"fp8", re.IGNORECASE), "fp8"),
    (re.compile(r"nvfp4", re.IGNORECASE), "nvfp4"),
    (re.compile(r"mxfp4", re.IGNORECASE), "mxfp4"),
)
_SUFFIXES = re.compile(
    r"[-_](?:unsloth|bnb|4bit|8bit|16bit|instruct|chat|it|base|hf|sft|dpo|qlora|lora|full|pt|preview|gguf|awq|gptq|int4|int8|fp8"
    r"|nvfp4|fp4|mxfp4|bf16|qat|w4a16|w8a16|w8a8|quantized[.]w\d+a\d+|quantized|fp8_dynamic|block|g\d+|fp16|dynamic|reasoning|thinking|25\d\d|24\d\d|rope|\d+k|marlin|scale|uncensored|text|think|terminus)(?=[-_]|$)",
    re.IGNORECASE,
)
_OWNERS = re.compile(r"^(?:meta|unsloth|nvidia)[-_]", re.IGNORECASE)


def quantization_in_name(name: str) -> str | None:
    """Return the recipe's quantization that a repository name announces, or None."""
    leaf = name.rstrip("/").rsplit("/", 1)[-1]
    for pattern, quantization in _QUANTIZED:
        if pattern.search(leaf):
            return quantization
    return None


@lru_cache(maxsize=1)
def derivatives() -> dict[str, str]:
    """Return folded name -> catalogue hub id for fine-tunes and re-uploads of known shapes."""
    table = json.loads((data_dir() / "importers" / "derivatives.json").read_text(encoding="utf-8"))
    return {fold(row["name"]): row["same_shapes_as"] for row in table["rows"]}


def fold(name: str) -> str:
    """Return a name without owner, separators and the words that do not change shapes."""
    leaf = re.sub(r"\s+", "-", name.strip().rstrip("/").rsplit("/", 1)[-1])
    leaf = re.sub("1half", "1.5", _OWNERS.sub("", leaf))  # ms-swift 2 calls Qwen1.5 so
    previous = None
    while previous != leaf:
        previous, leaf = leaf, _SUFFIXES.sub("", leaf, count=1)
    return re.sub(r"[^a-z0-9.]", "", leaf.lower())


@lru_cache(maxsize=1)
def _folded() -> dict[str, str]:
    index: dict[str, str] = {}
    for name in reversed(catalogue_names()):
        entry = load_catalogue()[name]
        for spelling in (*entry.get("aliases", ()), entry["hub_id"], name):
            index[fold(spelling)] = entry["hub_id"]
    return index


@lru_cache(maxsize=512)
def resolve_name(name: str) -> str | None:
    """Return the catalogue hub id whose shapes `name` has, or None. Nothing is fetched."""
    folded = fold(name)
    if not folded:
        return None
    index = _folded()
    if found := index.get(folded) or derivatives().get(folded):
        return found
    if "." in folded and folded.replace(".", "") in (
        table := {k.replace(".", ""): v for k, v in index.items()}
    ):
        return table[folded.replace(".", "")]
    if len(folded) >= 6 and re.search(r"\d+(?:\.\d+)?[bm]", folded):
        for known, hub_id in sorted(index.items()):
            # a version left out: Mistral-7B for Mistral-7B-v0.1
            if known.startswith(folded) and re.fullmatch(r"v[\d.]+", known[len(folded) :]):
                return hub_id
    return None


@lru_cache(maxsize=1)
def _configs() -> dict[str, dict[str, Any]]:
    """Return folded name -> config of models that importers meet and the catalogue lacks."""
    table = json.loads((data_dir() / "importers" / "derivatives.json").read_text(encoding="utf-8"))
    return {fold(row["name"]): row for row in table["configs"]}


@lru_cache(maxsize=512)
def resolve_model(name: str) -> ModelSpec | None:
    """Return the model of a name as people write it, from disk or the catalogue, or None."""
    for spelling in (name, resolve_name(name)):
        if spelling:
            try:
                return find_model(spelling, offline=True)
            except (VramwiseError, OSError, ValueError, RuntimeError):
                continue
    if row := _configs().get(fold(name)):
        return model_spec_from_config(row["config"], name=row["name"], source=row["source"])
    return None
