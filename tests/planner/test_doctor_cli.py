"""`explain`, and `plan` on other tools' configs, as a person types them."""

import io
import json
from pathlib import Path

import pytest
import typer

import planner.verbs.explain
import planner.verbs.plan
from benchmarks.foreign_examples import load_examples, render
from planner.errors import UsageError, VramwiseError

MESSAGE = "CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.19 GiB of which 3.12 GiB is free.\nF.cross_entropy\n"


def run(*words: str) -> None:
    app = typer.Typer()
    planner.verbs.plan.register(app)
    planner.verbs.explain.register(app)
    app(args=list(words), standalone_mode=False)


def example(tmp_path: Path, name: str) -> Path:
    found = next(row for row in load_examples() if row.id == name)
    path = tmp_path / render(found)[0]
    path.write_text(render(found)[1], encoding="utf-8")
    return path


def test_explain_reads_what_is_piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    run("explain", "--model", "Qwen/Qwen3-8B", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["parsed"]["tried_bytes"] == 9953586708
    assert document["causes"][0]["category"] == "logits_vocab"
    assert document["fixes"][0]["saved_bytes"] == 9953586708


def test_explain_takes_batch_and_length_from_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    log.write_text(MESSAGE.replace("9.27", "9.28"), encoding="utf-8")
    config = tmp_path / "lf.yaml"
    config.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\nper_device_train_batch_size: 8\nbf16: true\n",
        encoding="utf-8",
    )
    run("explain", str(log), "--config", str(config), "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["causes"][0]["certainty"] == "proven by arithmetic"
    assert "8 * 2,048 * 152,064 * 4 B" in document["causes"][0]["formula"]
    assert document["config"]["tool"] == "llamafactory"
    assert document["planned"]["fits"] is False
    assert document["planned"]["peak_bytes"] > 100 * 2**30  # 16 B a parameter: fp32 trainables


def test_explain_says_when_there_is_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="nothing to read"):
        run("explain", str(empty))
    with pytest.raises(UsageError, match="cannot read"):
        run("explain", str(tmp_path / "gone.log"))


@pytest.mark.parametrize(
    "name", ["cfg-01", "cfg-06", "cfg-12", "cfg-22", "cfg-29", "cfg-32", "cfg-47"]
)
def test_plan_takes_foreign_configs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("plan", str(example(tmp_path, name)), "--gpu", "h100-sxm", "--json")
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["peak_bytes"] > 2**30
    assert document["imported"]["report"]["tool"] == document["imported"]["tool"]
    assert "taken:" in captured.err


def test_flags_win_over_a_foreign_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(example(tmp_path, "cfg-06"))
    peaks = []
    for extra in ([], ["--batch-size", "16"]):
        run("plan", path, "--gpu", "h100-sxm", "--json", *extra)
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[1] > peaks[0]


def test_plan_lengths_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(example(tmp_path, "cfg-06"))
    counts = tmp_path / "lengths.txt"
    counts.write_text("100 500\n90000 5\n", encoding="utf-8")
    run(
        "plan",
        path,
        "--gpu",
        "rtx-4090",
        "--lengths",
        str(counts),
        "--order",
        "file",
        "--context",
        "100000",
    )
    assert "in this order it runs out at step" in capsys.readouterr().out
    with pytest.raises(UsageError, match="order"):
        run("plan", path, "--gpu", "rtx-4090", "--lengths", str(counts), "--order", "sideways")
    run("plan", path, "--gpu", "rtx-4090", "--export", "axolotl")
    assert "base_model: Qwen/Qwen3-4B-Instruct-2507" in capsys.readouterr().out
    with pytest.raises(VramwiseError, match="unknown tool"):
        run("plan", path, "--gpu", "rtx-4090", "--export", "word")


def test_a_broken_config_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.sh"
    path.write_text("echo hello\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        run("plan", str(path), "--gpu", "rtx-4090")
    assert "\n" not in caught.value.message


def test_launch_file_beside_a_model_and_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = tmp_path / "zero3.yaml"
    launch.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3}\n",
        encoding="utf-8",
    )
    peaks = []
    for extra in ([], ["--launch", str(launch)]):
        run("plan", "llama-3.1-8b", "--method", "full", "--gpu", "h100-sxm", "--json", *extra)
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[1] < peaks[0] / 2
    with pytest.raises(UsageError, match="no model in this accelerate config"):
        run("plan", str(launch), "--gpu", "h100-sxm")
