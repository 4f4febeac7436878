"""The log-prob head against the definition: full logits in fp64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.units import MiB
from profiler.storages import StorageTracker
from trainer.logprob_head import default_chunk_rows, logprob_head
from trainer.vocab_tiles import tiles_as_on

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What one rounding of a gradient to the dtype costs, with room for accumulation.
GRAD_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def reference(hidden, weight, target, *, bias=None, temperature=1.0, softcap=0.0, logit_scale=1.0):
    """Return (logp, entropy) from full logits, as the definition says."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(rows=37, width=16, vocab=203, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64) * 0.5
    target = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), target


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "logit-scale": {"logit_scale": 0.3},
    "all": {"temperature": 1.4, "softcap": 4.0, "logit_scale": 1.3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_equal_full_fp64_logits(dtype, trainable, settings):
    hidden, weight, target = inputs(dtype=dtype)
    bias = torch.linspace(-1, 1, weight.shape[0]).to(dtype)
    upstream = torch.randn(hidden.shape[0], generator=torch.Generator().manual_seed(1))
    for tensor in (hidden, *((weight, bias) if trainable else ())):
        tensor.requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]

    out = logprob_head(hidden, weight, target, bias=bias, chunk_rows=7, entropy=True, **settings)
    expected, entropy = reference(exact[0], exact[1], target, bias=exact[2], **settings)
    (out.logp * upstream).sum().backward()
    (expected * upstream).sum().backward()

    assert out.logp.dtype == torch.float32
    assert relative(out.logp, expected) < 1e-6
    assert relative(out.entropy, entropy) < 1e-5
    assert not out.entropy.requires_grad
    assert relative(hidden.grad, exact[0].grad) < GRAD_TOLERANCE[dtype]
    if trainable:
        assert relative(weight.grad, exact[1].grad) < GRAD_TOLERANCE[dtype]
        assert relative(bias.grad, exact[2].grad) < GRAD_TOLERANCE[dtype]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_gradcheck(trainable, softcap):
    hidden, weight, target = inputs(rows=5, width=4, vocab=11)
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64)
    hidden.requires_grad_()
    if trainable:
        weight.requires_grad_()
        bias.requires_grad_()

    def run(hidden, weight, bias):
        settings = {"temperature": 0.8, "softcap": softcap, "logit_scale": 1.2, "chunk_rows": 2}
        return logprob_head(hidden, weight, target, bias=bias, **settings).logp

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_real_vocabulary_equals_full_logits(trainable):
    """SmolLM2's head, V = 49152 and H = 576, bf16, default tiles."""
    hidden, weight, target = inputs(rows=96, width=576, vocab=49152, dtype=torch.float32)
    hidden, weight = hidden.bfloat16(), (weight * 0.1).bfloat16()
    exact_hidden, exact_weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    expected, _ = reference(exact_hidden, exact_weight, target)
    expected.mean().backward()
    hidden.requires_grad_()
    weight.requires_grad_(trainable)
    out = logprob_head(hidden, weight, target)
    out.logp.mean().backward()
    assert relative(out.logp, expected) < 1e-6
    assert relative(hidden.grad, exact_hidden.grad) < 6e-3
    if trainable:
        assert relative(weight.grad, exact_weight.grad) < 6e-3


def test_tiling_does_not_change_the_result():
    hidden, weight, target = inputs()
    whole = logprob_head(hidden, weight, target, chunk_rows=10**6, entropy=True)
    for chunk_rows in (1, 3, 36, 37):
        tiled = logprob_head(hidden, weight, target, chunk_rows=chunk_rows, entropy=True)
        torch.testing.assert_close(tiled.logp, whole.logp, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tiled.entropy, whole.entropy, rtol=1e-12, atol=1e-12)


