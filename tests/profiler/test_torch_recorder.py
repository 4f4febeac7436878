"""The recorder in process: phases, terms to the byte, bounded memory, hooks that go away."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner.errors import UsageError
from profiler.follower import Follower
from profiler.startup import vramwise_meters as meters
from profiler.startup.vramwise_phases import PhaseTracker
from profiler.torch_recorder import record

WEIGHT = 512 * 512 * 4


def loop(steps: int, *, model: Any = None) -> tuple[Any, Any]:
    model = model or torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(16, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_terms_of_a_followed_loop_are_exact_to_the_byte() -> None:
    model = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(model, optimizer, follow=True) as live:
        train(model, optimizer, 2)
    recording = live.recording
    phases = {phase.name: phase for phase in recording.phases}
    assert not recording.partial
    assert phases["forward"].terms_bytes["weights"] == WEIGHT
    assert phases["forward"].terms_bytes["optimizer"] == 2 * WEIGHT + 512  # the step counter
    assert phases["step"].terms_bytes["gradients"] == WEIGHT
    for phase in recording.phases:
        assert sum(phase.terms_bytes.values()) == phase.peak_bytes
    assert recording.peak_bytes == max(phase.peak_bytes for phase in recording.phases)
    assert recording.environment["steps"] == 2


def test_the_hooks_and_patches_are_gone_afterwards() -> None:
    module = torch.nn.modules.module
    before = (
        len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks),
        torch.autograd.backward,
        torch.nn.utils.clip_grad_norm_,
    )
    with record(follow=True):
        loop(1)
    after = (
        len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks),
        torch.autograd.backward,
        torch.nn.utils.clip_grad_norm_,
    )
    assert after == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("follow", [False, True])
def test_a_recording_that_has_ended_holds_neither_model_nor_optimizer(follow: bool) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    held = weakref.ref(model), weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        with record(model, optimizer, follow=follow) as live:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert live.recording.peak_bytes > 0
        del model, optimizer
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


def test_an_error_inside_keeps_what_was_recorded_and_says_partial() -> None:
    class Boom(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if calls.append(1) or len(calls) > 1:
                raise RuntimeError("boom")
            return super().forward(x)

    calls: list[int] = []
    model = Boom(512, 512, bias=False)
    with pytest.raises(RuntimeError, match="boom"), record(follow=True) as live:
        loop(2, model=model)
    assert live.recording.partial
    assert live.recording.peak_bytes >= 4 * WEIGHT


def test_memory_of_the_recorder_does_not_grow_with_the_run() -> None:
    with record(follow=True) as live:
        model, optimizer = loop(3)
        follower = live._follower
        assert follower is not None
        early = len(follower.storages.events) + len(follower.events)
        train(model, optimizer, 30)
        late = len(follower.storages.events) + len(follower.events)
    assert late <= early * 1.5


def test_phases_can_be_marked_by_hand() -> None:
    with record(follow=True) as live:
        with live.phase("rollout"):
            model, optimizer = loop(0)
            with torch.no_grad():
                model(torch.randn(4, 512))
        train(model, optimizer, 1)
    names = {phase.name for phase in live.recording.phases}
    assert {"rollout", "forward", "backward", "step"} <= names
    assert "score" not in names
    with pytest.raises(UsageError, match="'nap' is not one of"), live.phase("nap"):
        pass


def test_totals_without_following_split_what_has_an_owner() -> None:
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(model, optimizer, follow=False) as live:
        for _ in range(2):
            model(torch.randn(16, 2048)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    phases = {phase.name: phase for phase in live.recording.phases}
    weight = 2048 * 2048 * 4
    assert phases["step"].terms_bytes["weights"] == weight
    assert phases["step"].terms_bytes["gradients"] == weight
    assert phases["step"].terms_bytes["optimizer"] == 2 * weight + 4
    assert phases["step"].peak_bytes >= 4 * weight
    assert live.recording.largest == ()


def test_adapters_quantisation_tables_and_frozen_weights_are_told_apart() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(512, 512, bias=False).requires_grad_(False)
            self.lora_A = torch.nn.Linear(512, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x).sum() + self.lora_A(x).sum()

    model = Adapted()
    terms = meters.static_terms([model], [])
    assert terms == {"weights": WEIGHT, "adapters": 8 * 512 * 4}
    # a tied or shared storage counts once
    assert meters.static_terms([model, model.base], []) == terms


def test_a_head_and_its_loss_are_the_loss_phase_also_in_backward() -> None:
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.layer(x).relu(),)

    class Model(torch.nn.Module):
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__()
            self.model = Decoder()
            self.lm_head = torch.nn.Linear(64, 5000, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.model(x)[0])

    model = Model()
    order: list[tuple[str, str]] = []
    tracker = PhaseTracker(lambda old, new: order.append((old, new)))
    tracker.install(torch)
    try:
        torch.nn.functional.cross_entropy(
            model(torch.randn(8, 64)), torch.zeros(8).long()
        ).backward()
    finally:
        tracker.remove()
    assert order == [
        ("load", "forward"),
        ("forward", "loss"),
        ("loss", "backward"),
        ("backward", "other"),
    ]


def test_recomputed_forwards_are_backward_and_their_early_stop_does_not_confuse() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False).sum()

    order: list[str] = []
    tracker = PhaseTracker(lambda old, new: order.append(new))
    tracker.install(torch)
    try:
        model = Model()
        for _ in range(2):
            model(torch.randn(4, 32)).backward()
    finally:
        tracker.remove()
    assert order == ["forward", "loss", "backward", "other"] * 2


def test_an_exception_in_a_forward_leaves_the_depth_right() -> None:
    class Fails(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            raise ValueError("no")

    order: list[str] = []
    tracker = PhaseTracker(lambda old, new: order.append(new))
    tracker.install(torch)
    try:
        with pytest.raises(ValueError, match="no"):
            Fails()(torch.randn(2, 4))
        with torch.no_grad():
            torch.nn.Linear(4, 4)(torch.randn(2, 4))
    finally:
        tracker.remove()
    assert order[-2:] == ["score", "other"]


def test_a_loss_module_without_parameters_is_no_pass_of_a_model() -> None:
    order: list[str] = []
    tracker = PhaseTracker(lambda old, new: order.append(new))
    tracker.install(torch)
    try:
        torch.nn.CrossEntropyLoss()(torch.randn(2, 4, requires_grad=True), torch.zeros(2).long())
    finally:
        tracker.remove()
    assert order == []


def test_a_second_patch_on_top_of_ours_survives() -> None:
    tracker = PhaseTracker(lambda old, new: None)
    original = torch.autograd.backward
    tracker.install(torch)
    ours = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        tracker.remove()
        assert torch.autograd.backward is theirs
    finally:
        torch.autograd.backward = original


def on_a_gpu(mode: FakeTensorMode, *shape: int) -> torch.Tensor:
    """Return a tensor without data that says "cuda:0": a CPU build can run forward code on it."""
    return FakeTensor(mode, torch.empty(*shape, device="meta"), torch.device("cuda", 0))


def test_following_a_gpu_program_follows_the_gpu() -> None:
    """What is made on the CPU before and beside it is host memory."""
    with FakeTensorMode() as mode, record(follow=True) as live, torch.no_grad():
        loaded = torch.zeros(3000)
        with live.phase("forward"):
            hidden = on_a_gpu(mode, 4, 64) @ on_a_gpu(mode, 64, 1024)
            batch = torch.zeros(2000)
            del batch
        with live.phase("step"):
            hidden = hidden.relu()
    recording = live.recording
    assert recording.environment["method"] == "cuda storages followed"
    size = 4 * 1024 * 4
    assert [(phase.name, phase.peak_bytes) for phase in recording.phases] == [
        ("forward", size),
        ("step", 2 * size),
    ]
    assert recording.largest[0].shape == (4, 1024)
    assert {tensor.op for tensor in recording.largest} == {"aten.mm.default", "aten.relu.default"}
    assert live._follower is not None
    assert live._follower.host_peak_bytes == 12_288 + 8_192  # 3,000 and 2,000 floats, in 512 bytes
    del loaded, hidden


def test_a_recording_survives_the_disk(tmp_path: Path) -> None:
    with record(follow=True) as live:
        loop(1)
    live.recording.save(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["peak_bytes"] == live.recording.peak_bytes
    assert not (tmp_path / "r.json.part").exists()
    gc.collect()


def test_a_recorder_inside_a_followed_program_leaves_the_outer_follower_working() -> None:
    """`profile run --follow` of a program that records itself: modes end in any order."""
    tracker = PhaseTracker(lambda old, new: None)
    outer = Follower(tracker)
    outer.start()
    try:
        with record(follow=True) as live:
            loop(1)
        kept = torch.zeros(5000)
        assert outer.storages.block_of(kept) is not None
    finally:
        outer.stop()
    assert live.recording.peak_bytes > 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_loop_that_marks_its_own_phases_is_followed() -> None:
    from contextlib import contextmanager

    class Memory:
        @contextmanager
        def __call__(self, phase: str) -> Any:
            yield phase

    order: list[str] = []
    tracker = PhaseTracker(lambda old, new: order.append(new))
    tracker.wrap_marker(Memory, "__call__")
    with Memory()("rollout") as value:
        assert value == "rollout"
    tracker.remove()
    with Memory()("score"):
        pass
    assert order == ["rollout", "other"]


def test_a_parameter_that_an_optimizer_touched_first_is_still_a_weight() -> None:
    model = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(follow=True) as live:
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        train(model, optimizer, 1)
    phases = {phase.name: phase for phase in live.recording.phases}
    assert phases["forward"].terms_bytes["weights"] == WEIGHT
    assert phases["forward"].terms_bytes["optimizer"] == 2 * WEIGHT + 512


def test_a_compiled_model_stays_one_graph_and_is_told_apart_all_the_same() -> None:
    import warnings

    order: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    tracker = PhaseTracker(lambda old, new: order.append(new))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.install(torch)
        try:
            # fullgraph: a break in the graph by our hooks would be an error
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            for _ in range(2):
                compiled(torch.randn(4, 8)).sum().backward()
        finally:
            tracker.remove()
            torch._dynamo.reset()
    assert order == ["forward", "loss", "backward", "other"] * 2
