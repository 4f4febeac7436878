"""Rows with time and price: which card is cheapest, what a change costs in time, and what is wrong input."""

import csv
import json
from math import sqrt

import pytest

from app.cli import main
from planner.answers.advise import levers
from planner.answers.cards import cards_for_run
from planner.answers.changes import Change, apply
from planner.answers.ranking import COMFORTABLE_USD, price_penalty
from planner.answers.recommend import recommend
from planner.answers.slower import Slower, lever_times, slower
from planner.answers.spent import PER_RUN, PER_TOKENS, order, spent
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.speed.cost import Amount, listed_prices

LLAMA = "llama-3.1-8b"
RUN = ["plan", "qwen3-8b", "--task", "grpo", "--context", "16384", "--generations", "8"]


def made(gpu="a100-80gb", gpus=1, **recipe):
    values = {"context": 2048, "micro_batch_size": 4, **recipe}
    return plan(catalogue_model(LLAMA), make_recipe(**values), make_machine(gpu, gpus=gpus))


def test_a_row_by_hand():
    found = made()
    time = found.time
    row = spent(found, Amount(samples=4000), "2-8")
    assert row.of == PER_RUN
    assert row.hours == pytest.approx(1000 * time.step_seconds / 3600)
    assert row.usd_low == pytest.approx(row.hours_low * 2)
    assert row.usd_high == pytest.approx(row.hours_high * 8)
    assert row.usd_middle == pytest.approx(row.hours * 4)  # as many times 2 as 8 is it
    million = spent(found, Amount(), "2-8")
    assert million.of == PER_TOKENS
    assert million.hours == pytest.approx(1e6 / time.tokens_per_s / 3600)
    assert row.usd_a_million == pytest.approx(million.usd_middle)
    eight = spent(made(gpus=8, sharding="ddp"), Amount(), "2-8")
    assert eight.usd_middle == pytest.approx(8 * 4 * eight.hours)


