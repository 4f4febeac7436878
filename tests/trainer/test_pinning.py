"""Optimizer state in host memory where the system does not pin it."""

import pytest
import torch

from planner.run.engine_choices import usual_sleep
from planner.run.recipe import EngineKind, Method
from trainer import elementwise_optimizer as offloaded

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this system pins")
def test_state_is_pageable_where_pinning_fails_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offloaded._Pinning, "refused", False)
    for numel in (1_024, 2_048):
        # a torch without a GPU has nothing to pin for: it refuses for real
        state = offloaded._zeros(numel, torch.float32, CPU, pin=True)
        assert state.shape == (numel,)
        assert not state.any()
        assert not state.is_pinned()
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("optimizer offload: 4.00 KiB of host memory could not be pinned")
    assert said[0].endswith("steps are slower, results the same")


def test_nothing_is_said_where_nothing_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    offloaded._zeros(1_024, torch.float32, CPU, pin=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "method", "level"),
    [
        (EngineKind.VLLM_PUSH, Method.FULL, 2),
        (EngineKind.VLLM_PUSH, Method.LORA, 1),
        (EngineKind.VLLM_SHARED, Method.FULL, 1),
    ],
)
def test_the_plan_and_the_trainer_sleep_by_one_rule(
    kind: EngineKind, method: Method, level: int
) -> None:
    assert usual_sleep(kind, method) == level
