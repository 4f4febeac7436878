"""Attention on a tape: fused kernels, SDPA's math kernel, and transformers' eager attention on CUDA."""

from typing import TYPE_CHECKING, NamedTuple

from planner.layer.tape import Op, Value

if TYPE_CHECKING:
    from planner.layer.program import Program

FUSED_SCORE_BYTES = 4
"""fp32: what softmax computes in, and its backward's product of gradient and result."""


class Shape(NamedTuple):
    """What attention is asked for."""

    heads: int
    v_dim: int
    width: int
    """Bytes of an element inside the kernel."""
    query_width: int = 0
    """Bytes of a query's element when autocast has not cast it yet; 0: `width`."""
    window: int = 0


def attend(p: "Program", q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Record attention; q, k and v are dropped."""
    s, tape = p.s, p.tape
    heads, width = shape.heads, shape.width
    out_size = heads * shape.v_dim * width
    if s.attention == "eager":
        return _eager(p, q, k, v, shape)
    masked = s.attention == "sdpa" and (s.masked or 0 < shape.window <= s.seq)
    if masked and s.undeclared_groups:
        masked = False
    if (s.repeat_kv or masked) and k.size != q.size:
        k = p.cast(k, q.size)
        v = p.cast(v, out_size)
    grouped = s.attention == "sdpa" and k.size != q.size
    # on a CPU: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, use_flash_attention_cpp
    if grouped and (s.undeclared_groups or (width == 4 and not s.cpu)):
        return _math(p, q, k, v, heads, out_size, width)
    if (
        s.context_kind == "ulysses"
    ):  # from a part of the tokens of all heads to all tokens of a part
        q, k, v = (p.cast(part, part.size) for part in (q, k, v))
    lse = tape.statistics(heads * 4)
    saves = [q, k, v, lse]
    if masked and not (s.masked and s.additive_mask):
        # a boolean mask becomes an additive one in every layer, which is saved: zeros, its inverse
        bias = tape.op((), s.seq * width, forward_scratch=s.seq)
        saves.append(bias)
    elif masked and s.padded_bias:  # rows that are not aligned are copied (attention.cpp: pad_bias)
        saves.append(tape.op((), s.padded_bias * width))
    ring = ring_blocks(p, q, k, v, width)
    # the backward kernel accumulates dq in fp32
    out = tape.op(
        (q, k, v),
        out_size,
        saves=tuple(saves),
        saves_out=True,
        forward_scratch=ring.forward,
        scratch=(0 if s.cpu and s.attention == "sdpa" else q.size * 4 / width) + ring.backward,
        kind=Op.ATTENTION,
    )
    tape.drop(*saves)
    return p.cast(out, out_size) if s.context_kind == "ulysses" else out


class Ring(NamedTuple):
    """What other ranks' keys and values take while they go round, in bytes per token of one rank."""

    forward: float
    backward: float


def ring_blocks(p: "Program", q: Value, k: Value, v: Value, width: int) -> Ring:
    """Return the blocks of keys and values in flight where ranks share a sequence.

    p2p (Transformer Engine, context_parallel.py): two at a time, with their gradients in the backward.
    gathered (torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py: allgather is the
    default): all of the group's beside the own ones' copy; the running sum, a block's result and their
    difference in fp32; in the backward fp32 gradients, those of keys and values once more on their way.
    """
    s, own = p.s, k.size + v.size
    if s.context_kind == "ring":
        return Ring(2 * own, 4 * own)
    if s.context_kind != "gathered":
        return Ring(0, 0)
    whole, wide = (s.context + 1) * own, 4 / width
    return Ring(whole + 3 * q.size * wide, whole + 3 * own * wide)


def _math(
    p: "Program", q: Value, k: Value, v: Value, heads: int, out_size: float, width: int
) -> Value:
    """Record SDPA's math kernel: fp32 scores in full; no fused kernel takes grouped fp32 keys.

    aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
    """
    tape, declared = p.tape, not p.s.undeclared_groups
    row, full, wide = heads * p.s.seq * 4, q.size * 4 / width, 4 / width
    held = [q, k, v]
    if width != 4:
        q, k, v = (tape.op((part,), part.size * wide) for part in (q, k, v))
        held += [q, k, v]
    scaled = tape.op((q,), full)
    mask = tape.value(0, 4 * p.s.seq**2, needs_grad=False)
    held += [scaled, mask]
    if declared:
        k = tape.op((k,), full)
        v = tape.op((v,), out_size * wide)
        held += [k, v]
    key = tape.op((k,), k.size)
    query = tape.op((scaled,), full)  # heads are not in front in memory: matmul copies
    if not declared:
        key = p.cast(key, full)
    scores = tape.op((query, key), row, saves=(query, key), kind=Op.KERNEL)
    tape.drop(query, key)
    # the safe softmax: scores, softmax, a boolean mask and the result; backward: a product
    soft = tape.op((scores,), row, saves_out=True, forward_scratch=row * 5 / 4, scratch=row)
    tape.drop(scores)
    narrow = tape.value(row / wide if width != 4 else 0, needs_grad=False)
    if not declared:
        v = tape.op((v,), out_size * wide)
        held.append(v)
    out = tape.op((soft, v), out_size * wide, saves=(soft, v), kind=Op.KERNEL)
    if width != 4:
        out = p.cast(out, out_size)
    tape.drop(soft, narrow, *held)
    return p.cast(out, out_size)


def _eager(p: "Program", q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Record transformers' eager_attention_forward: scores of [heads, T, T] in full.

    Its softmax is asked for fp32: CUDA reads fp16 scores as they are (aten/native/SoftMax.cpp,
    half_to_float), bf16 ones are copied first. The backward of softmax on CUDA makes
    gradient * output beside its result (aten/native/cuda/SoftMax.cu, softmax_backward_cuda_out).
    The probabilities are returned, and the layer holds them until it is done.
    """
    s, tape = p.s, p.tape
    heads, width = shape.heads, shape.width
    query_width = shape.query_width or width
    row = heads * s.seq
    held = [q, k, v]
    groups = round(q.size / k.size)
    if groups > 1:  # repeat_kv: a copy with heads in front
        k, v = tape.op((k,), q.size), tape.op((v,), v.size * groups)
        held += [k, v]
    query = _operand(p, q, q.size * width / query_width, apart=s.batched)
    key = _operand(p, k, k.size * width / query_width, apart=s.batched and groups == 1)
    scores = tape.op((query, key), row * width, saves=(query, key), kind=Op.KERNEL)
    tape.drop(query, key)
    raw = _capped(p, p.cast(scores, row * width), row * width)
    # scores + mask, which is as wide as the stream
    wide = max(width, s.residual)
    masked = tape.op((raw,), row * wide) if wide != width else _copied(p, raw)
    tape.drop(raw)
    if s.sinks:
        narrow = _with_sinks(p, masked, row * wide)
    else:
        narrow = _softmax(p, masked, row, wide, query_width)
    weights = _operand(p, narrow, row * width, apart=False)
    out_size = heads * shape.v_dim * width
    value = _operand(p, v, out_size, apart=s.batched and groups == 1)
    out = tape.op((weights, value), out_size, saves=(weights, value), kind=Op.KERNEL)
    tape.drop(weights, value)
    context = tape.op((out,), out_size) if s.batched else _copied(p, out)
    p.until_layer_ends(narrow)
    tape.drop(out, *held)
    return context


def _softmax(p: "Program", masked: Value, row: int, wide: int, query_width: int) -> Value:
    """Record softmax in fp32 and its cast to the query's dtype; `masked` is dropped after both."""
    tape, size = p.tape, row * FUSED_SCORE_BYTES
    if wide == FUSED_SCORE_BYTES or p.s.reads_half:
        soft = tape.op((masked,), size, saves_out=True, scratch=size)
    else:
        copy = tape.op((masked,), size)
        soft = tape.op((copy,), size, saves_out=True, scratch=size)
        tape.drop(copy)
    narrow = soft
    if query_width != FUSED_SCORE_BYTES:
        narrow = tape.op((soft,), row * query_width)
        tape.drop(soft)
    tape.drop(masked)
    return narrow


def _with_sinks(p: "Program", masked: Value, size: float) -> Value:
    """Record gpt-oss: a column for the sink, less the largest, softmax in the scores' dtype, the cut."""
    tape = p.tape
    joined = tape.op((masked,), size)
    centred = tape.op((joined,), size)
    tape.drop(joined)
    soft = tape.op((centred,), size, saves_out=True, scratch=size)
    tape.drop(masked, centred)
    (cut,) = tape.split(soft, (size,))  # a view without the sink's column
    tape.drop(soft)
    return cut


def _capped(p: "Program", raw: Value, size: float) -> Value:
    """Record scores / cap, tanh, * cap (Gemma-2)."""
    if not p.s.score_cap:
        return raw
    tape = p.tape
    divided = p.cast(raw, size)
    tanh = tape.op((divided,), size, saves_out=True)
    tape.drop(divided)
    return p.cast(tanh, size)


def _operand(p: "Program", part: Value, size: float, *, apart: bool) -> Value:
    """Return `part` as matmul wants it: cast by autocast; copied when sequences lie before heads."""
    if size != part.size:
        cast = p.tape.op((part,), size)
    else:
        cast = part
        part.storage.refs += 1
    if not apart:
        return cast
    copy = _copied(p, cast)
    p.tape.drop(cast)
    return copy


def _copied(p: "Program", part: Value) -> Value:
    """Return a copy whose gradient is its source's."""
    nothing = p.tape.value(0, needs_grad=False)
    out = p.tape.add(part, nothing, part.size)
    p.tape.drop(nothing)
    return out
