"""What one implementation of the loss keeps of the logits; data/frameworks/*.json states them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from planner.run.recipe import Section

Width = Literal["act", "upcast", "fp32", "bf16", "fp16", "int64", "bool", "half-act", "half-fp32"]


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else value


Tensors = Annotated[tuple[tuple[str, Width], ...], BeforeValidator(_pairs)]
"""(tensor, dtype) in the order of the file, where they are one mapping."""


class LogitsLaw(Section):
    """What one implementation of the loss keeps per (token x vocabulary) element, or its tiles."""

    kind: Literal["full", "chunked", "tiled", "score", "none"]
    """full, chunked (whole rows of the vocabulary) or tiled (rows by columns, never a whole row);
    score: one number a token; none: no head at all."""
    forward: Tensors = ()
    """(tensor, dtype) alive when the forward of the loss is at its largest; see `width`."""
    backward: Tensors = ()
    entropy: Tensors = (
        ("entropy's fp32 logits", "fp32"),
        ("log-probabilities", "fp32"),
        ("probabilities", "fp32"),
        ("their product", "fp32"),
    )
    """(tensor, dtype) beside the loss's own where the recipe takes an entropy of full logits: log_softmax
    in fp32, exp and their product; in the backward the product's place is its gradient's."""
    order: tuple[str, ...] = ()
    """Every allocation of the loss in order, for the allocator's replay: "name: dtype", "-name" for a
    free, "a > b: dtype" for a copy that replaces a, "|" where the backward starts. `shifted` after
    the dtype: a row less for each sequence. Two more words: `downcast`, back to 16 bits, and
    `outputs`, accelerate's fp32 copy under autocast; both nothing where there is nothing to cast."""
    rows: Literal["all", "completion"] = "all"
    """all tokens of the micro-batch, or completion tokens only."""
    chunk_rows: int = 0
    chunk_count: int = 0
    """Instead of chunk_rows: the rows are cut into this many chunks. With kind full: the logits of all
    chunks are there, and the loss and the head run backward chunk by chunk."""
    chunk_ratio: bool = False
    """Rows are the next power of two of N / ceil(V / H), so that a chunk is as large as hidden."""
    chunk_vocab: int = 0
    """0 = the whole vocabulary."""
    chunk: Tensors = ()
    """(tensor, dtype) per element of a chunk; with kind full beside all logits, in the backward."""
    hidden: Tensors = ()
    """(tensor, dtype) of [rows, H] kept until the loss is done."""
    head_grad: Tensors = ()
    """(tensor, dtype) of [V, H] beside the gradient itself when the head is trained."""
    head_copy: Tensors = ()
    """(tensor, dtype) of [V, H] copied from the head's weight for a chunk, trained or not."""
    drops_hidden: bool = False
    """The rows are copied, so the norm's output is free again before the head runs."""
    holds_tile: bool = False
    """The tile's buffer is a variable of the backward: it lives while the gradients are cast at its end."""
    max_chunk_bytes: int = 0
    """Chunk rows are chosen so that one chunk stays below this."""
    whole_rows: int = 0
    """Up to this many rows the logits are made whole, above it none (a head that works in registers)."""
    caps_inside: bool = False
    """Soft-cap and scale of the logits are computed inside the loss's kernel: no tensor more."""
    free_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Instead: the rows are cut into as many chunks as keep one's fp32 logits within this share of what
    is free on the card when the loss first runs (and within max_chunk_bytes), four at a time."""
    min_chunk_bytes: int = 0
    head_share: int = 0
    """tiled: a tile may take the head's 16-bit weight over this, between min and max_chunk_bytes."""
    tile_rows: int = 0
    """tiled: rows of one tile at most; its columns are what the budget leaves."""
    source: str = ""


def width(dtype: str, act_bytes: int) -> int:
    """Return bytes per element of a law's dtype word.

    act: the compute dtype. fp32, bf16: what they say. upcast: an fp32 copy, nothing when the
    values are fp32 already. half-act, half-fp32: of half of the rows, the chosen ones of pairs.
    """
    if dtype == "half-act":
        return act_bytes // 2
    if dtype == "act":
        return act_bytes
    if dtype == "upcast":
        return 4 if act_bytes < 4 else 0
    return {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "bool": 1, "half-fp32": 2}[dtype]
