"""A quantised checkpoint's folder: sharded safetensors, config, tokenizer; written aside and looked at again."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from planner.errors import VramwiseError
from trainer.quantize.choice import KEPT, Choice
from trainer.quantize.formats import Format
from trainer.quantize.harm import Candidate, Linear, Measurement, digest
from trainer.quantize.streamed import INDEX_FILE, Files, Streamed

SHARD_BYTES = 5 * 10**9
FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""What is written in the readers' dtype; integers stay what they are."""
COPIED = (".json", ".jinja", ".model", ".txt")
"""Of a checkpoint's other files: tokenizer, chat template, generation settings, licence."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What becomes of one tensor of the source: stored as it is, or as a candidate."""

    name: str
    linear: Linear | None
    candidate: Candidate | None
    bytes: int


def fixed_bytes(model: Streamed, linears: list[Linear], width: int) -> int:
    """Return the bytes of everything that is never quantised, floats in `width` bytes each."""
    own = {f"{linear.name}.weight" for linear in linears}
    return sum(_bytes(model.files, name, width) for name in _names(model) if name not in own)


def write(
    measured: Measurement,
    linears: list[Linear],
    choice: Choice,
    form: Format,
    folder: Path,
) -> int:
    """Write the checkpoint to the new `folder` and return the bytes of its tensors.

    config.json comes last: without it nothing loads. Raises VramwiseError where what is read back is not
    what was chosen, bit for bit.
    """
    model, dtype = measured.model, measured.dtype
    folder.mkdir(parents=True)
    shards = _shards(list(_pieces(model, linears, choice, form, dtype.itemsize)))
    where: dict[str, str] = {}
    total = 0
    for number, pieces in enumerate(shards, 1):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        tensors: dict[str, Tensor] = {}
        for piece in pieces:
            tensors |= _tensors(measured, piece, dtype)
        total += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, {"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / INDEX_FILE, index)
    check(folder, measured, linears, choice, form)
    _copy_others(model.files.folder, folder)
    _write_json(folder / "config.json", config(model, choice, form, dtype))
    return total


def check(
    folder: Path, measured: Measurement, linears: list[Linear], choice: Choice, form: Format
) -> None:
    """Raise VramwiseError for a weight in `folder` that readers would make something else of."""
    files, source, dtype = Files(folder), measured.model.files, measured.dtype
    by_name = {f"{linear.name}.weight": linear for linear in linears}
    for name in _names(measured.model):
        linear = by_name.get(name)
        block = KEPT if linear is None else choice.blocks[linear.name]
        if linear is None or block == KEPT:
            right = torch.equal(files[name], _cast(source[name], dtype))
        else:
            stored = stored_tensors(files, linear.name)
            own = candidate_of(linear, form, block)
            right = digest(form.read_back(stored, dtype)) == own.digest
        if not right:
            raise VramwiseError(f"{folder.name}: {name} does not read back as it was chosen")


def stored_tensors(files: Files, linear: str) -> dict[str, Tensor]:
    """Return the tensors of one linear's weight in a written checkpoint, by the end of their names."""
    prefix = f"{linear}."
    return {
        name.removeprefix(prefix): files[name]
        for name in files
        if name.startswith((f"{prefix}weight.", f"{prefix}weight_")) or name == f"{prefix}weight"
    }


def candidate_of(linear: Linear, form: Format, block: int) -> Candidate:
    """Return a linear's candidate of one format and block."""
    return next(
        each for each in linear.candidates if each.format == form.name and each.block == block
    )


def config(model: Streamed, choice: Choice, form: Format, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json: the source's, with how the weights are stored."""
    own = json.loads((model.files.folder / "config.json").read_text(encoding="utf-8"))
    own.pop("torch_dtype", None)
    blocks = {name: block for name, block in choice.blocks.items() if block != KEPT}
    return {
        **own,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": form.config(blocks, [*choice.kept(), model.head], dtype),
    }


def _names(model: Streamed) -> Iterator[str]:
    """Yield the tensors of the source; a tied head that is stored beside the embedding is left out."""
    tied = getattr(model.model, "all_tied_weights_keys", {})
    return (name for name in model.files if name not in tied)


def _pieces(
    model: Streamed, linears: list[Linear], choice: Choice, form: Format, width: int
) -> Iterator[Piece]:
    by_name = {f"{linear.name}.weight": linear for linear in linears}
    for name in _names(model):
        linear = by_name.get(name)
        block = KEPT if linear is None else choice.blocks[linear.name]
        if linear is None or block == KEPT:
            yield Piece(name, None, None, _bytes(model.files, name, width))
        else:
            candidate = candidate_of(linear, form, block)
            yield Piece(name, linear, candidate, candidate.bytes)


def _bytes(files: Files, name: str, width: int) -> int:
    kind = files.dtype(name)
    if kind in FLOATS:
        return prod(files.shape(name)) * width
    return files[name].nbytes


def _tensors(measured: Measurement, piece: Piece, dtype: torch.dtype) -> dict[str, Tensor]:
    if piece.linear is None or piece.candidate is None:
        return {piece.name: _cast(measured.model.files[piece.name], dtype)}
    stored = measured.stored(piece.linear.name, piece.candidate)
    return {f"{piece.linear.name}.{end}": tensor for end, tensor in stored.items()}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _shards(pieces: list[Piece]) -> list[list[Piece]]:
    """Return the pieces in files of at most SHARD_BYTES, in their order."""
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if shards[-1] and size + piece.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.bytes
    return shards


def _copy_others(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        weights = path.name == INDEX_FILE or path.name == "config.json"
        if path.is_file() and path.suffix in COPIED and not weights:
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
