"""Length files of every form, and the chances against plain counting."""

import json
from array import array
from itertools import combinations
from pathlib import Path

import pytest

from planner.answers.lengths import LengthReport, Lengths, _chance, assess, at_length, read_lengths
from planner.errors import UsageError
from planner.importers.names import resolve_model
from planner.machines.machine import make_machine
from planner.plan import plan
from planner.run.recipe import Checkpointing, Loss, Method, Recipe, Task

RECIPE = Recipe(
    task=Task.SFT,
    method=Method.QLORA,
    framework="hf-trainer",
    micro_batch_size=2,
    gradient_accumulation=2,
    checkpointing=Checkpointing.FULL,
    loss=Loss.FULL,
)
MACHINE = make_machine("rtx-4090")
MODEL = resolve_model("Qwen/Qwen3-8B")
assert MODEL is not None


def lengths(*counts: int) -> Lengths:
    return Lengths(counts=array("I", counts), source="test", estimated=False)


def report(found: Lengths, recipe: Recipe = RECIPE, **options: object) -> LengthReport:
    assert MODEL is not None
    return assess(found, MODEL, recipe, MACHINE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "counts", "estimated"),
    [
        ("a.txt", "10\n20\n# note\n\n30\n", [10, 20, 30], False),
        ("hist.txt", "10 3\n500 1\n", [10, 10, 10, 500], False),
        ("a.csv", "length,count\n7,2\n9,1\n", [7, 7, 9], False),
        ("a.jsonl", '{"input_ids": [1, 2, 3]}\n{"num_tokens": 9}\n', [3, 9], False),
        ("a.json", "[5, 6]", [5, 6], False),
        ("t.jsonl", json.dumps({"prompt": "x" * 40, "completion": "y" * 4}) + "\n", [11], True),
        (
            "m.jsonl",
            json.dumps({"messages": [{"role": "user", "content": "z" * 80}]}) + "\n",
            [20],
            True,
        ),
    ],
)
def test_files(tmp_path: Path, name: str, text: str, counts: list[int], estimated: bool) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    found = read_lengths(path)
    assert list(found.counts) == counts
    assert found.estimated is estimated


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2], [3]], "other": ["a", "b"]}), path)
    assert list(read_lengths(path).counts) == [2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no samples"),
        ("ten\n", "line 1"),
        ("{broken\n", "line 1"),
        ('{"colour": 1}\n', "none of the known fields"),
        ("5 99999999999\n", "more than"),
    ],
)
def test_bad_files_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_lengths(path)


def test_chance_is_counting() -> None:
    total, bad, drawn = 9, 3, 4
    draws = list(combinations(range(total), drawn))
    counted = sum(any(item < bad for item in draw) for draw in draws) / len(draws)
    assert _chance(total, bad, drawn) == pytest.approx(counted)
    assert _chance(total, 0, drawn) == 0
    assert _chance(total, bad, 7) == 1


def test_longest_that_fits_is_the_edge_of_the_plan() -> None:
    found = report(lengths(*[200] * 300, *range(100, 20_000, 100)))
    limit = found.longest_that_fits
    assert limit is not None
    assert MODEL is not None
    assert plan(MODEL, at_length(RECIPE, limit), MACHINE).may_run
    assert not plan(MODEL, at_length(RECIPE, int(limit * 1.01) + 2), MACHINE).may_run
    assert found.filter_at == limit
    assert found.too_long == sum(length > limit for length in range(100, 20_000, 100))
    assert [point.name for point in found.points] == ["median", "p90", "p99", "longest"]
    assert found.points[0].fits
    assert not found.points[-1].fits


def test_orders() -> None:
    counts = [500] * 40 + [60_000] + [500] * 39
    shuffled, bucketed, in_file = (
        report(lengths(*counts), order=order) for order in ("shuffled", "bucketed", "file")
    )
    draws = 4
    assert shuffled.first_step is None
    assert shuffled.probability_per_step == pytest.approx(draws / 80)
    assert shuffled.probability_of_run == 1
    assert bucketed.first_step == 1
    assert in_file.first_step == 40 // draws + 1


def test_part_of_an_epoch_is_a_chance() -> None:
    found = report(lengths(*([500] * 79 + [60_000])), epochs=0.5)
    assert found.probability_of_run == pytest.approx(0.5)


def test_truncation_and_packing_bound_the_rows() -> None:
    counts = lengths(500, 500, 60_000)
    capped = report(counts, RECIPE.model_copy(update={"context": 1024}))
    assert (capped.too_long, capped.cap_tokens) == (0, 1024)
    assert "never runs out" in capped.text()
    packed = report(counts, RECIPE.model_copy(update={"context": 1024, "packing": True}))
    assert {point.tokens for point in packed.points} == {1024}


def test_grpo_varies_the_prompt_and_is_never_capped() -> None:
    recipe = RECIPE.model_copy(
        update={
            "task": Task.GRPO,
            "completion_length": 256,
            "num_generations": 2,
            "framework": "trl",
        }
    )
    found = report(lengths(100, 200, 300), recipe)
    assert found.cap_tokens is None
    assert found.points[-1].peak_bytes > found.points[0].peak_bytes
