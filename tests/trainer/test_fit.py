"""`train --fit`: the search on the plan, a real run of it, and what it does when memory runs out."""

import json
from dataclasses import replace

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from planner.errors import UsageError, VramwiseError
from planner.machines.machine import Machine, make_machine
from planner.speed.budget import parse_budget
from planner.units import GiB
from profiler.forecast import Forecast, Step
from trainer.cli import register
from trainer.config import parse_run
from trainer.fit import Fit
from trainer.fit_search import Search, fitted_run, sizes
from trainer.run import train_run

STEPS = 3
ROWS = [{"prompt": "a" * (1 + 3 * n % 30), "completion": f" {n}"} for n in range(40)]


@pytest.fixture
def run_file(document, tmp_path):
    """Return a function that writes an SFT run file and returns its path; dropout is on."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")

    def write(output="out", recipe=None, machine=None, **train):
        made = document(
            machine=machine or {},
            recipe={
                "task": "sft",
                "context": 48,
                "micro_batch_size": 2,
                "gradient_accumulation": 4,
                "lora": {"rank": 4, "dropout": 0.2},
                **(recipe or {}),
            },
            train={
                "output": output,
                "dataset": str(data),
                "rewards": [],
                "save_every": 0,
                "steps": STEPS,
                **train,
            },
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        path = tmp_path / f"{output}.yaml"
        path.write_text(yaml.safe_dump(made), encoding="utf-8")
        return path

    return write


def curve(result):
    return [(step["loss"], step["grad_norm"], step["tokens"]) for step in result.metrics]


def failing(monkeypatch, first, times):
    """Make the forward passes from number `first` on run out of memory, so many times."""
    import trainer.sft as module

    whole, calls = module.log_probs, []

    def log_probs(*arguments, **options):
        calls.append(1)
        if first <= len(calls) < first + times:
            raise torch.OutOfMemoryError("injected")
        return whole(*arguments, **options)

    monkeypatch.setattr(module, "log_probs", log_probs)


def test_the_curve_after_memory_ran_out_is_that_of_the_run_that_it_did_not(run_file, monkeypatch):
    said = []
    whole = train_run(run_file("whole"), budget="2GiB, <6h", say=said.append)
    text = "\n".join(said)
    assert "fit: micro_batch_size=8 x 1" in text  # as many at once as a step has
    assert "fit: traced: " in text
    assert "how long a step takes is not known" in text
    kept = yaml.safe_load((whole.output / "run.yaml").read_text(encoding="utf-8"))
    assert kept["recipe"]["micro_batch_size"] * kept["recipe"]["gradient_accumulation"] == 8
    assert kept["recipe"]["checkpointing"] == "none"
    assert kept["train"]["prompts_per_step"] == 8
    assert kept["train"]["device_memory"] == f"{2 * GiB}b"

    said.clear()
    with monkeypatch.context() as patch:
        failing(patch, 2, 4)  # in the second step
        redone = train_run(run_file("redone"), budget="<6h", say=said.append)
    rungs = [line.partition("; ")[2] for line in said if "out of memory" in line]
    assert rungs[1:] == ["checkpointing=full", rungs[0], "checkpointing=offload"]
    assert curve(redone) == curve(whole)
    assert [step["budget_tokens"] for step in redone.metrics] == [8 * 48] * STEPS

    said.clear()
    failing(monkeypatch, 2, 6)
    halved = train_run(run_file("halved"), budget="<6h", say=said.append)
    assert halved.metrics[-1]["budget_tokens"] == 4 * 48
    assert "micro-batches of 192 tokens; the samples of a step stay as they are" in said[-1]
    assert [step["tokens"] for step in halved.metrics] == [step["tokens"] for step in whole.metrics]
    assert halved.metrics[0]["loss"] == whole.metrics[0]["loss"]  # before it ran out


@pytest.mark.slow
def test_a_run_that_was_fitted_goes_on(run_file):
    train_run(run_file(steps=1), budget="2GiB")
    again = train_run(run_file(steps=2), budget="2GiB", resume=True)
    assert [step["step"] for step in again.metrics] == [1]


# the search, on plans of real cards


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Return a function that searches for a catalogue model on a card that is not here."""

    def search(
        budget,
        *,
        gpu="rtx-4090",
        price=None,
        recipe=None,
        machine=None,
        steps=1000,
        model="qwen2.5-0.5b",
    ):
        import trainer.fit_search as module

        there = machine or make_machine(gpu)
        monkeypatch.setattr(module, "this_machine", lambda run, train: there)
        made = {
            "model": model,
            "recipe": {
                "task": "sft",
                "method": "lora",
                "context": 4096,
                "micro_batch_size": 4,
                "gradient_accumulation": 4,
                **(recipe or {}),
            },
            "train": {"output": "out", "dataset": "rows.jsonl", "steps": steps},
        }
        run, train = parse_run(made, root=tmp_path)
        wanted = parse_budget(budget)
        gpus = there.num_gpus
        within = module.machine_within(run, train, wanted, gpus=gpus)
        return run, Search(run, train, wanted, steps=steps, price=price, machine=within)

    return search