def test_the_newcomers_question(capsys):
    """Cards by dollars of the run, each with hours, dollars and what bounds them."""
    amount = ["--samples", "7473", "--epochs", "1"]
    assert main([*RUN, *amount, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = [row for row in document["cards"] if row["fits"]]
    priced = [row for row in rows if row["spent"] and row["spent"]["usd_low"] is not None]
    assert {row["gpu"] for row in priced} == {
        row["gpu"] for row in rows if row["gpu"] in listed_prices()
    }
    assert rows[: len(priced)] == priced
    middles = [row["spent"]["usd_middle"] for row in priced]
    assert middles == sorted(middles)
    for row in priced:
        found = row["spent"]
        price = listed_prices()[row["gpu"]]
        assert found["of"] == "the run"
        assert found["hours"] == pytest.approx(7473 * found["step_seconds"] / 3600, rel=1e-4)
        assert found["hours_low"] < found["hours"] < found["hours_high"]
        assert found["usd_middle"] == pytest.approx(
            found["hours"] * sqrt(price.low * price.high), rel=1e-4
        )
        assert found["bound_by"] in ("compute", "bandwidth", "link", "launches", "host")
    rest = [row["spent"]["hours"] for row in rows[len(priced) :] if row["spent"]]
    assert rest == sorted(rest)
    assert main([*RUN, *amount]) == 0
    said = capsys.readouterr().out
    assert document["rule"] in said
    assert "the run" in said
    assert "--mean-completion" in said
    assert f"{priced[0]['gpu']} " in said.splitlines()[4]


def test_without_an_amount_rows_are_of_a_million_tokens(capsys):
    assert main(RUN) == 0
    said = capsys.readouterr().out
    assert "a million tokens" in said
    assert "--samples" in said


def test_a_run_that_no_card_takes_ends_with_three_and_one_document(capsys):
    line = ["plan", "deepseek-v3", "--method", "full", "--context", "512", "--check", "--json"]
    assert main(line) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--price", "2.4 EUR"], "price: cannot read"),
        (["--samples", "0"], "samples: 0 is not allowed"),
        (["--epochs", "2"], "epochs: of how many samples"),
        (["--mean-completion", "99999"], "mean-completion: 99,999 is not allowed"),
        (["--lengths", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_amounts_without_a_card_are_one_line(capsys, flags, says):
    assert main([*RUN, *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_cards_whose_speed_is_not_known_come_last_in_memory_alone():
    cards = cards_for_run(catalogue_model("qwen3-0.6b"), make_recipe(context=512))
    keys = [order(card.spent)[0] for card in cards]
    assert keys == sorted(keys)
    assert set(keys) == {0, 1, 2}
    unknown = [card.vram_bytes for card in cards if card.spent is None]
    assert unknown == sorted(unknown)


def test_checkpointing_costs_a_forward():
    kept = made(checkpointing="none", method="full", gpu="h200")
    again = made(checkpointing="full", method="full", gpu="h200")
    found = slower(kept.time, again)
    phases = {phase.name: phase.seconds for phase in kept.time.phases}
    assert found.share == pytest.approx(phases["forward"] / kept.time.step_seconds, rel=0.1)
    assert found.words == f"+{found.share:.0%} step time"
    (lever,) = lever_times(again, [Change("checkpointing=full", {"checkpointing": "full"}, "", 2)])
    assert lever.slower == pytest.approx(found.share, abs=1e-4)


def test_shorter_steps_are_compared_by_token():
    long, short = made(context=4096), made(context=2048)
    found = slower(long.time, short)
    assert found.of == "time a token"
    assert found.share == pytest.approx(
        long.time.tokens_per_s / short.time.tokens_per_s - 1, rel=1e-9
    )
    assert Slower(0.001, "step time").words == "same step time"
    assert slower(None, short) is None


def test_a_nested_setting_is_taken_back():
    waves = {"engine.max_num_seqs": 1}
    recipe = make_recipe(task="grpo", context=1024, num_generations=8)
    machine = make_machine("a100-80gb")
    one = plan(catalogue_model(LLAMA), apply(recipe, Change("", waves, "", 2)), machine)
    (lever,) = lever_times(one, [Change("engine.max_num_seqs=1", waves, "", 2)])
    at_once = plan(catalogue_model(LLAMA), recipe, machine)
    expected = one.time.step_seconds / at_once.time.step_seconds - 1
    assert lever.slower == pytest.approx(expected, abs=1e-3)
    assert lever.slower > 1


def test_every_lever_has_its_price_in_time(capsys):
    found = made(checkpointing="none", gpu="h100", context=4096)
    advice = {
        each.change.name: each for each in levers(found.spec, found.asked, found.machine, found)
    }
    full = advice["checkpointing=full"]
    assert full.slower.share > 0.1
    assert full.to_dict()["slower"] == round(full.slower.share, 4)
    assert all(each.slower is not None for each in advice.values())
    plain = ["plan", LLAMA, "--checkpointing", "none", "--context", "4096", "--batch-size", "4"]
    assert main([*plain, "--gpu", "h100"]) == 0
    assert (
        f"one more forward, and layer inputs in host RAM (+{full.slower.share:.0%} step time)"
        in (capsys.readouterr().out)
    )
    unknown = plan(found.spec, found.asked, make_machine(vram="80GiB"))
    assert not any(
        each.slower for each in levers(found.spec, found.asked, unknown.machine, unknown)
    )


def test_a_dear_model_falls_behind():
    machine = make_machine("rtx-4090")
    (row,) = recommend(machine, only=catalogue_model("qwen3-8b"), limit=1)
    assert price_penalty(row.at_least.spent) == 0  # far below what counts
    dear = spent(made(), Amount(), str(4 * COMFORTABLE_USD * 3600 * made().time.tokens_per_s / 1e6))
    assert price_penalty(dear) == pytest.approx(1)  # two doublings
    assert price_penalty(None) == 0


def test_recommend_has_time_and_price_in_every_form(capsys, tmp_path):
    line = ["recommend", "qwen3-8b", "--gpu", "rtx-4090"]
    assert main([*line, "--samples", "1000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for cell in (row["at_least"] for row in rows):
        found = plan(
            catalogue_model("qwen3-8b"), make_recipe(**cell["recipe"]), make_machine("rtx-4090")
        )
        assert cell["spent"]["step_seconds"] == pytest.approx(found.time.step_seconds, rel=1e-4)
        assert cell["spent"]["of"] == "the run"
        assert len(cell["levers"]) >= bool(cell["prices"])
    path = tmp_path / "rows.csv"
    assert main([*line, "--samples", "1000", "--csv", str(path)]) == 0
    said = capsys.readouterr()
    assert "dollars" in said.out
    assert str(path) in said.err
    written = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["usd_middle"]) for row in written] == [
        row["at_least"]["spent"]["usd_middle"] for row in rows
    ]
    assert main([*line, "--epochs", "2"]) == 2
    assert "epochs: of how many samples" in capsys.readouterr().err
