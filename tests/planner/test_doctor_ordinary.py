"""What the doctor takes for ordinary is what the public messages say: read again here."""

import json
import math

import pytest

from benchmarks.doctor import case_text, load
from planner.datafiles import data_dir
from planner.doctor.budget import Budget, foreign_bytes, ordinary, read_budget
from planner.doctor.diagnose import diagnose
from planner.doctor.scan import scan
from planner.units import GiB, MiB


@pytest.fixture(scope="module")
def budgets() -> dict[str, Budget]:
    """Return what the messages of data/doctor print, by case."""
    found = {}
    for case in load("oom_cases.jsonl"):
        for event in scan(case_text(case)).errors:
            budget = read_budget(event)
            if budget is not None:
                found.setdefault(case["id"], budget)
    return found


def rows(name: str) -> list[str]:
    """Return the cases a constant says it was read from."""
    text = (data_dir() / "calibration" / "doctor.json").read_text(encoding="utf-8")
    found: list[str] = json.loads(text)["constants"][name]["rows"]
    return found


def test_the_largest_context_of_complete_messages(budgets: dict[str, Budget]) -> None:
    seen = {name: each.context_bytes for name, each in budgets.items() if each.context_bytes}
    assert rows("context_bytes") == sorted(seen)
    assert ordinary("context_bytes") == max(seen.values())


def test_the_unused_share_of_two_failed_runs_in_three(budgets: dict[str, Budget]) -> None:
    seen = {
        name: each.unallocated_bytes / each.total_bytes
        for name, each in budgets.items()
        if each.unallocated_bytes is not None and each.total_bytes
    }
    assert rows("unused_share") == sorted(seen)
    share = sorted(seen.values())[math.ceil(len(seen) * 2 / 3) - 1]
    assert ordinary("unused_share") == pytest.approx(share, rel=1e-9)


def message(*, free: float, allocated: float, unused: float, tried: float = 2) -> str:
    """Return torch's message of a card of 80 GiB."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a total capacity of "
        f"80.00 GiB of which {free:.2f} GiB is free. Of the allocated memory {allocated:.2f} GiB is allocated by "
        f"PyTorch, and {unused:.2f} GiB is reserved by PyTorch but unallocated."
    )


@pytest.mark.parametrize(
    ("unused", "decides"),
    [(2.1, True), (2.0, False)],  # 2.583% of 80 GiB are 2.067
)
def test_more_unused_memory_than_is_ordinary_is_fragmentation(unused: float, decides: bool) -> None:
    (failure,) = diagnose(message(free=0.5, allocated=75, unused=unused)).failures
    assert failure.budget is not None
    assert failure.budget.fragmentation_decides is decides


@pytest.mark.parametrize(("allocated", "foreign"), [(77.0, 0.0), (70.0, 8.5)])
def test_more_than_any_context_is_somebody_elses(allocated: float, foreign: float) -> None:
    # 1.5 GiB beyond torch may be a context; 8.5 are more than any
    (failure,) = diagnose(message(free=0.5, allocated=allocated, unused=1)).failures
    assert failure.budget is not None
    assert foreign_bytes(failure.budget) == pytest.approx(foreign * GiB, abs=MiB)


@pytest.mark.parametrize(("allocated", "own"), [(45.0, True), (20.0, False)])
def test_own_tensors_are_to_blame_when_they_are_the_largest_part(
    allocated: float, own: bool
) -> None:
    text = message(free=1, allocated=allocated, unused=25)
    (failure,) = diagnose(text).failures
    said = any("own tensors hold" in cause.explanation for cause in failure.causes)
    assert said is own


RUN = "\nmodel: Qwen/Qwen2.5-7B\nLoRA\nper_device_train_batch_size: 8\nmax_seq_length: 8192\n"


@pytest.mark.parametrize(
    ("said", "law", "assumed"),
    [
        ("trl==1.9.2\ntransformers==4.50.0", "trl-1.9", False),
        ("Unsloth 2025.3.19: Fast Qwen2 patching", "unsloth-2025.1", False),
        ("transformers==4.49.0", "hf-trainer-4.49", False),
        ("axolotl==0.29.0", "axolotl", False),
        ("trl>=0.14", "hf-trainer", True),  # a lower bound pins nothing
    ],
)
def test_the_failed_run_is_planned_under_the_framework_it_states(
    said: str, law: str, assumed: bool
) -> None:
    text = (
        said + RUN + "CrossEntropyLoss\n" + message(free=0.5, allocated=77, unused=0.5, tried=18.6)
    )
    (failure,) = diagnose(text).failures
    assert failure.planned is not None
    assert failure.planned.plan.resolved.framework.name == law
    assert failure.planned.assumed.startswith("framework hf-trainer") is assumed
