"""logits: everything of vocabulary width while log-probabilities are made, by the framework's law."""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.quant.table import BITSANDBYTES
from planner.run.logits_law import LogitsLaw, width
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.adapters import trains_head
from planner.terms.counts import rest_width
from planner.terms.distillation import beside_student
from planner.terms.gradients import gradient_width, whole_width
from planner.terms.term import Term, plus
from planner.terms.weights import trained_width


class Logits(NamedTuple):
    """Largest in the forward of the loss, in its backward, and without gradients."""

    forward: Term
    backward: Term
    score: Term
    ending: Term
    """While the trained head's gradient is made: the logits' own gradient. Empty if frozen."""
    weight_grad: int
    """Bytes of the head's gradient if it is new, then."""
    held: Term
    """Between the loss' forward and its backward: what stands while another model runs."""


def scored_rows(r: Resolved, law: LogitsLaw) -> int:
    """Return how many rows of hidden states meet the vocabulary."""
    if law.rows == "completion":
        return r.sequences * r.completion_tokens
    return r.tokens


def kept_rows(model: ModelSpec, r: Resolved) -> Term:
    """Return what the head keeps of its rows until its backward."""
    law, act = r.law, logit_width(r)
    rows = scored_rows(r, law)
    kept = rows * model.hidden * sum(width(dtype, act) for _, dtype in law.hidden)
    return Term("logits", kept, "{0:,} rows: {1:,} B kept", (rows, kept), law.source)


def logits(model: ModelSpec, r: Resolved) -> Logits:
    """Return the loss head's bytes for one micro-batch."""
    found = _student(model, r)
    beside = beside_student(model, r, scored_rows(r, r.law), _tile(model, r))
    if not beside.bytes:
        return found
    return found._replace(
        forward=plus(found.forward, beside), backward=plus(found.backward, beside)
    )


def _tile(model: ModelSpec, r: Resolved) -> int:
    """Return the elements of one tile of logits."""
    if r.law.kind not in ("tiled", "chunked"):
        return 0
    rows = scored_rows(r, r.law)
    if r.law.kind == "tiled":
        tall, columns = tile_shape(model, r, r.law, rows)
        return tall * columns
    vocab = min(model.vocab, r.law.chunk_vocab or model.vocab)
    return chunk_rows(model, r, r.law, rows, logit_width(r)) * vocab


def _student(model: ModelSpec, r: Resolved) -> Logits:
    """Return the bytes of the trained model's own head."""
    law, act = r.law, logit_width(r)
    rows, none = scored_rows(r, law), Term("logits", 0)
    if not r.stage.last:  # another stage's; the gradient it sends is among the layers'
        return Logits(none, none, none, none, 0, none)
    if law.kind in ("score", "none"):
        return _without_vocabulary(model, r)
    made, held = _new_head_gradient(model, r), _held(model, r, rows, act)
    passing = _passing_head_gradient(model, r)
    if law.kind == "full":
        copies = law.entropy if r.entropy else ()
        extra, cap = _casts(model, r, rows, act), bool(model.softcap) and not law.caps_inside
        one = _chunk_beside(model, law, rows, act)
        return Logits(
            _full(rows, model.vocab, (*law.forward, *copies), act, law.source, extra, cap),
            _full(rows, model.vocab, (*law.backward, *copies), act, law.source, extra + one, cap),
            _full(rows, model.vocab, law.forward, act, law.source, extra, cap),
            _ending(model, r, rows, act, extra + passing) if made or passing else none,
            made,
            held,
        )
    if law.kind == "tiled":
        work = _tiled(model, r, law, rows, act)
        return Logits(work, work, _tiled(model, r, law, rows, act, scoring=True), none, made, held)
    term = _chunked(model, r, law, rows, act)
    return Logits(term, term, _scored_in_chunks(model, r, law, rows, act), none, 0, held)


