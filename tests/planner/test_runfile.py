"""run.yaml: read with guards, written whole or not at all; one line for every mistake."""

from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.run.recipe import RunFile
from planner.run.runfile import load_run_file, make_recipe, parse_yaml, save_run_file, validate


def test_round_trip(tmp_path: Path) -> None:
    run = validate(
        RunFile,
        {
            "model": "llama-3.1-8b",
            "recipe": {"task": "grpo", "lora": {"rank": 8, "targets": ["q_proj"]}},
            "machine": {"gpu": "h100", "vram": "70GiB"},
            "train": {"steps": 10},
        },
    )
    path = tmp_path / "run.yaml"
    save_run_file(run, path)
    assert load_run_file(path) == run
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: &x [1]\nmodel: *x\n", "aliases"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("model: x\nmodel: y\n", "twice"),
        ("model: [" * 40, "not a YAML mapping"),
        ("model: !!python/object/apply:os.system ['true']\n", "not a YAML mapping"),
        ("just words", "expected a mapping"),
        ("{unclosed: ", "not a YAML mapping"),
        ("", "expected a mapping"),
    ],
)
def test_hostile_yaml_is_one_line(text: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, label="run.yaml")
    assert part in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("run.yaml")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: x\n" + b"#" * (2 << 20))
    with pytest.raises(UsageError, match="larger than"):
        load_run_file(path)


def test_a_missing_or_binary_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_run_file(tmp_path / "nothing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_run_file(binary)


def test_unknown_keys_name_near_ones() -> None:
    with pytest.raises(UsageError) as caught:
        validate(RunFile, {"model": "x", "recipe": {"micro_batchsize": 2}}, label="r.yaml")
    assert caught.value.message == "r.yaml: recipe.micro_batchsize: unknown key"
    assert "micro_batch_size" in (caught.value.hint or "")
    with pytest.raises(UsageError) as caught:
        validate(RunFile, {"model": "x", "recipe": {"engine": {"sleeplevel": 1}}})
    assert "sleep_level" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("micro_batch_size", 0),
        ("micro_batch_size", -3),
        ("micro_batch_size", 2.5),
        ("micro_batch_size", True),
        ("micro_batch_size", "4"),
        ("context", 10**12),
        ("context", float("nan")),
        ("beta", float("nan")),
        ("beta", float("inf")),
        ("beta", -0.1),
        ("task", "pretrain"),
        ("lora", {"rank": 0}),
        ("lora", {"dropout": 1.0}),
        ("engine", {"gpu_memory_utilization": 1.5}),
        ("engine", {"block_size": 0}),
    ],
)
def test_numbers_out_of_range_name_the_field(field: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        make_recipe(**{field: value})
    assert field in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


def test_nothing_is_left_when_saving_fails(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        save_run_file(RunFile(model="x"), target)
    assert list(tmp_path.iterdir()) == [target]
