from pathlib import Path

import pytest

from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.runfile import machine_of
from trainer.config import read_run

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_run_that_fits(path):
    run, train = read_run(path)
    assert train.steps > 1
    name = run.model.split("/")[-1].lower().removesuffix("-instruct")
    planned = plan(catalogue_model(name), run.recipe, machine_of(run.machine))
    assert planned.fits, planned.why
