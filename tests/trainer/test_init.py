"""`vramwise init` writes a file that fits, says why, and trains as it stands; --dry-run checks a run without weights."""

import json
import re

import pytest
import yaml

from planner.errors import DoesNotFitError, UsageError
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import MachineSection
from planner.run.runfile import load_run_file, machine_of
from trainer.config import parse_run
from trainer.init_file import start, text, write
from trainer.init_words import COMMENTED, MEANING, allowed

FIELD = re.compile(r"^(\s*)# ([a-z_]+): (.*?)\s{2,}# .+$")
"""A line of a field that is commented out."""
CARDS = [
    ("sft", "llama-3.1-8b", "rtx-4090", "lora"),
    ("sft", "qwen3-0.6b", "t4", "lora"),
    ("sft", "qwen2.5-14b", "rtx-4090", "qlora"),
    ("grpo", "llama-3.1-8b", "rtx-4090", "lora"),
    ("grpo", "llama-3.1-8b", "t4", "qlora"),
    ("grpo", "qwen2.5-72b", "h100", "qlora"),
]


@pytest.fixture
def command(capsys):
    from app.cli import main

    def run(*arguments):
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(("task", "model", "gpu", "method"), CARDS)
def test_what_is_written_fits_and_passes_a_dry_run(task, model, gpu, method, tmp_path):
    from trainer.check_run import check_run

    path = tmp_path / "run.yaml"
    made = start(task, model, MachineSection(gpu=gpu))
    write(made, path)
    run = load_run_file(path)
    assert (run.recipe.task, run.recipe.method, run.machine.gpu) == (task, method, gpu)
    planned = plan(find_model(run.model), run.recipe, machine_of(run.machine))
    assert planned.fits
    assert planned.peak_bytes == made.plan.peak_bytes
    checked = check_run(path)
    assert checked["peak_bytes"] == planned.peak_bytes, "the trainer decides nothing further"
    assert checked["verdict"] == "fits"
    words = path.read_text(encoding="utf-8")
    for row in made.tried:
        assert f"{row.peak_bytes / 2**30:.2f} GiB" in words


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_every_line_has_its_meaning_and_every_commented_field_can_be_used(task, tmp_path):
    words = text(start(task, "qwen3-0.6b", MachineSection(gpu="rtx-4090")))
    lines = words.splitlines()
    first = lines.index("schema_version: 1")
    sections = ("recipe:", "machine:", "train:", "schema_version: 1")
    assert all(re.search(r"\s{2}# \S", line) for line in lines[first:] if line not in sections)
    commented = [number for number, line in enumerate(lines) if FIELD.match(line)]
    shown = {FIELD.match(lines[number])[2] for number in commented}
    recipe, train = (COMMENTED[task][name] for name in ("recipe", "train"))
    assert shown == {*recipe, *train}
    for number in commented:
        indent, name, value = FIELD.match(lines[number]).groups()
        changed = [*lines[:number], f"{indent}{name}: {value}", *lines[number + 1 :]]
        if name == "epochs":
            changed = [line for line in changed if not line.startswith("  steps:")]
        if name in ("evaluation", "eval_every"):
            changed += [f"  validation: {{name: {'gsm8k' if task == 'grpo' else 'held/out'}}}"]
        parse_run(yaml.safe_load("\n".join(changed)), root=tmp_path)


def test_every_meaning_is_of_a_field_that_exists():
    for name in MEANING:
        allowed(name)
    assert allowed("recipe.method") == "full, lora, qlora"
    assert allowed("train.lr") == "above 0"
    assert allowed("train.eval_every") == "at least 0"
    assert allowed("train.tensorboard") == "true or false"
    with pytest.raises(KeyError):
        allowed("recipe.nothing")


def test_where_nothing_fits_one_line_says_the_least_that_it_takes(command, tmp_path):
    with pytest.raises(
        DoesNotFitError, match=r"llama-3.1-70b does not fit .*T4.* needs \d+\.\d+ GiB of"
    ) as caught:
        start("grpo", "llama-3.1-70b", MachineSection(gpu="t4"))
    assert "\n" not in caught.value.message
    code, out, err = command(
        "init",
        "--task",
        "sft",
        "--model",
        "llama-3.1-70b",
        "--gpu",
        "t4",
        "--out",
        str(tmp_path / "r.yaml"),
    )
    assert (code, out) == (3, "")
    assert len(err.strip().splitlines()) == 2, "the error and its hint"
    assert not (tmp_path / "r.yaml").exists()


def test_it_overwrites_nothing_and_prints_the_same_as_data(command, tmp_path):
    path = tmp_path / "run.yaml"
    asked = (
        "init",
        "--task",
        "grpo",
        "--model",
        "qwen3-0.6b",
        "--gpu",
        "rtx-4090",
        "--out",
        str(path),
    )
    assert command(*asked)[0] == 0
    before = path.read_text(encoding="utf-8")
    code, _, err = command(*asked)
    assert code == 2
    assert "exists; nothing is overwritten" in err
    assert path.read_text(encoding="utf-8") == before
    code, out, _ = command(*asked, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["run"] == {
        k: v for k, v in yaml.safe_load(before).items() if k != "schema_version"
    }
    assert document["verdict"] == "fits"
    assert {row["field"] for row in document["fields"]} == set(MEANING)


def test_what_cannot_be_asked_for_is_said():
    with pytest.raises(UsageError, match="task: 'dpo' cannot be trained"):
        start("dpo", "qwen3-0.6b", MachineSection(gpu="t4"))
    with pytest.raises(UsageError, match="method: 'dora' is not allowed"):
        start("sft", "qwen3-0.6b", MachineSection(gpu="t4"), methods=("dora",))


def test_a_dry_run_looks_through_data_that_is_here_and_writes_nothing(document, tmp_path):
    from trainer.check_run import check_run

    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    made = document(
        recipe={"task": "sft", "context": 24},
        train={"dataset": "rows.jsonl", "rewards": [], "epochs": 2},
    )
    for name in ("num_generations", "prompt_length", "completion_length"):
        del made["recipe"][name]
    del made["train"]["steps"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    said: list[str] = []
    checked = check_run(path, say=said.append)
    assert (checked["rows"], checked["steps"]) == (9, 2)
    assert "data: 9 of 9 rows are used" in said
    assert not (tmp_path / "out").exists()
    rows[4]["completion"] = None
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(UsageError, match=r"train.dataset: row 5: no completion"):
        check_run(path)
