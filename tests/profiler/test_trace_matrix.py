"""The analytic plan against the trace: families x methods x checkpointing x shapes."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.run.recipe import Method
from profiler.trace_matrix import (
    FAMILIES,
    GROUPED_EXPERTS,
    METHODS,
    cases,
    disagreements,
    run_case,
)


@pytest.fixture(autouse=True, scope="module")
def modules_are_not_searched() -> Iterator[None]:
    """Each trace collects cycles by hand: only its own objects are worth looking at."""
    import profiler.trace  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_matrix_is_wide() -> None:
    assert len(FAMILIES) >= 12
    assert len(METHODS) == 3
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    assert [family for family in FAMILIES if family not in page] == []
    assert len(cases(FAMILIES[0], Method.FULL)) == 6


OPEN = {
    "pythia-160m": "GPT-NeoX: forward or backward activations up to 8.5 % high, totals within 2.3 %",
    "qwen3-30b-a3b": "grouped experts: forward activations up to 8 % low, totals within 0.2 %",
    "olmoe-1b-7b": "grouped experts, as qwen3-30b-a3b; the forward phase's total up to 3.1 % low",
}
"""Terms that the analytic plan still misses; a family that agrees again must leave this list."""

OPEN_TOTALS = {"olmoe-1b-7b": ("forward total:",)}
"""Phases, never the peak, whose total is beyond 3 % too."""


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_and_trace_agree(family: str, method: Method) -> None:
    if method is Method.QLORA and family in GROUPED_EXPERTS:
        pytest.skip("torch's grouped matmul takes bf16 only, k-bit preparation makes it fp32")
    wrong = {
        case.label: [
            f"{cell.phase} {cell.term}: planned {cell.planned_bytes} traced {cell.measured_bytes}"
            for cell in disagreements(run_case(case))
        ]
        for case in cases(family, method)
    }
    found = {label: cells for label, cells in wrong.items() if cells}
    if found and family in OPEN:
        known = OPEN_TOTALS.get(family, ())
        totals = [c for cells in found.values() for c in cells if " total:" in c]
        assert not [cell for cell in totals if not cell.startswith(known or "no phase")], found
        pytest.xfail(OPEN[family])
    assert not found
