"""Single operations of a layer traced by hand on the byte tape: what is live, kept, and needed backward.

H = 64 features. Figures are bytes a token, in the order the operation allocates; a weight's are constant.
`x` is held by the caller until the operation is over, then dropped with the output.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from planner.layer.program import OpSettings, Program, in_tiles
from planner.layer.tape import Point, Tape, Value
from planner.models.spec import ModuleKind, ModuleSpec

H = 64
LINEAR = ModuleSpec(name="m", kind=ModuleKind.LINEAR, shapes=((32, 64),))
"""64 in, 32 out: 2,048 weights."""


class Traced(NamedTuple):
    """Largest live bytes a token forward and backward, and what is kept between."""

    forward: float
    kept: float
    backward: float


def run(record: Callable[[Program, Value], Value], size: float, **settings: object) -> Traced:
    """Trace an operation on an input of `size` bytes a token."""
    tape = trace(record, size, **settings)
    return Traced(tape[0], tape[1].per_token, tape[2])


def trace(
    record: Callable[[Program, Value], Value], size: float, **settings: object
) -> tuple[float, Point, float, list[Point], list[Point]]:
    """Trace and also return what is kept and all points of both passes."""
    tape = Tape()
    x = tape.value(size)
    program = Program(tape, OpSettings(**settings))
    out = record(program, x)
    program.end_layer()
    tape.drop(x, out)
    forward, kept = list(tape.points), tape.now()
    tape.points.clear()
    tape.start_backward(out, out.size)
    tape.run()
    assert tape.live == size  # the input's gradient is all that is left
    most = max(point.per_token for point in tape.points)
    return max(p.per_token for p in forward), kept, most, forward, list(tape.points)


def norm(width: int = 2) -> Callable[[Program, Value], Value]:
    """Return a norm of H features."""
    return lambda p, x: p.norm(x, width, H)


def test_rms_norm_in_16_bit() -> None:
    # x 128, to fp32 256, squares 256, mean 4; squares gone, rstd 4; normed 256, its 16 bits 128, out 128:
    # at the end 128 + 256 + 4 + 256 + 128 + 128. Kept: fp32 x and rstd.
    # Backward at the squares: fp32 x 256, its gradient 256, that of the squares 256, the new one 256,
    # and two temporaries 512
    assert run(norm(), 128) == (900, 260, 1536)


def test_rms_norm_that_is_trained_keeps_its_16_bit_result() -> None:
    assert run(norm(), 128, full=True) == (900, 388, 1536)
    points = trace(norm(), 128, full=True, grad=4)[4]
    # its weight's gradient: 64 x 4, made first: kept 388, incoming 128, outgoing 128, a product 128
    assert points[1] == (644, 0, 0)
    assert points[2] == (644, 0, 256)
    assert points[3] == (772, 0, 256)


def test_rms_norm_of_an_fp32_stream_saves_the_stream_itself() -> None:
    # x 256, squares 256, mean 4 -> rstd 4, normed 256, out 256; kept: x and rstd
    assert run(norm(4), 256, residual=4) == (772, 260, 1536)
    # trained: normed too
    assert run(norm(4), 256, residual=4, full=True).kept == 516


def test_gemmas_norm_scales_in_fp32() -> None:
    # as above, but out is 256 and comes back as 128: 128 + 256 + 4 + 256 + 256 + 128
    assert run(norm(), 128, norm="rmsnorm_gemma") == (1028, 260, 1536)
    # trained: the fp32 normed 256 is saved; backward meanwhile 516 + 256 + 256 + 256 is less than at the squares
    assert run(norm(), 128, norm="rmsnorm_gemma", full=True) == (1028, 516, 1536)


def test_layer_norm_saves_its_input_and_two_statistics() -> None:
    assert run(norm(), 128, norm="layernorm") == (264, 136, 392)
    # weight and bias: 2 x 64 x 2 B
    assert trace(norm(), 128, norm="layernorm", full=True)[4][-1].weight_grads == 256
    wide = trace(norm(), 128, norm="layernorm", autocast=True, full=True, grad=4)[4]
    assert wide[-1].weight_grads == 512
    # under autocast in fp32: x 128, copy 256, statistics 8, out 256; backward 264 + 256 + 256
    assert run(norm(), 128, norm="layernorm", autocast=True) == (648, 264, 776)
    # an fp32 stream needs no copy
    assert run(norm(4), 256, norm="layernorm", autocast=True, residual=4) == (520, 264, 776)


def test_a_fused_rms_norm_saves_its_input() -> None:
    assert run(norm(), 128, fused=frozenset({"rmsnorm"})) == (264, 136, 392)
    points = trace(norm(), 128, fused=frozenset({"rmsnorm"}), full=True)[4]
    assert points[-1].weight_grads == 128


def rope(p: Program, x: Value) -> Value:
    """Rotate; rope drops its input, which the caller drops again."""
    x.storage.refs += 1
    return p.rope(x, x.size)


def test_rotation_keeps_nothing() -> None:
    # x 100, cosine 100, the half's negation 50 beside the turned 100 (350), turned 100, sine 100 (400);
    # turned gone, out 100 (400). Backward: incoming, the turned's, x's 100 and its padding 100
    assert run(rope, 100) == (400, 0, 400)
    assert run(rope, 100, fused=frozenset({"rope"})).forward == 100
    assert run(rope, 100, rope=False).forward == 100
    assert max(p.per_token for p in trace(rope, 100)[3][:3]) == 350


def linear(width: int = 2) -> Callable[[Program, Value], Value]:
    """Return the linear of 64 in, 32 out."""
    return lambda p, x: p.linear(x, LINEAR, width)


def test_a_frozen_linear_keeps_nothing_and_a_trained_one_its_input() -> None:
    assert run(linear(), 128) == (192, 0, 192)
    assert run(linear(), 128, full=True) == (192, 128, 320)
    assert trace(linear(), 128, full=True, grad=4)[4][-1].weight_grads == 4 * 2048


def test_a_biased_linear_has_the_biass_gradient_too() -> None:
    biased = ModuleSpec(name="m", kind=ModuleKind.LINEAR, shapes=((32, 64), (32,)))
    points = trace(lambda p, x: p.linear(x, biased, 2), 128, full=True)[4]
    assert points[-1].weight_grads == 2 * 2080


def test_autocasts_copy_of_a_weight_is_saved() -> None:
    # fp32 weight and input: input's copy 128, the weight's 2,048 x 2
    settings = {"autocast": True, "weight": 4, "residual": 4}
    forward, kept, _, _, back = trace(linear(4), 256, **settings)
    assert (forward, kept) == (256 + 128 + 64, Point(0, 4096, 0))
    assert kept.constant == 4096
    assert max(p.constant for p in back) == 4096
    assert trace(linear(4), 256, full=True, **settings)[1] == Point(128, 4096, 0)


def test_a_quantised_linear_makes_its_weight_in_both_passes() -> None:
    forward, kept, _, points, back = trace(linear(), 128, quantized=True)
    assert (forward, kept) == (192, Point(0, 0, 0))
    assert max(p.constant for p in points) == 4096
    assert max(p.constant for p in back) == 4096
    # an fp32 stream: 16-bit copy of x 128, out 64, as fp32 128
    assert run(linear(4), 256, quantized=True, residual=4) == (256 + 128 + 64, 0, 384)


def test_old_bitsandbytes_holds_the_input_as_long_as_the_graph() -> None:
    for held, size in ((2, 128), (4, 256)):
        tape = Tape()
        x = tape.value(128)
        out = Program(tape, OpSettings(quantized=True, saved_input=held)).linear(x, LINEAR, 2)
        tape.drop(x, out)
        assert tape.live == size


def test_a_scaled_output_is_kept() -> None:
    # x 128, out 64, scaled 64; backward: out 64, incoming 64, out's gradient 64
    assert run(linear(), 128, saved_output=True) == (256, 64, 192)


def lora(**settings: object) -> Traced:
    """Trace the linear with an adapter of rank 8."""
    return run(linear(), 128, adapted=frozenset({"m"}), rank=8, **settings)


def test_lora_in_fp32_beside_a_16_bit_base() -> None:
    # x 128, base 64, x in fp32 256, A's 8 x 4 = 32, B's 32 x 4 = 128, scaled 128: 736; then the fp32 sum.
    # Kept: fp32 x 256 and A's 32. Backward at A: base's gradient 64, kept 288, A's incoming 32 and x's fp32
    # 256 less what B freed: 64 + 256 + 32 + 256 = 608
    assert lora() == (736, 288, 608)
    points = trace(linear(), 128, adapted=frozenset({"m"}), rank=8)[4]
    assert points[-1].weight_grads == 4 * (8 * 64 + 8 * 32)


def test_lora_in_the_bases_dtype() -> None:
    # x 128, base 64, A's 16, B's 64, scaled 64: 336; B's gone, sum 64. Kept: x and A's.
    # Backward at the end: A's gradient of x is a view, so the base's 128 beside it are added into a third
    assert lora(adapter=2) == (336, 144, 384)


def test_loras_dropout_keeps_a_mask_and_a_copy() -> None:
    # mask 64 (one byte an element), the dropped-out x 128 instead of x, A's 16
    assert lora(adapter=2, dropout=True).kept == 208
    assert lora(adapter=2, dropout=True).forward == 128 + 64 + 64 + 128 + 16 + 64 + 64
    assert lora(dropout=True).kept == 64 + 256 + 32


def test_lora_under_autocast() -> None:
    # PEFT's fp32 copy 256 while its forward runs, autocast's 16-bit one 128, A's 16, B's 64, scaled 64:
    # 128 + 64 + 256 + 128 + 16 + 64 + 64. Kept: the copy 128 and A's 16, and both factors in 16 bit
    found = trace(linear(), 128, adapted=frozenset({"m"}), rank=8, autocast=True)
    assert found[0] == 720
    assert found[1] == Point(144, 2 * (8 * 64 + 8 * 32), 0)


def test_lora_on_a_quantised_base() -> None:
    # the base's result is cloned; the update is cast before it is added: x 128, base 64, fp32 x 256,
    # A's 32, B's 128, scaled 128
    assert lora(quantized=True) == (736, 288, 608)
    # under autocast PEFT leaves x alone: 128 + 64 + A's 16 + B's 64 + scaled 64; x is saved
    assert lora(quantized=True, autocast=True) == (336, 144, 384)


def test_a_fused_lora_computes_in_16_bit() -> None:
    # fp32 factors, x as it is
    assert lora(fused=frozenset({"lora"})).kept == 144
    # Unsloth leaves adapters with dropout to PEFT
    assert lora(fused=frozenset({"lora"}), dropout=True) == lora(dropout=True)


def test_a_fused_quantised_lora_saves_x_and_what_dropout_left() -> None:
    # x 128, base 64, dropped out 128 without a mask, A's 16, B's 64, scaled 64; both 128 and A's 16 are kept
    fused = {"fused": frozenset({"qlora"}), "autocast": True}
    assert lora(quantized=True, dropout=True, **fused).forward == 464
    assert lora(quantized=True, dropout=True, **fused).kept == 272
    # a 16-bit base is PEFT's
    assert lora(dropout=True, **fused) == lora(dropout=True, autocast=True)


Q, K, OUT, LSE = 128, 64, 128, 16
"""4 query heads of 16 on 2 key heads in 16 bit; a log-sum of 4 B a head."""


def attend(p: Program, x: Value) -> Value:
    """Cut one projection of q, k and v and attend."""
    q, k, v = (p.tape.op((x,), size) for size in (Q, K, K))
    return p.sdpa(q, k, v, 4, 16, 2)


def test_sdpa_saves_its_inputs_output_and_log_sums() -> None:
    kept = Q + 2 * K + OUT + LSE
    # backward: all that, the incoming 128, gradients 256, and dq in fp32 256
    assert run(attend, 10) == (10 + kept, kept, kept + OUT + Q + 2 * K + 256)


@pytest.mark.parametrize(
    "settings",
    [{"masked": True}, {"repeat_kv": True}, {"repeat_kv": True, "attention": "flash"}],
)
def test_repeated_keys_and_values(settings: dict[str, object]) -> None:
    kept = 3 * Q + OUT + LSE
    assert run(attend, 10, **settings) == (10 + kept, kept, kept + OUT + 3 * Q + 256)


def test_flash_attention_takes_no_mask_from_the_model() -> None:
    assert run(attend, 10, masked=True, attention="flash").kept == Q + 2 * K + OUT + LSE


def test_eager_attention_keeps_scores_twice() -> None:
    # 8 tokens: 32 scores a token: 64 B in 16 bit. q 128, k and v 64 each and repeated 128 each; scores 64,
    # scaled 64, masked 64 (two at once); masked in fp32 128, softmax 128, its 16 bits 64.
    # Kept: q, repeated k and v, softmax 128, its copy 64
    found = run(attend, 10, attention="eager", seq=8)
    assert found.kept == 3 * 128 + 128 + 64
    # at the end: q, k, v twice, fp32 and 16-bit softmax, out 128; then the context copied 128
    assert found.forward == 10 + 512 + 192 + 128 + 128
    # the softmax's backward: q, repeated k and softmax kept 384, v's gradient 128, the incoming one,
    # the result and CUDA's product of gradient and softmax 128 each
    assert found.backward == 384 + 128 + 3 * 128


def test_eager_softmax_reads_fp16_without_a_copy() -> None:
    def at_softmax(**settings: object) -> float:
        # heads of 4 instead of 16, so that the scores decide
        def small(p: Program, x: Value) -> Value:
            q, k, v = (p.tape.op((x,), size) for size in (32, 16, 16))
            return p.sdpa(q, k, v, 4, 4, 2)

        return run(small, 10, attention="eager", seq=64, **settings).forward

    # q, k, v twice 128; 256 scores: masked 512, its fp32 copy 1,024, softmax 1,024
    assert at_softmax() == 10 + 128 + 512 + 1024 + 1024
    # no copy; masked is still bound while the softmax is cast to 16 bits 512
    assert at_softmax(reads_half=True) == 10 + 128 + 512 + 1024 + 512


def test_several_sequences_are_copied_for_the_product() -> None:
    # q's copy is saved, q and the first k and v are not; the context's gradient is copied back too
    one, more = (run(attend, 10, attention="eager", seq=8, batched=b) for b in (False, True))
    assert (more.kept, more.forward) == (one.kept, one.forward + 128)


def test_several_sequences_of_ungrouped_heads_copy_keys_and_values_too() -> None:
    def alike(p: Program, x: Value) -> Value:
        q, k, v = (p.tape.op((x,), Q) for _ in range(3))
        return p.sdpa(q, k, v, 4, 16, 2)

    one, more = (run(alike, 10, attention="eager", seq=8, batched=b) for b in (False, True))
    # q, k, v, the softmax 128 and its 16 bits 64 are kept, copies instead of the first q, k and v
    assert one.kept == more.kept == 3 * Q + 192
    assert more.forward == one.forward + 3 * Q


def test_values_narrower_than_keys() -> None:
    def narrow(p: Program, x: Value, width: int = 2) -> Value:
        q, k, v = (p.tape.op((x,), size * width) for size in (64, 32, 16))
        return p.sdpa(q, k, v, 4, 8, width)

    # values of 8 on two heads, 16 x 2 B, are repeated to 64; softmax 128 and 64
    assert run(narrow, 10, attention="eager", seq=8).kept == Q + Q + 64 + 192
    # fp32 by SDPA's math kernel: query and key 256, softmax 128, values 128
    wide = run(lambda p, x: narrow(p, x, 4), 10, act=4, seq=8)
    assert wide.kept == 256 + 256 + 128 + 128


def test_gemmas_cap_keeps_the_tanh_and_a_sink_a_softmax_of_its_own() -> None:
    plain = run(attend, 10, attention="eager", seq=8).kept
    assert run(attend, 10, attention="eager", seq=8, score_cap=True).kept == plain + 64
    # gpt-oss: softmax in 16 bit alone
    assert run(attend, 10, attention="eager", seq=8, sinks=True).kept == plain - 128


def test_a_mask_costs_a_bias_a_layer() -> None:
    # 8 tokens: 8 x 2 B of bias a token, beside keys and values for all heads
    bare = run(attend, 10, masked=True).kept
    assert run(attend, 10, masked=True, seq=8).kept == bare + 16


def test_eager_attention_in_fp32_has_one_softmax() -> None:
    def wide(p: Program, x: Value) -> Value:
        q, k, v = (p.tape.op((x,), size) for size in (256, 128, 128))
        return p.sdpa(q, k, v, 4, 16, 4)

    # q, repeated k and v 256 each, 8 tokens: 4 heads x 8 x 4 B of softmax, which both products save
    assert run(wide, 10, attention="eager", act=4, seq=8).kept == 3 * 256 + 128


def test_maths_sdpa_for_grouped_fp32_keys() -> None:
    # fp32: q 256, k and v 128 each; 8 tokens: scores of 4 heads x 8 x 4 = 128 B
    def wide(p: Program, x: Value) -> Value:
        q, k, v = (p.tape.op((x,), size) for size in (256, 128, 128))
        return p.sdpa(q, k, v, 4, 16, 4)

    found = trace(wide, 10, act=4, seq=8)
    # saved: the contiguous query and repeated key 256 each, softmax 128, repeated v 256
    assert found[1] == Point(256 + 256 + 128 + 256, 0, 0)
    # a mask of [T, T] in fp32
    assert max(p.constant for p in found[3]) == 4 * 64
    # q, k, v 512; scaled 256; k and v repeated 512; key and query 512 gone after the scores 128 but saved;
    # softmax: 128 and 5/4 of it beside
    at_softmax = 10 + 512 + 256 + 512 + 512 + 128 + 128 + 160
    assert found[0] == at_softmax


def test_falcons_one_key_head_goes_through_fp32_copies() -> None:
    # 16 bit: q 128; k and v of one head 32 each
    def one(p: Program, x: Value) -> Value:
        q, k, v = (p.tape.op((x,), size) for size in (128, 32, 32))
        return p.sdpa(q, k, v, 4, 16, 2)

    found = trace(one, 10, undeclared_groups=True, seq=8)
    # fp32: the query 256, the key for all heads 256, softmax 128, v for all heads 256
    assert found[1].per_token == 896
    # q, k, v 192 and in fp32 384, scaled 256, key 256 and query 256, softmax 128 and its 16 bits 64,
    # v 256, out 256 and as 16 bit 128
    assert found[0] == 10 + 192 + 384 + 256 + 512 + 128 + 64 + 256 + 256 + 128


def test_tiles_keep_the_input_alone() -> None:
    # a linear in tiles of 3 tokens, trained: forward of a tile 128 + 64 = 192; again: input, out and its
    # gradient, input's gradient: 128 + 64 + 128 = 320
    def tiled(p: Program, x: Value) -> Value:
        return in_tiles(p, x, 3, lambda q, part: q.linear(part, LINEAR, 2))

    _, kept, _, forward, back = trace(tiled, 128, full=True, mlp_tile=3)
    assert kept == Point(128, 0, 0)
    assert max(p.constant for p in forward) == 3 * 192
    assert max(p.constant for p in back) == 3 * 320 + 4096  # with the tile's own weight gradient
    assert back[-1].weight_grads == 4096
    through_norm = trace(norm(), 128, norm_tile=3)
    assert through_norm[1] == Point(128, 0, 0)
    assert max(p.constant for p in through_norm[4]) == 3 * (1536 + 128)  # and the tile's own input


def test_a_router_is_trained_but_never_quantised() -> None:
    def router(p: Program, x: Value) -> Value:
        return p.linear_like(x, 8, 256)

    assert run(router, 128) == (136, 0, 136)
    found = trace(router, 128, full=True, quantized=True, grad=4)
    assert found[1] == Point(128, 0, 0)
    assert found[4][-1].weight_grads == 1024
