"""The verb frameworks, and the version on the command line."""

import json
from collections.abc import Callable

import pytest

from app.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_frameworks_lists_every_law(run: Run) -> None:
    code, out, _ = run("frameworks", "--json")
    rows = {row["name"]: row for row in json.loads(out)["frameworks"]}
    assert code == 0
    assert rows["trl-1.9"]["versions"] == ">=1.7,<1.10"
    assert rows["hf-trainer"]["package"] == "transformers"
    assert "trl-1.9" in run("frameworks")[1]


def test_which_law_does_trl_1_9_use(run: Run) -> None:
    code, out, _ = run("frameworks", "trl==1.9.2")
    assert code == 0
    assert "planned as TRL 1.9 (>=1.7,<1.10), asked for 1.9.2" in out
    assert "defaults.sft.loss: full -> chunked" in out
    document = json.loads(run("frameworks", "trl==1.9.2", "--json")[1])
    assert (document["name"], document["version_asked"]) == ("trl-1.9", "1.9.2")
    assert [law["name"] for law in document["laws"]][:2] == ["trl", "trl-1.14"]


def test_an_unmatched_version_is_one_line(run: Run) -> None:
    code, out, err = run("frameworks", "trl==0.5")
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "error: framework: no law covers trl 0.5"
    assert "trl-0.15 (>=0.14,<0.16)" in err


PLAN = ("plan", "llama-3.2-1b", "--gpu", "h100-sxm", "--task", "grpo", "--json")


def test_the_version_beside_the_name_is_the_version_in_it(run: Run) -> None:
    one = json.loads(run(*PLAN, "--framework", "trl==1.9")[1])
    two = json.loads(run(*PLAN, "--framework", "trl", "--framework-version", "1.9")[1])
    assert one == two
    assert one["framework"]["name"] == "trl-1.9"
    assert one["framework"]["planned_as"] == "TRL 1.9 (>=1.7,<1.10), asked for 1.9"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--framework", "trl==1.16", "--framework-version", "1.9"), "contradict each other"),
        (("--framework", "trl", "--framework-version", "0.3"), "no law covers trl 0.3"),
        (("--framework", "trl", "--framework-version", "next"), "'next' is not a version"),
    ],
)
def test_a_wrong_version_is_a_usage_error(run: Run, words: tuple[str, ...], message: str) -> None:
    code, _, err = run(*PLAN, *words)
    assert code == 2
    assert message in err


def test_a_config_is_planned_as_the_version_that_is_stated(run: Run, tmp_path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-3.2-1B\nreward_funcs: [accuracy]\nuse_peft: true\n",
        encoding="utf-8",
    )
    flags = ("--gpu", "h100-sxm", "--json")
    document = json.loads(run("plan", str(path), "--framework-version", "1.9", *flags)[1])
    assert document["framework"]["name"] == "trl-1.9"
    assert json.loads(run("plan", str(path), *flags)[1])["framework"]["name"] == "trl"


def test_a_saved_run_keeps_its_version(run: Run, tmp_path) -> None:
    path = tmp_path / "run.yaml"
    run(*PLAN, "--framework", "trl==1.9.2", "--save", str(path))
    assert "framework: trl==1.9.2" in path.read_text(encoding="utf-8")
    document = json.loads(run("plan", str(path), "--json")[1])
    assert document["framework"]["version_asked"] == "1.9.2"