def test_more_rows_than_one_block():
    hidden, weight, target = inputs(rows=4500, width=4, vocab=20)
    hidden.requires_grad_()
    weight.requires_grad_()
    exact = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    logprob_head(hidden, weight, target, chunk_rows=50).logp.sum().backward()
    reference(*exact, target)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, exact[0].grad)
    torch.testing.assert_close(weight.grad, exact[1].grad)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_a_confident_token_keeps_its_logp_and_gradient(trainable):
    """At a margin of 30, p = 1 - 1.9e-13: z - logsumexp(z) is 0 in fp32 and so is its gradient."""
    hidden = torch.tensor([[30.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], requires_grad=trainable)
    exact = hidden.detach().double().requires_grad_()
    target = torch.tensor([0])
    out = logprob_head(hidden, weight, target)
    out.logp.sum().backward()
    z = (exact @ weight.detach().double().T)[0]
    true = -torch.log1p((z[1:] - z[0]).exp().sum())
    true.backward()
    assert (torch.log_softmax(hidden @ weight.T, -1)[0, 0] == 0).item()
    torch.testing.assert_close(out.logp[0], true.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(hidden.grad, exact.grad.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("normaliser", [256.0, 1e5, 4e6])
def test_fp16_gradients_survive_any_loss_normaliser(normaliser, trainable):
    """fp16 with a loss scale of 65536: gradients of a loss divided by 4e6 must not underflow."""
    scale = 65536.0
    hidden, weight, target = inputs(rows=64, width=64, vocab=1000, dtype=torch.float16)
    hidden.requires_grad_()
    weight.requires_grad_(trainable)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    advantages = torch.randn(64, generator=torch.Generator().manual_seed(2))

    out = logprob_head(hidden, weight, target, chunk_rows=8)
    ((out.logp * advantages).sum() / normaliser * scale).backward()
    ((reference(*exact, target)[0] * advantages).sum() / normaliser).backward()

    assert relative(hidden.grad.double() / scale, exact[0].grad) < 2e-3
    if trainable:
        assert relative(weight.grad.double() / scale, exact[1].grad) < 2e-3


@pytest.mark.parametrize("normaliser", [256.0, 1e5, 4e6])
def test_fp16_under_torchs_grad_scaler(normaliser):
    """An fp32 adapter before an fp16 head, scaled and unscaled by torch.amp.GradScaler."""
    hidden, weight, target = inputs(rows=64, width=32, vocab=500, dtype=torch.float16)
    adapter = torch.nn.Parameter(torch.eye(32))
    exact = torch.nn.Parameter(torch.eye(32, dtype=torch.float64))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([adapter], lr=1.0)
    out = logprob_head((hidden.float() @ adapter).half(), weight, target)
    scaler.scale(-out.logp.sum() / normaliser).backward()
    scaler.unscale_(optimizer)
    expected, _ = reference(hidden.double() @ exact, weight.double(), target)
    (-expected.sum() / normaliser).backward()
    assert relative(adapter.grad, exact.grad) < 1e-3


def test_fp16_keeps_the_gradient_of_confident_tokens():
    """U of a token with 1 - p = 1e-6 is below fp16's normal range; its exponent is kept apart."""
    hidden, weight, _ = inputs(rows=32, width=64, vocab=100, dtype=torch.float16)
    target = (hidden.double() @ weight.double().T).argmax(1)
    settings = {"temperature": 0.1}
    exact = hidden.detach().double().requires_grad_()
    hidden.requires_grad_()
    (logprob_head(hidden, weight, target, **settings).logp.sum() * 1024).backward()
    reference(exact, weight.double(), target, **settings)[0].sum().backward()
    size = exact.grad.abs().amax(1)
    rows = (size > 1e-9) & (size < 1e-4)
    assert rows.any()
    # hidden.grad itself is fp16: 1024 times keeps these rows in its range
    assert relative(hidden.grad[rows].double() / 1024, exact.grad[rows]) < 2e-2


def test_weight_gradient_accumulates_and_ties_with_the_embedding():
    hidden, weight, target = inputs(rows=12, width=8, vocab=30)
    for start in (None, torch.randn(30, 8, dtype=torch.float64)):
        tied = torch.nn.Parameter(weight.clone())
        tied.grad = None if start is None else start.clone()
        states = torch.nn.functional.embedding(target, tied) * 2 + hidden
        logprob_head(states, tied, target).logp.sum().backward()
        exact = torch.nn.Parameter(weight.clone())
        exact.grad = None if start is None else start.clone()
        states = torch.nn.functional.embedding(target, exact) * 2 + hidden
        reference(states, exact, target)[0].sum().backward()
        torch.testing.assert_close(tied.grad, exact.grad)


def test_the_gradient_goes_into_the_existing_grad_tensor():
    hidden, weight, target = inputs(rows=12, width=8, vocab=30)
    weight.requires_grad_()
    weight.grad = torch.zeros_like(weight)
    place = weight.grad.data_ptr()
    logprob_head(hidden, weight, target).logp.sum().backward()
    assert weight.grad.data_ptr() == place
    assert weight.grad.abs().sum() > 0


def test_autograd_grad_returns_gradients_and_leaves_grad_alone():
    hidden, weight, target = inputs(rows=12, width=8, vocab=30)
    hidden.requires_grad_()
    weight.requires_grad_()
    logp = logprob_head(hidden, weight, target).logp.sum()
    of_both = torch.autograd.grad(logp, [hidden, weight], retain_graph=True)
    of_hidden = torch.autograd.grad(logp, [hidden], retain_graph=True)[0]
    exact = torch.autograd.grad(reference(hidden, weight, target)[0].sum(), [hidden, weight])
    torch.testing.assert_close(of_both, exact)
    torch.testing.assert_close(of_hidden, exact[0])
    assert weight.grad is None
    logp.backward(inputs=[weight])
    torch.testing.assert_close(weight.grad, exact[1])
    assert hidden.grad is None


def test_hooks_and_computed_weights_get_their_gradient_through_autograd():
    hidden, weight, target = inputs(rows=12, width=8, vocab=30)
    exact = torch.autograd.grad(
        reference(hidden, weight.requires_grad_(), target)[0].sum(), [weight]
    )[0]
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    logprob_head(hidden, weight, target).logp.sum().backward()
    torch.testing.assert_close(seen[0], exact)
    base = weight.detach().clone().requires_grad_()
    logprob_head(hidden, base * 1.0, target).logp.sum().backward()
    torch.testing.assert_close(base.grad, exact)
    plain = weight.detach().clone().requires_grad_()
    logprob_head(hidden, plain, target, direct_grad=False).logp.sum().backward()
    torch.testing.assert_close(plain.grad, exact)


def test_backward_twice_gives_the_same():
    hidden, weight, target = inputs(rows=6, width=4, vocab=9)
    hidden.requires_grad_()
    logp = logprob_head(hidden, weight, target).logp.sum()
    logp.backward(retain_graph=True)
    first = hidden.grad.clone()
    logp.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)


def test_autocast_does_not_round_the_products():
    hidden, weight, target = inputs(dtype=torch.float32)
    plain = logprob_head(hidden, weight, target).logp
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = logprob_head(hidden, weight, target).logp
    assert torch.equal(plain, inside)


def test_edges_no_rows_and_a_vocabulary_of_one():
    hidden = torch.randn(0, 4, requires_grad=True)
    empty = logprob_head(hidden, torch.randn(7, 4), torch.empty(0, dtype=torch.long), entropy=True)
    assert empty.logp.shape == (0,)
    empty.logp.sum().backward()
    assert hidden.grad.shape == (0, 4)
    one = logprob_head(
        torch.randn(3, 4), torch.randn(1, 4), torch.zeros(3, dtype=torch.long), entropy=True
    )
    assert torch.equal(one.logp, torch.zeros(3))
    assert torch.equal(one.entropy, torch.zeros(3))


def test_tokens_ruled_out_by_the_bias_have_no_weight():
    hidden, weight, target = inputs(rows=5, width=4, vocab=12)
    target = target % 4
    bias = torch.zeros(12, dtype=torch.float64)
    bias[4:] = float("-inf")
    hidden.requires_grad_()
    out = logprob_head(hidden, weight, target, bias=bias, chunk_rows=2, entropy=True)
    out.logp.sum().backward()
    exact = hidden.detach().requires_grad_()
    expected, entropy = reference(exact, weight[:4], target)
    expected.sum().backward()
    torch.testing.assert_close(out.logp, expected)
    torch.testing.assert_close(out.entropy, entropy)
    torch.testing.assert_close(hidden.grad, exact.grad)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"target": torch.tensor([0, 30])}, "target 0..30"),
        ({"target": torch.tensor([-1, 0])}, "target -1..0"),
        ({"target": torch.zeros(3, dtype=torch.long)}, "target"),
        ({"target": torch.zeros(2)}, "target"),
        ({"weight": torch.randn(30, 5)}, "hidden"),
        ({"bias": torch.randn(3)}, "bias"),
        ({"temperature": 0.0}, "temperature"),
        ({"softcap": -1.0}, "softcap"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    arguments = {
        "hidden": torch.randn(2, 4),
        "weight": torch.randn(30, 4),
        "target": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=name):
        logprob_head(**(arguments | change))


def live_bytes(*, trainable, device_type="cpu", rows=2048):
    """Return (peak live bytes, W included; largest storage) of one forward and backward."""
    width, vocab = 512, 65536
    with StorageTracker() as tracker, tiles_as_on(device_type):
        weight = torch.empty(vocab, width, dtype=torch.bfloat16).normal_(std=0.02)
        weight.requires_grad_(trainable)
        hidden = torch.empty(rows, width, dtype=torch.bfloat16).normal_().requires_grad_()
        target = torch.randint(0, vocab, (rows,))
        logprob_head(hidden, weight, target, entropy=True).logp.sum().backward()
    live = peak = 0
    for event in tracker.events:
        live += event.block.bytes if event.alloc else -event.block.bytes
        peak = max(peak, live)
    return peak, max(event.block.bytes for event in tracker.events)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("trainable", "limit"), [(False, 116 * MiB), (True, 228 * MiB)])
def test_peak_live_bytes_and_no_full_logits(trainable, limit, device_type):
    """N=2048, H=512, V=65536 in bf16, where full bf16 logits alone are 256 MiB.

    On fake tensors, with tiles as on a CPU and (half products) as on a GPU.
    """
    with FakeTensorMode():
        peak, largest = live_bytes(trainable=trainable, device_type=device_type)
    assert peak <= limit
    assert largest == 65536 * 512 * 2, "nothing is larger than W"


def test_real_tensors_take_what_fake_ones_say():
    real = live_bytes(trainable=False, rows=256)
    with FakeTensorMode():
        fake = live_bytes(trainable=False, rows=256)
    assert real[1] == fake[1]
    # the range check of real targets and scalars
    assert abs(real[0] - fake[0]) < 4096


def test_default_scratch_stays_between_16_and_128_mib():
    for vocab, width in ((32000, 576), (65536, 512), (128256, 4096), (262144, 5376)):
        for device_type in ("cpu", "cuda"):
            rows = default_chunk_rows(vocab=vocab, width=width, device_type=device_type)
            assert 14 * MiB <= 6 * rows * vocab <= 128 * MiB