def _scored_in_chunks(model: ModelSpec, r: Resolved, law: LogitsLaw, rows: int, act: int) -> Term:
    """Return a chunk at work without gradients: the rows where they are copied, a tile, a cast."""
    chunk = chunk_rows(model, r, law, rows, act)
    vocab = min(model.vocab, law.chunk_vocab or model.vocab)
    element = width(law.chunk[0][1], act) if law.chunk else 0
    copied = rows * model.hidden * act if law.drops_hidden else 0
    cast = 0 if head_width(r) == act else vocab * model.hidden * act
    return Term(
        "logits",
        copied + chunk * vocab * element + cast,
        "{0:,} rows: copies {1:,} B + a tile {2:,} x {3:,} x {4} B + cast {5:,} B",
        (rows, copied, chunk, vocab, element, cast),
        law.source,
    )


def _held(model: ModelSpec, r: Resolved, rows: int, act: int) -> Term:
    """Return what the head saves for its backward: tensors that both moments of its law have."""
    law = r.law
    if law.kind == "full":
        kept = {name.removeprefix("outputs."): width(dtype, act) for name, dtype in law.backward}
        sizes = [kept[name] for name, _ in law.forward if name in kept]
        count, what = rows * model.vocab, "vocabulary"
    else:
        sizes = [width(dtype, act) for _, dtype in law.hidden[:1]]
        count, what = rows * model.hidden, "hidden"
    return Term(
        "logits",
        count * sum(sizes),
        "saved for the backward: {0:,} rows x {1} x {2} B",
        (rows, what, sum(sizes)),
        law.source,
    )


def _without_vocabulary(model: ModelSpec, r: Resolved) -> Logits:
    """Return a head of one number a token, or none: the gradient of the hidden states is the largest.

    The number of every token is made, the last one's picked; picking's backward writes all of them.
    """
    act, none = element_bytes(r.compute_dtype), Term("logits", 0)
    # of several texts, the last one's gradient is made first, each in its own backward
    rows = max((rows * tokens for rows, tokens in r.columns), default=r.tokens)
    scores = r.law.kind == "score"
    numbers = rows * act if scores else 0
    cast = rows * model.hidden * act if scores and r.autocast and _stream(r) != act else 0
    made = Term(
        "logits",
        numbers + cast,
        "{0:,} tokens: a number each {1:,} B + the head's input cast {2:,} B",
        (rows, numbers, cast),
        r.law.source,
    )
    if scores and r.switches.logits_beside_scores:
        vocab = model.vocab
        made = plus(
            made,
            Term(
                "logits",
                rows * vocab * (act + 4),
                "{0:,} tokens x vocabulary {1:,} x ({2} B + their fp32 copy)",
                (rows, vocab, act),
                "trl models/modeling_value_head.py: lm_logits.float(), returned beside the values",
            ),
        )
    wide = _stream(r) if cast or not scores else act
    whole = rows * model.hidden * wide
    back = Term(
        "logits",
        2 * numbers + cast + whole,
        "{0:,} tokens x (hidden {1:,} x {2} B of gradient) + numbers {3:,} B + cast {4:,} B",
        (rows, model.hidden, wide, 2 * numbers, cast),
        r.law.source,
    )
    held = made if not r.switches.logits_beside_scores else none
    return Logits(made, back, made, none, 0, held)


def _stream(r: Resolved) -> int:
    """Return bytes of an element of the hidden states."""
    return trained_width(r) if r.method is Method.FULL else element_bytes(r.dtype)


