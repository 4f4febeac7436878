"""A frontier: nothing on it is beaten, every way plans as it says, budgets say what binds."""

import csv
import json
from itertools import combinations

import pytest

from app.cli import main
from planner.answers.frontier import cards_named, frontier, pareto
from planner.errors import UsageError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.report.frontier import frontier_picture
from planner.report.picture import Box, Words
from planner.run.runfile import make_recipe
from planner.speed.budget import DOLLARS, HOURS, MEMORY, Budget, parse_budget
from planner.speed.cost import listed_prices
from planner.units import GiB

MODEL = "qwen3-0.6b"
LINE = [
    "frontier",
    MODEL,
    "--cards",
    "rtx-4090,a100-80gb",
    "--context",
    "1024",
    "--grad-accum",
    "4",
]


def found(cards=("rtx-4090", "a100-80gb"), counts=(1, 2), **recipe):
    values = {"context": 1024, "gradient_accumulation": 4, **recipe}
    return frontier(
        catalogue_model(MODEL), make_recipe(**values), cards=cards_named(cards), counts=counts
    )


def test_nothing_on_it_is_beaten_and_every_way_is_a_plan():
    answer = found()
    assert answer.priced
    assert len(answer.points) > 3
    assert {point.gpu for point in answer.points} == {"rtx-4090", "a100-sxm4-80gb"}
    for one, other in combinations(answer.points, 2):
        pairs = [(one.values[name], other.values[name]) for name in (MEMORY, HOURS, DOLLARS)]
        assert any(a < b for a, b in pairs)
        assert any(a > b for a, b in pairs)
    for point in answer.points:
        machine = make_machine(point.gpu, gpus=point.gpus)
        again = plan(catalogue_model(MODEL), make_recipe(**point.recipe), machine)
        assert again.fits
        assert again.peak_bytes == point.peak_bytes
        assert again.time.step_seconds == pytest.approx(point.spent.step_seconds)
        r = again.resolved
        assert r.batch * r.grad_accum * r.layout.data == 4  # samples of a step stay what they are
    assert [p.spent.usd_middle for p in answer.points] == sorted(
        p.spent.usd_middle for p in answer.points
    )


def test_the_flags_of_a_way_plan_it(capsys):
    """Each row's command is the row, what goes back to a default included."""
    assert main([*LINE, "--shard", "fsdp2", "--optimizer-offload", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for point in (document["points"][0], document["points"][-1]):
        line = ["plan", MODEL, *LINE[4:], "--shard", "fsdp2", "--optimizer-offload"]
        where = ["--gpu", point["gpu"], "--gpus", str(point["gpus"])]
        assert main([*line, *where, *point["flags"].split(), "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["peak_bytes"] == point["peak_bytes"]
        assert made["time"]["step_seconds"] == pytest.approx(
            point["spent"]["step_seconds"], rel=1e-4
        )


def test_rollouts_try_engines_and_keep_the_prompts():
    answer = found(
        cards=("rtx-4090",), counts=(1,), task="grpo", num_generations=8, gradient_accumulation=8
    )
    assert {p.recipe["engine"]["kind"] for p in answer.points} == {"transformers", "vllm-shared"}
    for point in answer.points:
        time = plan(
            catalogue_model(MODEL), make_recipe(**point.recipe), make_machine(point.gpu)
        ).time
        assert time.samples == 1


def test_a_cheaper_twin_beats():
    answer = found()
    best = answer.points[0]
    assert pareto([*answer.points, best]) == pareto(answer.points)
    assert len(pareto(answer.points)) == len(answer.points)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("24GiB, <6h, <$5", Budget(24 * GiB, 6, 5)),
        ("$5", Budget(None, None, 5)),
        ("<= 90min", Budget(None, 1.5, None)),
        ("2d, 7.5 dollars", Budget(None, 48, 7.5)),
    ],
)
def test_budgets(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "24GiB, <", "5 parsecs", "24GiB, 16GiB", "<0h", "$", "5 EUR", "24GiB 6h"]
)
def test_a_budget_that_cannot_be_read_is_one_line(text):
    with pytest.raises(UsageError, match=r"^budget: ") as raised:
        parse_budget(text)
    assert raised.value.hint


def test_a_budget_that_nothing_meets_says_what_comes_nearest_and_what_binds():
    answer = found()
    fastest = min(p.spent.hours for p in answer.points)
    dearest = max(p.spent.usd_middle for p in answer.points)
    budget = Budget(None, fastest / 2, dearest * 2)
    assert answer.within(budget) == []
    nearest, worst = answer.nearest(budget)
    assert worst == HOURS
    assert nearest.spent.hours == fastest
    assert answer.binding(budget) == [HOURS]
    hopeless = Budget(1, fastest / 2, None)
    assert answer.binding(hopeless) == []
    roomy = Budget(None, fastest * 1.01, None)
    assert [p.spent.hours for p in answer.within(roomy)] == [fastest]


def test_the_verb_answers_in_every_form(capsys, tmp_path):
    files = {kind: tmp_path / f"f.{kind}" for kind in ("csv", "html", "png")}
    flags = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert main([*LINE, "--samples", "1000", "--budget", "<0.3min", *flags]) == 0
    said = capsys.readouterr().out
    assert "Nothing meets 0.3 min" in said
    assert "hours binds" in said
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert rows[0]["of"] == "the run"
    page = files["html"].read_text()
    assert "<svg" in page
    assert page.count("<title>") == len(rows) + 1  # a dot each, and the page's own
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert main([*LINE, "--samples", "1000", "--budget", "<0.3min", "--check", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["within"] == []
    assert document["nearest"]["worst"] == "hours"
    assert document["binding"] == ["hours"]
    assert len(document["points"]) == len(rows)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cards", "no-such-card"], "no-such-card"),
        (["--vram", "24GiB"], "vram: how fast a size of memory computes is not known"),
        (["--price", "2 EUR"], "price: cannot read"),
        (["--task", "serve"], "task: a frontier is of runs that train"),
        (["--epochs", "3"], "epochs: of how many samples"),
        (["--gpu", "jetson-orin-nano-8gb"], "is not known: memory only"),
    ],
)
def test_wrong_input_is_one_line(capsys, flags, says):
    assert main(["frontier", MODEL, *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_unpriced_cards_are_compared_by_memory_and_hours_alone():
    card = "rtx-4070"
    assert card not in listed_prices()
    alone = found(cards=(card,), counts=(1,))
    assert not alone.priced
    assert len(alone.points) > 1
    both = found(cards=(card, "rtx-4090"), counts=(1,))
    assert both.priced
    assert {p.gpu for p in both.points} == {"rtx-4090"}
    assert any(card in note for note in both.left_out)


def test_counts_that_cannot_share_a_step_are_said():
    answer = found(counts=(1, 8))
    assert {p.gpus for p in answer.points} == {1}
    assert any("on 8 GPUs" in note for note in answer.left_out)


def test_the_picture_has_every_way_inside_its_frame():
    answer = found()
    shapes = frontier_picture(answer, "a run")
    dots = [shape for shape in shapes if isinstance(shape, Box) and shape.tip]
    assert len(dots) == len(answer.points)
    assert all(130 <= dot.left <= 1140 and 130 <= dot.top <= 520 for dot in dots)
    assert any(isinstance(shape, Words) and shape.text == "1" for shape in shapes)
