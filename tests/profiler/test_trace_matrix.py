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
    assert not found
