"""Optimizers: against torch's own in fp32, exact resume, rounding, formats and bounded scratch."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import UnsupportedError, UsageError
from planner.run.recipe import Optimizer
from planner.units import MiB
from profiler.storages import StorageTracker
from trainer import elementwise_optimizer
from trainer.elementwise_optimizer import StateFormat, copy_stochastic_
from trainer.optim import (
    NO_SCALE,
    LossScale,
    apply_step,
    clip_factor,
    gradient_norm,
    make_optimizer,
)


def parameters(dtype=torch.float32, shapes=((80, 70), (33,), (3, 5, 7)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def named(tensors):
    return [(f"p{number}", tensor) for number, tensor in enumerate(tensors)]


def give_gradients(tensors, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def train(optimizer, tensors, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(tensors, step)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "make_torch"),
    [
        (
            Optimizer.ADAMW,
            lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8),
        ),
        (Optimizer.SGD, lambda groups: torch.optim.SGD(groups, lr=1e-2)),
        (Optimizer.SGD_MOMENTUM, lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fp32_equals_torch(kind, make_torch, monkeypatch):
    """In chunks of 512, so that tensors end in the middle of one."""
    monkeypatch.setattr(elementwise_optimizer, "CHUNK_ELEMENTS", 512)
    ours, theirs = parameters(), parameters()
    is_adam = kind is Optimizer.ADAMW
    decay = 0.1 if is_adam else 0.0  # torch's SGD has no decoupled decay
    optimizer = make_optimizer(
        named(ours), kind=kind, lr=1e-2, betas=(0.9, 0.95), weight_decay=decay
    )
    groups = [
        {"params": [theirs[0], theirs[2]], "weight_decay": decay},
        {"params": [theirs[1]], "weight_decay": 0.0},
    ]
    train(optimizer, ours, 20)
    train(make_torch(groups), theirs, 20)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lion_by_hand():
    tensor = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = make_optimizer(
        [("p", tensor)], kind=Optimizer.LION, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5
    )
    tensor.grad = torch.tensor([[3.0, -4.0]])
    optimizer.step()
    torch.testing.assert_close(tensor.data, torch.tensor([[0.95 - 0.1, -1.9 + 0.1]]))
    torch.testing.assert_close(optimizer.state[tensor]["moment1"], torch.tensor([0.03, -0.04]))


def test_int8_state_equals_bitsandbytes():
    import bitsandbytes

    ours, theirs = parameters(), parameters()
    optimizer = make_optimizer(
        named(ours), kind=Optimizer.ADAMW_8BIT, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0
    )
    train(optimizer, ours, 15)
    train(
        bitsandbytes.optim.AdamW8bit(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
        theirs,
        15,
    )
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    state = optimizer.state[ours[0]]
    assert state["moment1"].dtype == torch.uint8
    taken = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    assert taken / ours[0].numel() == pytest.approx(2 * (1 + 4 / 256), rel=0.01)
    # tensors under 4096 elements stay fp32
    assert optimizer.state[ours[1]]["moment1"].dtype == torch.float32


def test_int8_chunks_end_on_blocks(monkeypatch):
    whole, chunked = parameters(), parameters()
    train(make_optimizer(named(whole), kind=Optimizer.ADAMW_8BIT, lr=1e-2), whole, 5)
    monkeypatch.setattr(elementwise_optimizer, "CHUNK_ELEMENTS", 512)
    train(make_optimizer(named(chunked), kind=Optimizer.ADAMW_8BIT, lr=1e-2), chunked, 5)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=0)


ADAPTERS = ((16, 96), (64, 16), (33,), (16, 40), (256, 64), (3, 5, 7), (16, 64), (96, 16))
"""Among them tensors without whole blocks of 256, and some too small for 8 bits."""


@pytest.mark.parametrize(
    "options",
    [
        {"kind": Optimizer.ADAMW},
        {"kind": Optimizer.ADAMW, "dtype": torch.bfloat16, "master_weights": True},
        {"kind": Optimizer.PAGED_ADAMW, "dtype": torch.float16, "master_weights": True},
        {"kind": Optimizer.ADAMW_8BIT, "shapes": (*ADAPTERS, (50, 100), (16, 512), (4100,))},
        {"kind": Optimizer.LION, "dtype": torch.bfloat16, "master_weights": True},
        {"kind": Optimizer.SGD_MOMENTUM},
    ],
    ids=lambda options: options["kind"],
)
def test_tensors_stepped_together_are_stepped_as_each_alone(options):
    options = {"dtype": torch.float32, "shapes": ADAPTERS, **options}
    dtype, shapes = options.pop("dtype"), options.pop("shapes")
    together, alone = parameters(dtype, shapes), parameters(dtype, shapes)
    train(make_optimizer(named(together), lr=1e-2, weight_decay=0.1, **options), together, 5)
    each = [
        make_optimizer([("p", tensor)], lr=1e-2, weight_decay=0.1, **options) for tensor in alone
    ]
    for step in range(5):
        give_gradients(alone, step)
        for optimizer in each:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.LION])
def test_where_bundles_end_changes_nothing_that_is_rounded_at_random(kind, monkeypatch):
    few, many = parameters(torch.bfloat16, ADAPTERS), parameters(torch.bfloat16, ADAPTERS)
    train(make_optimizer(named(few), kind=kind, lr=1e-2), few, 4)
    monkeypatch.setattr(elementwise_optimizer, "CHUNK_ELEMENTS", 512)
    train(make_optimizer(named(many), kind=kind, lr=1e-2), many, 4)
    for one, other in zip(few, many, strict=True):
        assert torch.equal(one, other)


class LateCopies:
    """Two queues that copy as late as they may: what is read too early, or written too early, is wrong.

    What comes is NaN until it is waited for; what goes is read when it is waited for, or at the end.
    """

    def __init__(self):
        self.queues = {"in": [], "out": []}
        self.most_coming = self.most_going = 0

    def _enter(self, queue, sources, targets):
        self.queues[queue].append((list(sources), list(targets)))
        self.most_coming = max(self.most_coming, len(self.queues["in"]))
        self.most_going = max(self.most_going, len(self.queues["out"]))
        return queue, self.queues[queue][-1]

    def bring(self, sources, targets):
        for target in targets:
            target.fill_(math.nan if target.is_floating_point() else 255)
        return self._enter("in", sources, targets)

    def send(self, sources, targets):
        return self._enter("out", sources, targets)

    def wait(self, event):
        queue, entry = event
        while any(entry is other for other in self.queues[queue]):  # in order, as a stream
            for source, target in zip(*self.queues[queue].pop(0), strict=True):
                target.copy_(source)

    def finish(self):
        for queue in self.queues:
            while self.queues[queue]:
                self.wait((queue, self.queues[queue][0]))


STREAMED = {
    "masters": {"kind": Optimizer.ADAMW, "dtype": torch.bfloat16, "master_weights": True},
    "rounded": {"kind": Optimizer.ADAMW, "dtype": torch.bfloat16},
    "bf16 states": {
        "kind": Optimizer.LION,
        "dtype": torch.bfloat16,
        "state_format": StateFormat.BF16,
    },
    "codes": {"kind": Optimizer.ADAMW_8BIT, "dtype": torch.bfloat16},
    "fp32": {"kind": Optimizer.SGD_MOMENTUM},
    "nothing": {"kind": Optimizer.SGD},
}


@pytest.mark.parametrize("options", STREAMED.values(), ids=STREAMED.keys())
def test_streamed_states_step_as_resident_ones(options, monkeypatch):
    """Bundles of 512 streamed, of 512 resident: the same noise, and a tensor lies in several."""
    options = {"dtype": torch.float32, **options}
    dtype = options.pop("dtype")
    resident, streamed = parameters(dtype, ADAPTERS), parameters(dtype, ADAPTERS)
    monkeypatch.setattr(elementwise_optimizer, "CHUNK_ELEMENTS", 512)
    here = make_optimizer(named(resident), lr=1e-2, weight_decay=0.1, **options)
    train(here, resident, 4)
    monkeypatch.setattr(elementwise_optimizer, "CHUNK_ELEMENTS", 1024)
    there = make_optimizer(named(streamed), lr=1e-2, weight_decay=0.1, offload=True, **options)
    there.copies = LateCopies()
    train(there, streamed, 4)
    for one, other in zip(resident, streamed, strict=True):
        assert torch.equal(one, other)
        for key, value in here.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(there.state[other][key]))
    if here.settings.rule is not elementwise_optimizer.Rule.SGD:
        # one bundle comes while another is stepped; what went is waited for after the next one's step
        assert there.copies.most_coming == 2
        assert there.copies.most_going > 1


def test_copies_end_with_a_step_that_fails(monkeypatch):
    monkeypatch.setattr(elementwise_optimizer, "CHUNK_ELEMENTS", 1024)
    tensors = parameters(torch.float32, ADAPTERS)
    optimizer = make_optimizer(named(tensors), kind=Optimizer.ADAMW, lr=1e-2, offload=True)
    optimizer.copies = LateCopies()
    train(optimizer, tensors, 1)
    give_gradients(tensors, 1)
    monkeypatch.setattr(torch, "_foreach_sqrt", lambda tensors: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.copies.queues == {"in": [], "out": []}


class Operations(TorchDispatchMode):
    """Counts what would be launched: every operation but those that only look at memory, or reserve it."""

    NONE = (
        "view",
        "slice",
        "split_with_sizes",
        "empty",
        "_record_function_enter_new",
        "_record_function_exit",
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in self.NONE
        return func(*args, **(kwargs or {}))


def test_the_adapters_of_thirty_layers_take_few_launches():
    """4,677 when each of the 420 tensors was stepped by itself."""
    shapes = [shape for _ in range(30 * 7) for shape in ((16, 576), (576, 16))]
    adapters = parameters(torch.bfloat16, shapes)
    optimizer = make_optimizer(named(adapters), kind=Optimizer.ADAMW, lr=1e-3, master_weights=True)
    train(optimizer, adapters, 1)
    give_gradients(adapters, 1)
    with Operations() as counted:
        apply_step(optimizer, adapters, scale=NO_SCALE, max_norm=1.0)
    # two bundles of 11, and the norm: one for all, stacked, normed again, read
    assert counted.count == 2 * 11 + 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_train_as_fp32_would(dtype):
    low = parameters(dtype=dtype)
    full = [nn.Parameter(tensor.detach().float()) for tensor in low]
    optimizer = make_optimizer(named(low), kind=Optimizer.ADAMW, lr=1e-5, master_weights=True)
    exact = make_optimizer(named(full), kind=Optimizer.ADAMW, lr=1e-5)
    for step in range(30):
        give_gradients(low, step)
        for tensor, copied in zip(low, full, strict=True):
            copied.grad = tensor.grad.float()
        optimizer.step()
        exact.step()
    for tensor, copied in zip(low, full, strict=True):
        assert torch.equal(tensor.data, copied.data.to(dtype))
        torch.testing.assert_close(
            optimizer.state[tensor]["master"], copied.detach().view(-1), rtol=0, atol=0
        )


def test_stochastic_rounding_keeps_updates_that_nearest_rounding_loses():
    """Weights of 1 in bf16 have steps of 2^-8; 200 updates of 1e-5 sum to half of one."""
    stochastic = nn.Parameter(torch.ones(400, 50, dtype=torch.bfloat16))
    nearest = nn.Parameter(torch.ones(400, 50, dtype=torch.bfloat16))
    ours = make_optimizer([("p", stochastic)], kind=Optimizer.ADAMW, lr=1e-5, betas=(0.0, 0.0))
    theirs = torch.optim.AdamW([nearest], lr=1e-5, betas=(0.0, 0.0), weight_decay=0.0)
    for _ in range(200):
        for tensor, optimizer in ((stochastic, ours), (nearest, theirs)):
            tensor.grad = torch.ones_like(tensor)
            optimizer.step()
    assert torch.equal(nearest.data, torch.ones_like(nearest))
    # 20 000 weights of standard deviation about 0.0028: the mean is good to 2e-5
    assert stochastic.float().mean().item() == pytest.approx(1 - 200e-5, abs=1e-4)


def test_stochastic_rounding_is_unbiased_and_between_the_neighbours():
    generator = torch.Generator().manual_seed(0)
    for value in (1.001, -1.001, 3.1415927e-5, -65000.3, 0.0):
        source = torch.full((20000,), value)
        target = torch.empty(20000, dtype=torch.bfloat16)
        copy_stochastic_(target, source, generator=generator)
        neighbours = target.float().unique()
        assert len(neighbours) <= 2
        step = max(abs(value) * 2**-7, 1e-30)
        assert (neighbours - value).abs().max() <= step
        assert target.float().mean().item() == pytest.approx(value, abs=step * 0.02)


def test_stochastic_rounding_keeps_what_is_representable_and_infinities():
    source = torch.tensor([1.0, -2.5, 0.0, float("inf"), float("-inf")]).repeat(100)
    target = torch.empty(500, dtype=torch.bfloat16)
    copy_stochastic_(target, source, generator=torch.Generator().manual_seed(0))
    assert torch.equal(target.float(), source)


FORMATS = {
    "fp32": {"kind": Optimizer.ADAMW},
    "bf16-rounded": {"kind": Optimizer.ADAMW, "dtype": torch.bfloat16},
    "bf16-master": {"kind": Optimizer.ADAMW, "dtype": torch.bfloat16, "master_weights": True},
    "fp16-master": {"kind": Optimizer.ADAMW, "dtype": torch.float16, "master_weights": True},
    "bf16-state": {
        "kind": Optimizer.ADAMW,
        "dtype": torch.bfloat16,
        "state_format": StateFormat.BF16,
    },
    "8bit-bf16": {"kind": Optimizer.ADAMW_8BIT, "dtype": torch.bfloat16},
    "lion-8bit": {"kind": Optimizer.LION_8BIT, "dtype": torch.bfloat16},
    "paged-8bit": {"kind": Optimizer.PAGED_ADAMW_8BIT, "dtype": torch.bfloat16},
    "sgd": {"kind": Optimizer.SGD_MOMENTUM, "dtype": torch.bfloat16},
    "adafactor": {"kind": Optimizer.ADAFACTOR},
    "muon": {"kind": Optimizer.MUON, "shapes": ((20, 30),)},
}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
def test_resume_continues_bit_for_bit(options, tmp_path):
    """Through a file, into a new optimizer over new parameters: as a resumed run does."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    shapes = options.pop("shapes", ((80, 70), (33,)))
    straight = parameters(dtype, shapes)
    optimizer = make_optimizer(named(straight), lr=1e-3, weight_decay=0.1, seed=7, **options)
    train(optimizer, straight, 4)
    torch.save(
        {"weights": [tensor.detach() for tensor in straight], "state": optimizer.state_dict()},
        tmp_path / "saved.pt",
    )
    train(optimizer, straight, 4, start=4)

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = [nn.Parameter(tensor.clone()) for tensor in saved["weights"]]
    again = make_optimizer(named(resumed), lr=1e-3, weight_decay=0.1, seed=99, **options)
    again.load_state_dict(saved["state"])
    train(again, resumed, 4, start=4)
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