def test_what_has_room_keeps_the_result_and_the_samples_of_a_step(searched, tmp_path):
    limits = {}
    for budget in ("24GiB", "8GiB", "3GiB"):
        run, search = searched(budget)
        best = search.best()
        assert (
            best.plan.peak_bytes <= search.machine.vram_bytes <= parse_budget(budget).memory_bytes
        )
        assert best.plan.has_room
        assert not best.changed_result
        assert best.recipe.micro_batch_size * best.recipe.gradient_accumulation == 16
        limits[budget] = best
        fitted = fitted_run(run, search, best, root=tmp_path)
        assert fitted.train.prompts_per_step == 16
    # less memory is never faster
    hours = [limits[budget].hours for budget in ("24GiB", "8GiB", "3GiB")]
    assert hours == sorted(hours)
    assert hours[0] < hours[-1]
    assert limits["24GiB"].recipe.checkpointing == "none"


def test_what_the_file_says_is_where_the_search_begins(searched):
    _, search = searched("24GiB", recipe={"checkpointing": "full"})
    assert search.best().recipe.checkpointing == "full"


@pytest.mark.parametrize(
    ("budget", "binds"),
    [("24GiB, <1min", "hours"), ("1GiB, <6h", "memory"), ("24GiB, <6h, <$0.001", "dollars")],
)
def test_a_budget_that_nothing_meets_says_what_comes_nearest(searched, budget, binds):
    _, search = searched(budget)
    with pytest.raises(VramwiseError, match=rf"nothing meets .*nearest is micro_batch_size=.* with .*{binds} binds: \d+") as caught:  # fmt: skip
        search.best()
    assert "\n" not in caught.value.message


def test_only_where_nothing_else_has_room_the_result_changes_and_that_is_said(searched):
    _, search = searched("3GiB", recipe={"method": "full", "context": 512})
    best = search.best()
    assert best.changed_result == ["method=lora"]
    assert best.recipe.context == 512
    assert best.recipe.micro_batch_size * best.recipe.gradient_accumulation == 16


def test_of_several_gpus_each_is_given_its_share_and_weights_are_divided_where_copies_have_no_room(
    searched, tmp_path
):
    four = replace(make_machine("rtx-4090"), num_gpus=4)
    run, search = searched("24GiB, <6h, <$90", price="0.5", machine=four)
    copies = search.best()
    assert copies.changes == ()
    assert copies.recipe.micro_batch_size * copies.recipe.gradient_accumulation == 16
    assert copies.usd == pytest.approx(copies.hours * 4 * 0.5)
    assert fitted_run(run, search, copies, root=tmp_path).train.prompts_per_step == 64
    # 16 bytes a parameter: 1.5 B of them are no copy's on such a card
    wanted = {"method": "full", "context": 512, "master_weights": True}
    run, search = searched("24GiB", recipe=wanted, machine=four, model="qwen2.5-1.5b")
    divided = search.best()
    assert "sharding=fsdp2" in [each.name for each in divided.changes]
    assert not divided.changed_result
    assert divided.plan.resolved.layout.data_shard == 4
    fitted = fitted_run(run, search, divided, root=tmp_path)
    assert fitted.run.recipe.sharding == "fsdp2"
    # a layout that the file states stays: states wait on the host instead
    stated = wanted | {"sharding": "ddp"}
    _, search = searched("24GiB", recipe=stated, machine=four, model="qwen2.5-1.5b")
    names = {each.name for each in search.best().changes}
    assert "optimizer_offload" in names
    assert "sharding=fsdp2" not in names


