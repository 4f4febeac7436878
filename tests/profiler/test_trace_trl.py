"""The GRPO subjects against TRL's own loss code, run on the same fake tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.models.catalogue import load_catalogue
from planner.run.recipe import Method
from profiler.cuda_behaviour import CudaBehaviour
from profiler.storages import StorageTracker
from profiler.subjects.loss_heads import FusedHead, selective_log_softmax
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import TrlGrpo, policy_loss
from profiler.trace import trace

trl_utils = pytest.importorskip("trl.trainer.utils")
kernels = pytest.importorskip("trl.kernels.chunked_logprob")

ROWS, LENGTH, HIDDEN, VOCAB = 2, 300, 64, 40_000


def sizes(run: Any) -> list[int]:
    """Return the byte events of `run(tracker)` on fake tensors."""
    tracker = StorageTracker()
    with FakeTensorMode(), tracker, CudaBehaviour(tracker):
        before = run(tracker)
    events = tracker.events[before:]
    return [event.block.bytes if event.alloc else -event.block.bytes for event in events]


def peak(events: list[int]) -> int:
    total = highest = 0
    for size in events:
        total += size
        highest = max(highest, total)
    return highest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_full_logits_head_is_trls(dtype: torch.dtype) -> None:
    """The 0.14-0.17 law: every allocation of TRL's selective_log_softmax, forward and backward."""

    def through(function: Any) -> list[int]:
        def run(tracker: StorageTracker) -> int:
            logits = torch.empty(ROWS, LENGTH, VOCAB, dtype=dtype, requires_grad=True)
            targets = torch.zeros(ROWS, LENGTH, dtype=torch.long)
            before = len(tracker.events)
            function(logits, targets).sum().backward()
            return before

        return sizes(run)

    mine, theirs = through(selective_log_softmax), through(trl_utils.selective_log_softmax)
    large = 100_000
    assert [s for s in mine if abs(s) > large] == [s for s in theirs if abs(s) > large]
    assert peak(mine) == pytest.approx(peak(theirs), rel=1e-4)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_fused_head_is_trls(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    """TRL's ChunkedLogProbFunction with its Triton kernels, which allocate nothing, taken out."""
    monkeypatch.setattr(kernels, "_forward_tile", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "_backward_tile", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "_addmm_fp32", lambda *_: None)
    rows = ROWS * LENGTH

    def theirs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = kernels.ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("log_probs", "entropy")
        )[0]
        return result

    def mine(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = FusedHead.apply(hidden, weight, targets)[0]
        return result

    def through(function: Any) -> list[int]:
        def run(tracker: StorageTracker) -> int:
            hidden = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, requires_grad=trained)
            targets = torch.zeros(rows, dtype=torch.long)
            before = len(tracker.events)
            function(hidden, weight, targets).sum().backward()
            return before

        return sizes(run)

    assert peak(through(mine)) == pytest.approx(peak(through(theirs)), rel=0.01)


def test_policy_loss_is_trls_in_size() -> None:
    """[B, T] arithmetic is small beside one logit row: it must not dominate a trace."""

    def run(tracker: StorageTracker) -> int:
        logp = torch.empty(ROWS, LENGTH, requires_grad=True)
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        before = len(tracker.events)
        policy_loss(logp, None, torch.zeros(ROWS), mask).backward()
        return before

    assert peak(sizes(run)) < 20 * ROWS * LENGTH * 4


LLAMA = load_catalogue()["llama-3.1-8b"]["config"]
LONG = StepOptions(config=LLAMA, micro_batch=8, length=20480, layers=2, steps=1)


def bytes_per_logit(recording: Any) -> float:
    loss = next(phase for phase in recording.phases if phase.name == "loss")
    return loss.terms_bytes["logits"] / (8 * 20479 * 128256)


def test_bytes_per_logit_of_each_head() -> None:
    """8 x 20,480 tokens, V = 128,256: 12 and 4 bytes a logit in a real engine, 16 as modes count."""
    fp32 = TrlGrpo(replace(LONG, fp32_outputs=True), fused=False)
    assert bytes_per_logit(trace(fp32)) == pytest.approx(12, rel=0.005)
    assert bytes_per_logit(trace(fp32, in_place=False)) == pytest.approx(16, rel=0.005)
    assert bytes_per_logit(trace(TrlGrpo(LONG, fused=False))) == pytest.approx(4, rel=0.005)
    assert bytes_per_logit(trace(TrlGrpo(LONG, fused=True))) < 0.3


def test_score_pass_has_no_graph() -> None:
    options = replace(LONG, micro_batch=1, length=2048, method=Method.LORA)
    recording = trace(TrlGrpo(options, fused=True, score=True))
    phases = {phase.name: phase for phase in recording.phases}
    assert "score" in phases
    assert phases["score"].peak_bytes < phases["backward"].peak_bytes
