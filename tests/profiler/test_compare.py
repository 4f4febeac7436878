"""Plan and recording side by side."""

import pytest

from planner.machines.machine import Machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.run.recipe import Method, Recipe, Task
from planner.units import GiB
from profiler.compare import compare, to_text
from profiler.recording import Recording
from profiler.recording_parts import PhaseRecord


@pytest.fixture
def planned() -> Plan:
    recipe = Recipe(
        task=Task.SFT, method=Method.LORA, framework="hf-trainer", micro_batch_size=2, context=512
    )
    return plan(catalogue_model("llama-3.2-1b"), recipe, Machine(vram_bytes=80 * GiB))


def recorded(planned: Plan, *, factor: float = 1.0, terms: bool = True) -> Recording:
    phases = tuple(
        PhaseRecord(
            name=phase.name,
            peak_bytes=int(phase.total_bytes * factor),
            terms_bytes={t.name: int(t.bytes * factor) for t in phase.terms} if terms else {},
        )
        for phase in planned.phases
    )
    peak = max(phases, key=lambda phase: phase.peak_bytes)
    return Recording(
        source="trace",
        subject="hf-sft",
        environment={},
        phases=phases,
        peak_bytes=peak.peak_bytes,
        peak_phase=peak.name,
    )


def test_equal_sides_have_no_error(planned: Plan) -> None:
    result = compare(planned, recorded(planned))
    assert all(cell.error == 0 for cell in (*result.cells, *result.totals, result.peak))
    assert result.planned_phase == result.measured_phase == planned.peak_phase


def test_error_is_the_plans(planned: Plan) -> None:
    result = compare(planned, recorded(planned, factor=0.5))
    assert result.peak.error == pytest.approx(1.0, abs=1e-6)
    assert result.cell("load", "weights").error == pytest.approx(1.0, abs=1e-6)


def test_a_phase_only_one_side_has(planned: Plan) -> None:
    measured = recorded(planned)
    rollout = PhaseRecord(name="rollout", peak_bytes=7, terms_bytes={"kv_cache": 7})
    wider = Recording(
        **{
            **{name: getattr(measured, name) for name in measured.__dataclass_fields__},
            "phases": (*measured.phases[1:], rollout),
        }
    )
    result = compare(planned, wider)
    totals = {cell.phase: cell for cell in result.totals}
    assert totals["load"].measured_bytes is None
    assert totals["load"].error is None
    assert totals["rollout"].planned_bytes is None
    assert [cell.phase for cell in result.totals][:2] == ["load", "rollout"]


def test_a_recording_without_terms_has_totals(planned: Plan) -> None:
    result = compare(planned, recorded(planned, terms=False))
    assert result.cell("load", "weights").measured_bytes is None
    assert all(cell.error == 0 for cell in result.totals)


def test_text_and_document(planned: Plan) -> None:
    result = compare(planned, recorded(planned))
    text = to_text(result)
    for phase in planned.phases:
        assert phase.name in text
    assert "peak phase" in text
    document = result.to_dict()
    assert document["schema_version"] == 1
    assert document["planned_peak_bytes"] == planned.peak_bytes
    assert {row["phase"] for row in document["phases"]} == {p.name for p in planned.phases}
    assert all(isinstance(row["planned_bytes"], int) for row in document["terms"])