def test_loading_does_not_share_memory_with_the_saved_state():
    tensors = parameters(torch.bfloat16)
    optimizer = make_optimizer(named(tensors), kind=Optimizer.ADAMW, lr=1e-3, master_weights=True)
    train(optimizer, tensors, 1)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = make_optimizer(named(tensors), kind=Optimizer.ADAMW, lr=1e-3, master_weights=True)
    other.load_state_dict(saved)
    train(other, tensors, 2)
    assert torch.equal(saved["state"][0]["master"], kept["state"][0]["master"])


def test_another_optimizers_state_is_refused():
    tensors = parameters()
    adam = make_optimizer(named(tensors), kind=Optimizer.ADAMW, lr=1e-3)
    train(adam, tensors, 1)
    lion = make_optimizer(named(tensors), kind=Optimizer.LION, lr=1e-3)
    with pytest.raises(UsageError, match="another optimizer"):
        lion.load_state_dict(adam.state_dict())
    fewer = make_optimizer(named(tensors[:2]), kind=Optimizer.ADAMW, lr=1e-3)
    with pytest.raises(UsageError, match="3 parameters, the model trains 2"):
        fewer.load_state_dict(adam.state_dict())


@pytest.mark.parametrize("shapes", [((12, 2**20),), 48 * ((256, 1024),)], ids=["one", "many"])
def test_the_step_takes_bounded_scratch(shapes):
    """bf16 tensors of 12 million elements: fp32 copies of weights, gradients and moments would be 192 MiB."""
    tensors = parameters(torch.bfloat16, shapes)
    optimizer = make_optimizer(named(tensors), kind=Optimizer.ADAMW_8BIT, lr=1e-3)
    train(optimizer, tensors, 1)
    with StorageTracker() as tracker:
        for tensor in tensors:
            for known in (tensor, tensor.grad, *optimizer.state[tensor].values()):
                if isinstance(known, torch.Tensor):
                    tracker.adopt(known, term="known", module="")
        optimizer.step()
    live = peak = 0
    for event in tracker.events:
        if event.block.term != "known":
            live += event.block.bytes if event.alloc else -event.block.bytes
            peak = max(peak, live)
    chunk = elementwise_optimizer.CHUNK_ELEMENTS * 4
    assert chunk < peak <= 6 * chunk == 48 * MiB


