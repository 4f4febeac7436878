"""logits: everything of vocabulary width while log-probabilities are made, by the framework's law."""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.framework import LogitsLaw, width
from planner.model import ModelSpec
from planner.recipe import Method
from planner.resolve import Resolved
from planner.terms.gradients import gradient_width
from planner.terms.term import Term
from planner.terms.weights import trained_width


class Logits(NamedTuple):
    """Largest in the forward of the loss, in its backward, and without gradients."""

    forward: Term
    backward: Term
    score: Term


def scored_rows(r: Resolved, law: LogitsLaw) -> int:
    """Return how many rows of hidden states meet the vocabulary."""
    if law.rows == "completion":
        return r.sequences * r.completion_tokens
    return r.tokens


def logits(model: ModelSpec, r: Resolved) -> Logits:
    """Return the loss head's bytes for one micro-batch."""
    law, act = r.law, element_bytes(r.compute_dtype)
    rows = scored_rows(r, law)
    if law.kind == "full":
        extra, cap = _casts(model, r, rows, act), bool(model.softcap)
        return Logits(
            _full(rows, model.vocab, law.forward, act, law.source, extra, cap),
            _full(rows, model.vocab, law.backward, act, law.source, extra, cap),
            _full(rows, model.vocab, law.forward, act, law.source, extra, cap),
        )
    term = _chunked(model, r, law, rows, act)
    return Logits(term, term, term)


def head_width(r: Resolved) -> int:
    """Return bytes of an element of the head's weight."""
    if r.quantization:
        return 4 if r.switch("kbit_upcast") is True else element_bytes(r.dtype)
    return trained_width(r) if r.method is Method.FULL else element_bytes(r.dtype)


def _casts(model: ModelSpec, r: Resolved, rows: int, act: int) -> int:
    """Return copies beside the logits: a head's weight and, trained, its input under autocast."""
    if r.quantization and r.switch("quantized_head"):
        return 4 * model.vocab * model.hidden  # dequantised to fp32, as bitsandbytes made it from
    if not r.autocast or head_width(r) == act:
        return 0
    trained = r.method is Method.FULL and r.trains
    return act * model.hidden * (model.vocab + (rows if trained else 0))


def _full(
    rows: int,
    vocab: int,
    tensors: tuple[tuple[str, str], ...],
    act: int,
    source: str,
    extra: int,
    softcap: bool,
) -> Term:
    sizes = [(name, width(dtype, act)) for name, dtype in tensors]
    if softcap:
        sizes.append(("tanh of the soft-cap", act))
    per_element = sum(size for _, size in sizes)
    return Term(
        "logits",
        rows * vocab * per_element + extra,
        "{0:,} rows x {1:,} vocabulary x {2} B ({3})"
        + (" + copies for the head {4:,} B" if extra else ""),
        (rows, vocab, per_element, _Names(tuple(sizes)), extra),
        source,
    )


class _Names(tuple[tuple[str, int], ...]):
    """Pairs of tensor and bytes, put into words only when printed."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return ", ".join(f"{name} {size}" for name, size in self if size)


def chunk_rows(model: ModelSpec, r: Resolved, law: LogitsLaw, rows: int, act: int) -> int:
    """Return the rows of one chunk."""
    if r.loss_chunk_rows:
        return min(rows, r.loss_chunk_rows)
    if law.chunk_rows:
        return min(rows, law.chunk_rows)
    if law.chunk_ratio:
        part = -(-rows // -(-model.vocab // model.hidden))
        return min(rows, 1 << max(0, part - 1).bit_length())
    if law.chunk_count:
        return -(-rows // law.chunk_count)
    element = sum(width(dtype, act) for _, dtype in law.chunk)
    return min(rows, max(1, law.max_chunk_bytes // (element * model.vocab)))


def _chunked(model: ModelSpec, r: Resolved, law: LogitsLaw, rows: int, act: int) -> Term:
    """Return the larger of two moments: a tile at work, or the gradients being cast at the end."""
    chunk = chunk_rows(model, r, law, rows, act)
    vocab = min(model.vocab, law.chunk_vocab or model.vocab)
    element = sum(width(dtype, act) for _, dtype in law.chunk)
    kept = rows * model.hidden * sum(width(dtype, act) for _, dtype in law.hidden)
    trained = r.method is Method.FULL and r.trains
    cast = 0 if head_width(r) == act else vocab * model.hidden * act
    tile = chunk * vocab * element + cast
    head = ended = 0
    if trained:
        gradient = 0 if r.grad_accum > 1 else gradient_width(r)
        per_weight = sum(width(dtype, act) for _, dtype in law.head_grad)
        # made in fp32 and cast at the end, or straight in the gradient
        head = model.vocab * model.hidden * (per_weight or gradient)
        if per_weight and gradient_width(r) != per_weight:
            ended = model.vocab * model.hidden * gradient_width(r)
        ended += rows * model.hidden * act
    return Term(
        "logits",
        kept + head + max(tile, ended),
        "{0:,} rows: {1:,} B kept + head {2:,} B + the larger of a tile {3:,} x {4:,} x {5} B (+ cast "
        "{6:,} B) and the last casts {7:,} B",
        (rows, kept, head, chunk, vocab, element, cast, ended),
        law.source,
    )
