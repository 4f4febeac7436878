"""The planner's verbs through the one console script: answers on stdout, codes, JSON, run files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from planner.run.recipe import RunFile
from planner.run.runfile import load_run_file
from planner.terms.term import TERM_NAMES

GRPO = [
    *("plan", "llama-3.1-8b", "--task", "grpo", "--method", "lora", "--context", "20480"),
    *("--generations", "8", "--gpu", "h100-sxm", "--json"),
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    parsed: dict[str, Any] = json.loads(out)
    assert parsed["schema_version"] == 1
    return parsed


@pytest.mark.parametrize("framework", ["trl", "unsloth", "vramwise", "trl-0.15"])
def test_plan_json_has_the_contract(capsys: pytest.CaptureFixture[str], framework: str) -> None:
    answer = document(capsys, *GRPO, "--framework", framework)
    for key in (
        *("peak_bytes", "low_bytes", "high_bytes", "capacity_bytes", "headroom_bytes"),
        *("host_peak_bytes", "allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes"),
    ):
        assert isinstance(answer[key], int)
    names = [phase["name"] for phase in answer["phases"]]
    assert names == ["load", "rollout", "score", "forward", "loss", "backward", "step"]
    assert answer["peak_phase"] in names
    assert answer["peak_bytes"] == max(phase["total_bytes"] for phase in answer["phases"])
    for phase in answer["phases"]:
        assert phase["total_bytes"] == sum(term["bytes"] for term in phase["terms"])
        for term in phase["terms"]:
            assert term["name"] in TERM_NAMES
            assert term["formula"]
            assert term["source"]


def test_plan_text_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *GRPO[:-1], "--framework", "trl")
    assert code == 0
    assert out.startswith("DOES NOT FIT: peak ")
    for phase in ("load", "rollout", "score", "forward", "loss", "backward", "step"):
        assert f"\n  {phase}" in out
    assert "<- peak" in out
    assert "8,030,261,248 parameters x 4 B" in out
    assert out.count("saves") == 3


def test_check_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *GRPO, "--framework", "trl", "--check")
    assert code == 3
    assert json.loads(out)["fits"] is False
    code, _, err = run(capsys, *GRPO[:-1], "--framework", "trl", "--check")
    assert code == 3
    assert "advise" in err
    fits = ["plan", "llama-3.2-1b", "--gpu", "h100-sxm", "--check"]
    assert run(capsys, *fits)[0] == 0


def test_save_writes_a_run_that_plans_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    first = document(
        capsys, *GRPO, "--framework", "trl", "--lora-targets", "q_proj,v_proj", "--save", str(path)
    )
    assert isinstance(load_run_file(path), RunFile)
    assert document(capsys, "plan", str(path), "--json") == first
    # a flag wins over the file
    other = document(capsys, "plan", str(path), "--batch-size", "1", "--json")
    assert other["peak_bytes"] < first["peak_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "llama-3.1-8b", "--gpu", "h1000"], "unknown gpu"),
        (["plan", "lama-3.1-8b", "--gpu", "h100"], "llama-3.1-8b"),
        (["advise", "llama-3.1-8b"], "no GPU given"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--batch-size", "-1"], "micro_batch_size"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--context", "0"], "context"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--task", "sing"], "task"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--dtype", "int3"], "dtype"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--lora-targets", "nope"], "nope"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--framework", "tlr"], "trl"),
        (["plan", "llama-3.1-8b", "--vram", "0GiB"], "vram"),
        (["plan", "missing.yaml"], "missing.yaml"),
        (["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--gpus", "0"], "gpus"),
        (["published", "nothing"], "unsloth-grpo"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 3


def test_contradicting_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3.2-1b", "--gpu", "h100-sxm", "--context", "100"]
    code, _, err = run(capsys, *arguments, "--prompt-length", "60", "--completion-length", "60")
    assert code == 2
    assert "context" in err


def test_compare_puts_frameworks_side_by_side(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["compare", "llama-3.2-1b", "--gpu", "h100-sxm", "--task", "grpo"]
    answer = document(capsys, *arguments, "--frameworks", "trl,vramwise", "--json")
    assert [plan["name"] for plan in answer["plans"]] == ["trl", "vramwise"]
    assert answer["plans"][0]["peak_bytes"] > answer["plans"][1]["peak_bytes"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "unsloth" in out
    paths = []
    for index, size in enumerate(("1", "4")):
        paths.append(str(tmp_path / f"{index}.yaml"))
        plan = ["plan", "llama-3.2-1b", "--gpu", "h100-sxm", "--batch-size", size]
        assert run(capsys, *plan, "--save", paths[-1])[0] == 0
    both = document(capsys, "compare", *paths, "--json")
    assert both["plans"][0]["peak_bytes"] < both["plans"][1]["peak_bytes"]


def test_advise_and_recommend(capsys: pytest.CaptureFixture[str]) -> None:
    advice = document(capsys, "advise", *GRPO[1:], "--framework", "trl", "--dtype", "bf16")
    assert advice["changes"]
    assert {"change", "saved_bytes", "price", "changes_objective"} <= set(advice["changes"][0])
    assert advice["combination"]["changes"]
    assert advice["largest"]["context"] > 0
    code, out, _ = run(capsys, "advise", "llama-3.2-1b", "--gpu", "h100-sxm")
    assert code == 0
    assert "Largest that fits" in out
    rows = document(capsys, "recommend", "--gpu", "rtx-4090", "--json")["rows"]
    assert any(row["method"] == "qlora" and row["parameters"] > 20e9 for row in rows)
    assert "qlora" in run(capsys, "recommend", "--gpu", "rtx-4090", "--limit", "5")[1]


def test_published_models_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    table = document(capsys, "published", "unsloth-grpo", "--json")
    keys = {"line", "column", "published", "reproduced", "unit", "derivation", "op_level_bytes"}
    assert all(keys <= set(row) for row in table["rows"])
    assert "oxen-grpo" in run(capsys, "published")[1]
    assert "every" not in run(capsys, "published", "oxen-grpo")[2]
    facts = document(capsys, "models", "llama-3.1-8b", "--json")
    assert facts["parameters"] == 8_030_261_248 == sum(facts["parameters_by_module"].values())
    assert facts["kv_bytes_per_token"] == 131_072
    assert len(document(capsys, "models", "--json")["models"]) >= 180
    assert run(capsys, "models", "gemma-2-9b")[0] == 0
    assert document(capsys, "gpus", "h100-sxm", "--json")["gpus"][0]["id"] == "h100-sxm"
    assert "h100-sxm" in run(capsys, "gpus")[1]


def test_planning_leaves_torch_alone() -> None:
    code = (
        "import sys; from app.cli import main; "
        "assert main(['plan', 'llama-3.1-8b', '--gpu', 'h100-sxm']) == 0; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_trace_tier_comes_from_the_console_script(monkeypatch):
    import planner.verbs.accuracy
    from app.cli import main

    scored = []
    assert planner.verbs.accuracy.score_traces is not None
    real = planner.verbs.accuracy.score_traces
    monkeypatch.setattr(
        planner.verbs.accuracy, "score_traces", lambda files: scored.append(files) or real([])
    )
    assert main(["accuracy", "--tier", "trace", "--json"]) == 0
    assert scored
    monkeypatch.setattr(planner.verbs.accuracy, "score_traces", None)
    assert main(["accuracy", "--tier", "trace"]) != 0


@pytest.mark.parametrize(
    ("flags", "framework"),
    [
        (("--method", "full"), "megatron"),
        (("--method", "full", "--shard", "fsdp2"), "torchtitan"),
        ((), "hf-trainer"),
    ],
)
def test_degrees_without_a_framework_say_whose_they_are(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], framework: str
) -> None:
    line = ("plan", "llama-3.2-1b", "--gpu", "h100", "--gpus", "4", "--tensor-parallel", "2")
    code, out, err = run(capsys, *line, *flags, "--json")
    assert code == 0
    assert f"planned with --framework {framework}" in err
    assert "has no --tensor-parallel" in err
    assert json.loads(out)["recipe"]["framework"].startswith(framework)