def test_gradient_factor_applies_in_fp32():
    plain, scaled = parameters(torch.float16), parameters(torch.float16)
    optimizers = [
        make_optimizer(named(tensors), kind=Optimizer.SGD, lr=1.0, master_weights=True)
        for tensors in (plain, scaled)
    ]
    give_gradients(plain, 0)
    for tensor, other in zip(plain, scaled, strict=True):
        other.grad = tensor.grad * 1024
    optimizers[1].grad_factor = 1 / 1024
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(plain, scaled, rtol=0, atol=0)


def test_norm_and_clip():
    tensors = parameters(torch.bfloat16)
    give_gradients(tensors, 0)
    flat = torch.cat([tensor.grad.float().view(-1) for tensor in tensors])
    norm = gradient_norm(tensors, scale=8.0)
    assert norm == pytest.approx(flat.norm().item() / 8, rel=1e-5)
    assert clip_factor(norm, None) == 1.0
    assert clip_factor(2.0, 4.0) == 1.0
    assert clip_factor(8.0, 4.0) == 0.5
    assert gradient_norm([nn.Parameter(torch.zeros(2))]) == 0.0


def test_a_step_with_infinite_gradients_is_left_out_and_the_scale_halves():
    tensors = parameters(torch.float16)
    optimizer = make_optimizer(named(tensors), kind=Optimizer.ADAMW, lr=1e-2, master_weights=True)
    before = [tensor.detach().clone() for tensor in tensors]
    give_gradients(tensors, 0)
    tensors[1].grad[3] = float("inf")
    norm, stepped, scale = apply_step(optimizer, tensors, scale=LossScale(), max_norm=1.0)
    assert not math.isfinite(norm)
    assert not stepped
    assert scale.value == 32768.0
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert not optimizer.state


