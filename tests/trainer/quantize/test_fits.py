"""The most bytes whose plan fits: between the least and 16 bits, and never past the card."""

from dataclasses import replace

import pytest
import torch

from planner.errors import UsageError
from planner.machines.machine import make_machine
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.units import MiB
from trainer.quantize.bnb import BitsAndBytes
from trainer.quantize.choice import choose, curve, groups
from trainer.quantize.files import fixed_bytes
from trainer.quantize.harm import Candidate, Linear
from trainer.quantize.job import most_that_fits, spec_of
from trainer.quantize.streamed import Streamed
from trainer.small_model import make_small_model

RECIPE = Recipe(task="sft", method="qlora", context=64, framework="vramwise")


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    """Return a model of 8 M parameters, its groups with harms that fall by layer, and the fixed bytes."""
    folder = tmp_path_factory.mktemp("fits") / "model"
    source = make_small_model(folder, hidden=256, intermediate=512, layers=12)
    model, form, linears = Streamed(source, device=torch.device("cpu")), BitsAndBytes(), []
    for index in range(len(model.layers)):
        for name, module in model.linears(index).items():
            rows, columns = module.weight.shape
            made = [
                Candidate("bnb", block, form.scheme(block).bytes(rows, columns), harm, "")
                for block, harm in ((64, 2.0 / (index + 1)), (32, 1.5 / (index + 1)))
            ]
            linears.append(Linear(name, rows, columns, tuple(made)))
    return model, groups(linears, form, 2), fixed_bytes(model, linears, 2)


def test_it_is_the_last_point_of_the_curve_that_fits(choices):
    model, parts, fixed = choices

    def planned(choice, machine):
        spec = spec_of(model, choice, BitsAndBytes(), torch.bfloat16)
        return plan(spec, RECIPE, machine)

    sizes = [point.bytes for point in curve(parts, fixed)]
    ends = [choose(parts, fixed, size) for size in (sizes[0], sizes[-1])]

    def verdicts(machine):
        return [planned(end, machine).verdict == "fits" for end in ends]

    machines = [
        replace(make_machine(vram=mebibytes * MiB), context_bytes=0)
        for mebibytes in range(20, 400, 4)
    ]
    roomy = next(each for each in machines if verdicts(each) == [True, True])
    everything = most_that_fits(parts, fixed, lambda each: planned(each, roomy), "roomy")
    assert everything.bytes == sizes[-1]
    small = next(each for each in machines if verdicts(each) == [True, False])
    some = most_that_fits(parts, fixed, lambda each: planned(each, small), "small")
    assert sizes[0] <= some.bytes < sizes[-1]
    assert planned(some, small).verdict == "fits"
    more = choose(parts, fixed, sizes[sizes.index(some.bytes) + 1])
    assert planned(more, small).verdict != "fits"
    with pytest.raises(UsageError, match="fits: on tiny the run's verdict is 'does not fit' even"):
        most_that_fits(parts, fixed, lambda each: planned(each, machines[0]), "tiny")
