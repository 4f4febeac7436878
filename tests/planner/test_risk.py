"""The risk of a plan: distributions by hand, groups that are too small, a calibration that is fresh."""

import pytest

from planner.accuracy.calibrate import fingerprint, recorded_fingerprint
from planner.errors import UsageError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_names
from planner.models.hub import find_model
from planner.plan import MOST_NEEDED, plan
from planner.risk import EVEN, TAIL, Ratio, choose, ratios
from planner.run.recipe import Recipe
from planner.units import GiB


def rows(source, family, values, kind="train", quantity="allocated"):
    return [
        Ratio(f"{source}{index}", source, kind, family, quantity, value)
        for index, value in enumerate(values)
    ]


def test_shares_above_and_quantiles_by_hand():
    # ten rows of one source, 0.91 .. 1.00: each weighs a tenth
    found = choose(
        rows("a", "f", [round(0.90 + i / 100, 2) for i in range(1, 11)]), "allocated", "train", "f"
    )
    assert found.above(0.95) == pytest.approx(0.5)
    assert found.above(1.0) == 0
    assert found.above(0.5) == 1
    assert found.quantile(0.05) == pytest.approx(0.91)
    assert found.quantile(0.95) == pytest.approx(1.0)
    assert found.quantile(0.5) == pytest.approx(0.95)


def test_one_laboratory_counts_as_thirty_rows():
    # 300 rows at 1.0 weigh as 30, so 30 rows at 1.2 of another source are half of the weight
    both = rows("big", "f", [1.0] * 300) + rows("small", "f", [1.2] * 30)
    assert choose(both, "allocated", "train", "f").above(1.1) == pytest.approx(0.5)


def test_a_group_of_too_few_rows_or_sources_hands_over():
    family = [row for source in "abc" for row in rows(source, "known", [1.0] * 10)]
    others = [row for source in "de" for row in rows(source, "other", [1.5] * 30)]
    assert choose(family + others, "allocated", "train", "known").above(1.2) == 0
    # two sources only: the kind's runs speak, 20 at 1.0 and 60 at 1.5
    fewer = [row for row in family if row.source != "c"]
    found = choose(fewer + others, "allocated", "train", "known")
    assert found.above(1.2) == pytest.approx(60 / 80)


def test_a_framework_that_was_never_measured_takes_every_source_alike():
    read = rows("big", "f", [1.0] * 90) + rows("odd", "g", [1.4])
    found = choose(read, "allocated", "train", "new")
    assert "never measured" in found.basis
    assert found.above(1.2) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def run():
    return find_model("llama-3.1-8b"), Recipe(method="lora", context=4096, micro_batch_size=4)


def test_less_memory_never_lowers_the_risk(run):
    sizes = (12, 16, 18, 20, 21, 22, 24, 32, 80)
    risks = [plan(*run, make_machine(vram=f"{size}GiB")).risk.p_oom for size in sizes]
    assert risks == sorted(risks, reverse=True)
    assert risks[0] == 1.0
    assert risks[-1] == 0.0


def test_the_verdict_follows_the_risk_allowed(run):
    need = plan(*run, make_machine(vram="80GiB")).needed_bytes
    context = plan(*run, make_machine(vram="80GiB")).machine.context_bytes
    machine = make_machine(vram=int(1.03 * need) + context)
    p_oom = plan(*run, machine).risk.p_oom
    assert TAIL < p_oom < EVEN
    assert plan(*run, machine).verdict == "tight"
    assert not plan(*run, machine).fits
    allowed = plan(*run, machine, risk=0.49)
    assert (allowed.verdict, allowed.fits) == ("fits", True)
    assert plan(*run, make_machine(vram=int(0.97 * need) + context)).verdict == "does not fit"


@pytest.mark.parametrize("risk", [0, 0.5, 1, -0.1])
def test_a_risk_outside_its_range_is_refused_by_name(run, risk):
    with pytest.raises(UsageError, match="is not allowed"):
        plan(*run, make_machine(vram="80GiB"), risk=risk)


def test_low_and_high_hold_the_typical_pool(run):
    result = plan(*run, make_machine(vram="80GiB"))
    assert result.low_bytes < result.reserved_peak_bytes < result.high_bytes
    assert result.peak_bytes <= result.needed_bytes <= result.reserved_peak_bytes
    assert result.to_dict()["risk"] == {
        "p_oom": 0.0,
        "basis": result.risk.basis,
        "allowed": TAIL,
    }


def test_no_run_needs_twice_what_is_alive():
    names = [name for name in catalogue_names() if find_model(name).parameters < 9e9][:25]
    for name in names:
        for method in ("full", "lora"):
            recipe = Recipe(method=method, context=2048, framework="hf-trainer")
            result = plan(find_model(name), recipe, make_machine(vram="500GiB"))
            assert result.needed_bytes <= MOST_NEEDED * result.peak_bytes, (name, method)


def test_the_calibration_was_made_with_these_formulas():
    assert recorded_fingerprint() == fingerprint(), "run: make calibrate"


def test_the_calibration_names_rows_of_several_sources():
    assert len({row.source for row in ratios()}) >= 8
    assert all(0.1 < row.ratio < 10 and row.id for row in ratios())


def test_the_shipped_ratios_are_recent_plans(run):
    result = plan(*run, make_machine(vram="24GiB"))
    assert result.peak_bytes > GiB
    assert "rows" in result.risk.basis