def test_the_loss_scale_grows_after_enough_good_steps():
    scale = LossScale(value=4.0, growth_interval=3)
    for _ in range(3):
        scale = scale.after_step(finite=True)
    assert scale == LossScale(value=8.0, growth_interval=3)
    assert NO_SCALE.after_step(finite=False).value == 1.0
    assert NO_SCALE.after_step(finite=True).value == 1.0


def test_clipping_and_scale_do_not_change_what_is_learnt():
    clipped, plain = parameters(), parameters()
    ours = make_optimizer(named(clipped), kind=Optimizer.SGD, lr=1.0)
    give_gradients(clipped, 0)
    norm = gradient_norm(clipped)
    for tensor in clipped:
        tensor.grad *= 64.0
    found, stepped, _ = apply_step(ours, clipped, scale=LossScale(value=64.0), max_norm=norm / 2)
    assert stepped
    assert found == pytest.approx(norm, rel=1e-5)
    give_gradients(plain, 0)
    for tensor in plain:
        tensor.data -= tensor.grad / 2
    torch.testing.assert_close(clipped, plain)


@pytest.mark.parametrize("kind", list(Optimizer))
def test_every_kind_lowers_a_loss(kind):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(70, 70))
    optimizer = make_optimizer([("w", weight)], kind=kind, lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.99


@pytest.mark.parametrize(
    ("kind", "dtype", "error", "message"),
    [
        (Optimizer.ADAMW, torch.float16, UsageError, "fp16 weights need master_weights"),
        (Optimizer.ADAFACTOR, torch.bfloat16, UnsupportedError, "adafactor"),
        (Optimizer.MUON, torch.float32, UnsupportedError, "matrices only"),
        (Optimizer.ADAMW, torch.float64, UsageError, "float64"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused(kind, dtype, error, message):
    with pytest.raises(error, match=message):
        make_optimizer(named(parameters(dtype)), kind=kind, lr=1e-3)


def test_nothing_to_train_is_said():
    with pytest.raises(UsageError, match="nothing to train"):
        make_optimizer([], kind=Optimizer.ADAMW, lr=1e-3)
