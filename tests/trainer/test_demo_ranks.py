"""The demo on several ranks: curves beside each other, and whether one is within the others' spread."""

from pathlib import Path

import pytest

from trainer.config import parse_run
from trainer.demo import demo_document
from trainer.demo_model import DemoModel
from trainer.demo_ranks import Comparison, run_demo_ranks


def rising(end, count=40):
    return [end * step / (count - 1) for step in range(count)]


def test_curves_stand_beside_each_other_and_the_spread_decides():
    one = [rising(0.9), rising(0.92), rising(0.94)]
    found = Comparison(one, rising(0.91))
    table = found.table(2).splitlines()
    assert " ".join(table[0].split()) == "steps seed 0 seed 1 seed 2 2 ranks, seed 0"
    assert len(table) == 11
    assert table[-1].split()[:5] == ["37-40", "0.865", "0.885", "0.904", "0.875"]
    # 0.01 of the last tenth's 0.96 apart, seeds 0.04 of the middle's 0.5
    assert (found.equal, found.apart, found.spread) == (
        1,
        pytest.approx(0.01 * 37.5 / 39),
        pytest.approx(0.02),
    )
    for end, inside in ((0.9, True), (0.91, True), (0.7, False), (1.1, False)):
        found = Comparison(one, rising(end))
        assert found.within is inside, end
        assert ("NOT within" in found.sentence(2)) is not inside
    assert Comparison(one, one[0]).equal == 40


def test_what_the_ranks_are_given_is_the_demo_divided(small_model, tmp_path):
    chosen = DemoModel(
        name="small",
        path=small_model,
        method="full",
        lr=1e-4,
        steps=20,
        prompts=4,
        examples=0,
        temperature=1.0,
    )
    document = demo_document(chosen, output=tmp_path / "out", steps=20, seed=0)
    document["recipe"]["sharding"] = "fsdp2"
    run, train = parse_run(document, root=Path.cwd())
    assert (str(run.recipe.sharding), train.steps) == ("fsdp2", 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ranks")
def test_two_ranks_learn_as_one_does(tmp_path):
    report = run_demo_ranks(
        output=tmp_path / "demo", steps=40, model="small", nproc=2, say=lambda text: None
    )
    assert report["within"], report
    assert report["ranks"][:5] == pytest.approx(report["one_rank"][0][:5], abs=1e-6)