def _new_head_gradient(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the head's gradient when a micro-batch makes it anew and whole."""
    if not trains_head(model, r) or r.switches.gradient_buffers:
        return 0
    # FSDP2 reduces it at the end of the backward, in every micro-batch
    waits = r.placement.flat_buffers
    if not waits and (r.grad_accum > 1 or r.placement.reduces):
        return 0
    # a head that runs chunk by chunk: a chunk's gradient, and the sum it is added to
    copies = 2 if r.law.chunk_count > 1 else 1
    each = whole_width(r) if waits and r.method is Method.FULL else head_gradient_width(r)
    # transformers' tp_plan divides the head's rows and gathers its logits, `model.vocab` wide
    ranks = r.layout.tensor if r.switches.tensor_plan == "transformers" else 1
    return copies * -(-model.vocab // ranks) * model.hidden * each


def _passing_head_gradient(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the head's gradient before it is added to a buffer; 0 where the product adds it."""
    switches = r.switches
    if not switches.gradient_buffers or switches.fused_weight_gradients:
        return 0
    return model.vocab * model.hidden * head_width(r) if trains_head(model, r) else 0


def head_gradient_width(r: Resolved) -> int:
    """Return bytes of an element of a trained head's gradient."""
    return gradient_width(r) if r.method is Method.FULL else rest_width(r)


def _chunk_beside(model: ModelSpec, law: LogitsLaw, rows: int, act: int) -> int:
    """Return the tensors of the one chunk whose loss runs backward, all chunks' logits being there."""
    if law.chunk_count < 2:
        return 0
    each = sum(width(dtype, act) for _, dtype in law.chunk)
    return -(-rows // law.chunk_count) * model.vocab * each


def _ending(model: ModelSpec, r: Resolved, rows: int, act: int, extra: int) -> Term:
    """Return the logits' gradient, that of the head's input and, under autocast, casts of both."""
    cast = model.vocab * model.hidden * act if head_width(r) != act else 0
    return Term(
        "logits",
        rows * (model.vocab + model.hidden) * act + extra + cast,
        "{0:,} rows x ({1:,} vocabulary + hidden {2:,}) x {3} B + casts {4:,} B",
        (rows, model.vocab, model.hidden, act, extra + cast),
        "autograd of the head's linear",
    )


def head_width(r: Resolved) -> int:
    """Return bytes of an element of the head's weight."""
    if r.quantization:
        return 4 if r.switches.kbit_upcast == "all" else element_bytes(r.dtype)
    if r.placement.gathers and r.autocast:  # gathered in the compute dtype
        return element_bytes(r.autocast)
    return trained_width(r) if r.method is Method.FULL else element_bytes(r.dtype)


def logit_width(r: Resolved) -> int:
    """Return bytes of an element of the logits as the head makes them.

    k-bit preparation leaves the head in fp32, and without autocast what it makes too.
    """
    prepared = r.quantization in BITSANDBYTES and r.switches.kbit_upcast == "all"
    return 4 if prepared and not r.autocast else element_bytes(r.compute_dtype)


def held_outputs(model: ModelSpec, r: Resolved) -> Term:
    """Return the logits that a training loop holds until its next forward has made new ones."""
    if not r.trains or not r.switches.keeps_outputs or r.law.kind != "full":
        return Term("logits", 0)
    rows = scored_rows(r, r.law)
    width = 4 if r.autocast and r.switches.fp32_outputs else logit_width(r)
    return Term(
        "logits",
        rows * model.vocab * width,
        "outputs.logits held by the loop: {0:,} rows x {1:,} vocabulary x {2} B",
        (rows, model.vocab, width),
        "a variable of the loop: outputs = model(...) lives until it is bound again",
    )


def _casts(model: ModelSpec, r: Resolved, rows: int, act: int) -> int:
    """Return copies beside the logits: a head's weight and, trained, its input under autocast."""
    if r.quantization and r.switches.quantized_head:
        return 4 * model.vocab * model.hidden  # dequantised to fp32, as bitsandbytes made it from
    if not r.autocast or head_width(r) == act:
        return 0
    trained = trains_head(model, r)
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
    if law.whole_rows:
        return rows if rows <= law.whole_rows else 1
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
    trained = trains_head(model, r)
    cast = 0 if head_width(r) == act else vocab * model.hidden * act
    copies = sum(width(dtype, head_width(r)) for _, dtype in law.head_copy)
    cast += vocab * model.hidden * copies
    tile = chunk * vocab * element + cast
    head = ended = 0
    if trained:
        gradient = 0 if r.grad_accum > 1 else head_gradient_width(r)
        per_weight = sum(width(dtype, act) for _, dtype in law.head_grad)
        # made in fp32 and cast at the end, or straight in the gradient
        head = model.vocab * model.hidden * (per_weight or gradient)
        if per_weight and head_gradient_width(r) != per_weight:
            ended = model.vocab * model.hidden * head_gradient_width(r)
        ended += rows * model.hidden * act
    elif law.holds_tile:
        ended = rows * model.hidden * act
    last = tile + ended if law.holds_tile else max(tile, ended)
    return Term(
        "logits",
        kept + head + last,
        "{0:,} rows: {1:,} B kept + head {2:,} B + "
        + ("" if law.holds_tile else "the larger of ")
        + "a tile {3:,} x {4:,} x {5} B (+ cast {6:,} B) and the last casts {7:,} B",
        (rows, kept, head, chunk, vocab, element, cast, ended),
        law.source,
    )


COLUMN_STEP = 64
"""Columns of a tile are a multiple of this."""
TILE_ELEMENT = 6
"""Bytes the tile budget counts per element: fp32 logits and their 16-bit copy."""


def tile_shape(model: ModelSpec, r: Resolved, law: LogitsLaw, rows: int) -> tuple[int, int]:
    """Return rows and columns of one tile."""
    share = 2 * model.vocab * model.hidden // law.head_share
    allowed = min(law.max_chunk_bytes, max(law.min_chunk_bytes, share))
    whole_rows = r.loss_chunk_rows or max(1, allowed // (TILE_ELEMENT * model.vocab))
    return cut(rows, model.vocab, whole_rows, law.tile_rows)


def cut(rows: int, vocab: int, whole_rows: int, tile_rows: int) -> tuple[int, int]:
    """Return rows and columns of a tile that holds no more than `whole_rows` rows of the vocabulary."""
    tall = max(1, min(rows, tile_rows))
    columns = max(1, min(vocab, whole_rows * vocab // tall))
    return tall, columns - columns % COLUMN_STEP if columns > COLUMN_STEP else columns


def _tiled(
    model: ModelSpec, r: Resolved, law: LogitsLaw, rows: int, act: int, *, scoring: bool = False
) -> Term:
    """Return rows kept in full, a tile at work and its fp32 accumulators [tile rows, hidden]."""
    tall, columns = tile_shape(model, r, law, rows)
    operand = 4 if r.cpu else act  # a CPU's products are of fp32 copies
    narrow = operand if operand < 4 else 0  # the matrix product's copy of the fp32 tile
    cast = 0 if head_width(r) == operand else columns * model.hidden * operand
    one = tall * model.hidden  # elements of an accumulator
    tile = tall * columns * (4 + narrow + (4 if model.softcap else 0))
    kept = rows * model.hidden * sum(width(dtype, act) for _, dtype in law.hidden)
    if scoring:
        kept, tile = rows * model.hidden * act, tall * columns * 4
        work = tile + cast
    elif trains_head(model, r):
        # kept: the rows and their gradient. A tile; or, it being gone, a product beside its sum
        product = 4 * max(one, columns * model.hidden)
        copied = operand if operand != act else 0
        # beside the sum the rows times their gradient, which the weight's product takes
        work = (
            one * (copied + operand + 4)
            + cast
            + max(tile, tall * columns * (narrow or 4) + product)
        )
    else:
        # sum and product; at the end the target's rows of W, as they are and in fp32
        work = max(tile + cast + 8 * one, one * (8 + head_width(r)))
        if rows > tall:
            work += 4 * one  # the last block's U until this one's is there
    return Term(
        "logits",
        kept + work,
        "{0:,} rows: {1:,} B kept + a tile of {2:,} x {3:,}: {4:,} B, with its fp32 sums of "
        "{2:,} x hidden {5:,} B",
        (rows, kept, tall, columns, tile, work),
        law.source,
    )