def test_dollars_without_a_price_are_one_line(searched):
    nameless = Machine(vram_bytes=24 * GiB)
    with pytest.raises(UsageError, match="none is listed for this machine") as caught:
        searched("<$5", machine=nameless)
    assert "--price" in caught.value.hint
    _, search = searched("<$5", machine=nameless, price="2.4")
    assert search.usd_per_hour == 2.4


def test_a_unit_that_is_none_is_one_line(run_file):
    with pytest.raises(UsageError, match="cannot read '24 bananas'"):
        train_run(run_file(), budget="24 bananas")


def test_sizes_are_halved_down_to_one():
    assert sizes(16) == [16, 8, 4, 2, 1]
    assert sizes(7) == [7, 4, 2, 1]


# what the first steps say


def looked(seconds, planned, budget="<1h", *, usd=None, steps=1000, count=12):
    fit = Fit(
        budget=parse_budget(budget), steps=steps, step_seconds=planned, usd_per_hour=usd, why_unknown="why"
    )  # fmt: skip
    forecast, said = Forecast(total_steps=steps), []
    for _ in range(count):
        forecast.add(Step(seconds))
        fit.look(forecast, say=said.append)
    return fit, said


def test_the_estimate_is_corrected_by_the_first_steps():
    fit, said = looked(2.0, 1.5)
    assert said == [
        "fit: a step takes 2 s, +33% against the 1.5 s planned: the run takes 33.3 min; within the budget"
    ]
    assert fit.step_seconds == 2.0
    assert looked(2.0, 1.95)[1] == [
        "fit: a step takes 2 s, as planned: the run takes 33.3 min; within the budget"
    ]
    assert "not planned: why" in looked(2.0, None)[1][0]


def test_a_budget_that_will_be_broken_is_named():
    fit, said = looked(9.0, 1.5, "<1h, <$1", usd=2.0)
    assert said[0].endswith("the run takes 2.5 h, $5.00; over 1 h and over $1")
    assert fit.over == ("hours", "dollars")


@pytest.fixture
def command(run_file):
    """Return a function that calls `train` on a run file with more options."""

    def call(*options, **settings):
        app = typer.Typer()
        register(app)
        return CliRunner().invoke(app, ["train", str(run_file(**settings)), *options])

    return call


def test_a_price_without_a_budget_is_refused(command):
    result = command("--price", "2")
    assert isinstance(result.exception, UsageError)
    assert "--price: 2 has no effect without --fit" in result.exception.message


def test_what_is_looked_at_is_on_the_ranks_that_it_would_start_on(command):
    alone, two = (command("--dry-run", "--json", *more) for more in ((), ("--nproc", "2")))
    assert "2 x" in json.loads(two.stdout)["machine"]
    assert json.loads(two.stdout)["phases"] != json.loads(alone.stdout)["phases"]
    chosen = command("--dry-run", "--nproc", "2", "--fit", "2GiB")
    # 8 samples a rank
    assert "fit: micro_batch_size=8 x 1" in chosen.stderr
    other = command("--dry-run", "--nproc", "2", machine={"gpus": 4})
    assert other.exception.message == "machine.gpus: 4, but 2 ranks run"


def test_the_samples_are_read_once(run_file, monkeypatch):
    import trainer.validation as module

    read, calls = module.read_examples, []
    monkeypatch.setattr(
        module, "read_examples", lambda *args, **more: calls.append(1) or read(*args, **more)
    )
    train_run(run_file(steps=1), budget="2GiB")
    assert calls == [1]
