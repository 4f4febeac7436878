"""`make gpu-check` itself, tried at toy size on the CPU so that it works when a GPU is at hand."""

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check_jobs import (
    CASES,
    JOBS,
    OURS,
    PROBES,
    RESTART_CODE,
    VLLM_JOBS,
    Case,
    LeftOutError,
    Probe,
    by_name,
)
from benchmarks.gpu_check_vramwise import must_fit
from benchmarks.gpu_check_wheels import unpack_missing
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Recipe

ROOT = Path(__file__).parents[2]
# bare machines have no CUDA of their own to ask
GPU_ONLY = {probe.name for probe in PROBES if probe.gpu_only}


@pytest.fixture
def asked_for(request: pytest.FixtureRequest) -> None:
    """Minutes of what the other tests do in part: only for `pytest -m slow`."""
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip("python -m pytest -m slow tests/gpu")


def run(*arguments: str, timeout: float = 300, script: str = "gpu_check.py") -> Any:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_a_toy_grpo_run_is_planned_traced_and_recorded_with_its_rollout(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = run("--cpu", "--json", str(out), *only("grpo-vramwise"))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["cases"]
    assert row["ok"]
    assert row["planned_phase"] == row["measured_phase"]
    assert "rollout" in row["phases"]
    assert "score" not in row["phases"]
    assert row["phases"]["rollout"] == pytest.approx(row["rehearsal"]["rollout"], rel=0.03)
    assert abs(row["trace_error"]) < 0.03
    # rewards that differ: the step has something to learn
    assert row["losses"] != [0.0, 0.0]
    # of each step by its own clock, not of load, plan and trace
    assert len(row["step_seconds"]) == row["steps"]
    assert row["seconds_per_step"] == row["step_seconds"][-1]
    assert sum(row["step_seconds"]) < row["seconds"]


def test_probes_share_a_process_and_each_has_its_line(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    names = ("checkpointing", "head", "optimizer_state", "stochastic_rounding", "generation")
    names += ("host_slab", "recorder", "shared_prefix", "workspaces")
    done = run("--cpu", "--json", str(out), *only(*names))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["probes"]}
    assert set(rows) == set(names)
    assert all(rows[name]["ok"] for name in names if name not in GPU_ONLY)
    assert "needs a GPU" in rows["workspaces"]["left_out"]
    assert "left out" in done.stdout
    modes = rows["checkpointing"]["modes"]
    assert modes["none"]["peak_bytes"] > 2 * modes["full"]["peak_bytes"]
    assert modes["offload"]["slab_bytes"] > 0
    assert 0 < modes["full tiled"]["gradient_error"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("asked_for")
def test_every_case_and_every_probe_passes_at_toy_size(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "check.json"
    done = run("--cpu", "--json", str(out), timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    rows = {row["name"]: row for row in (*document["cases"], *document["probes"])}
    assert list(rows) == [job.name for job in (*CASES, *PROBES)]
    assert {name for name, row in rows.items() if not row.get("ok")} == GPU_ONLY
    for case in CASES:
        row = rows[case.name]
        assert abs(row["plan_error"]) < 0.03
        assert row["trace_error"] is None or abs(row["trace_error"]) < 0.03
        assert ("rollout" in row["phases"]) == ("grpo" in case.kind)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("asked_for")
def test_every_vllm_engine_passes_at_toy_size(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    out = tmp_path / "check.json"
    done = run("--cpu", "--json", str(out), timeout=1800, script="gpu_check_vllm.py")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    rows = {row["name"]: row for row in (*document["cases"], *document["probes"])}
    assert set(rows) == {job.name for job in VLLM_JOBS}
    for row in rows.values():
        if "left_out" in row:
            assert row["name"] == "vllm_shared_graphs"
        elif "agreement" in row:
            # fp32 on one machine: the same numbers, and a step that moved them
            assert max(row["agreement"]) < 1e-5 < row["moved"]
        else:
            assert "rollout" in row["phases"]
            assert row["engine_agrees"] < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_exit_code_is_4_and_the_reason_one_line(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "check.json"), timeout=120)
    assert done.returncode == 4
    assert "no GPU" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "check.json").exists()


@pytest.mark.parametrize("option", ["--wheels", "--json"])
def test_a_folder_that_is_not_there_is_one_line(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([option, str(tmp_path / "no" / "such")])
    assert ended.value.code == 2
    assert f"{option}: no folder {tmp_path}" in capsys.readouterr().err.splitlines()[-1]


def test_a_wheel_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "peft-0.21.2-py3-none-any.whl").write_text("cut short")
    with pytest.raises(SystemExit):
        gpu_check.main(["--wheels", str(tmp_path), "--json", str(tmp_path / "check.json")])
    assert "--wheels: File is not a zip file" in capsys.readouterr().err.splitlines()[-1]


def test_ours_come_first() -> None:
    assert JOBS[: len(OURS)] == OURS
    assert all(case.kind.startswith("vramwise") for case in OURS)
    last_of_ours = max(JOBS.index(job) for job in JOBS if isinstance(job, Probe))
    assert all(
        JOBS.index(case) > last_of_ours for case in CASES if not case.kind.startswith("vramwise")
    )


def test_what_a_machine_lacks_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name == "trl" else object())
    modern = {"capability": [9, 0]}
    assert gpu_check.why_not(by_name("grpo-trl"), modern) == "trl not installed"
    assert gpu_check.why_not(by_name("sft-qlora"), modern) is None


def test_what_is_larger_than_the_free_part_of_a_card_is_left_out_with_both_sizes() -> None:
    machine = make_machine("rtx-4090")
    planned = plan(find_model("llama-3.2-1b"), Recipe(task="sft", method="lora"), machine)
    must_fit(planned, planned.peak_bytes)
    must_fit(planned, None)
    with pytest.raises(LeftOutError, match=r"needs .* GiB by its plan, 1.00 GiB is free"):
        must_fit(planned, 2**30)


def test_without_bf16_what_wants_it_is_left_out() -> None:
    old = {"capability": [7, 5]}
    reason = gpu_check.why_not(by_name("grpo-vramwise"), old)
    assert reason is not None
    assert "7.5" in reason
    assert gpu_check.why_not(by_name("head"), old) is not None
    assert gpu_check.why_not(by_name("host_slab"), old) is None


def test_a_case_has_a_process_of_its_own_and_probes_in_a_row_share_one() -> None:
    groups = gpu_check.grouped(JOBS)
    assert [job for group in groups for job in group] == list(JOBS)
    assert all(len(group) == 1 for group in groups if isinstance(group[0], Case))
    assert all(
        len(group) == 1 for group in groups if group[0].name in ("workspaces", "calibration")
    )
    assert max(map(len, groups)) > 8


WORKER = """
import os, sys, time
mark = "gpu-check-row "
for name in sys.argv[sys.argv.index("--worker") + 1:]:
    if name == "dies":
        print("the reason", file=sys.stderr)
        sys.stderr.flush()
        os.kill(os.getpid(), {signal})
    if name == "hangs":
        time.sleep(600)
    print(mark + '{{"name": "' + name + '", "pid": ' + str(os.getpid()) + "}}", flush=True)
    if name == "lost":
        sys.exit({restart})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose jobs end as their names say, in place of the real one."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(signal=int(signal.SIGSEGV), restart=RESTART_CODE))
    monkeypatch.setattr(gpu_check, "__file__", str(script))


@pytest.mark.usefixtures("worker")
def test_a_job_that_ends_its_process_costs_only_itself() -> None:
    clock = gpu_check.Clock(100)
    rows = list(gpu_check.rows_of(["a", "dies", "b", "c"], cpu=True, limit_s=30, clock=clock))
    assert [row["name"] for row in rows] == ["a", "dies", "b", "c"]
    assert rows[1]["failed"] == f"the process ended (signal {int(signal.SIGSEGV)}): the reason"
    assert rows[2]["pid"] == rows[3]["pid"] != rows[0]["pid"]


@pytest.mark.usefixtures("worker")
def test_after_a_lost_context_the_next_job_has_another_process_and_no_blame() -> None:
    clock = gpu_check.Clock(100)
    rows = list(gpu_check.rows_of(["lost", "b"], cpu=True, limit_s=30, clock=clock))
    assert [row["name"] for row in rows] == ["lost", "b"]
    assert not any("failed" in row for row in rows)
    assert rows[0]["pid"] != rows[1]["pid"]


@pytest.mark.usefixtures("worker")
def test_a_job_that_hangs_is_ended_and_named() -> None:
    clock = gpu_check.Clock(100)
    rows = list(gpu_check.rows_of(["hangs", "b"], cpu=True, limit_s=3, clock=clock))
    assert rows[0]["failed"] == "took longer than 3 s"
    assert rows[1]["name"] == "b"


@pytest.mark.usefixtures("worker")
def test_when_the_time_is_over_the_rest_is_left_out_by_name() -> None:
    clock = gpu_check.Clock(gpu_check.MIN_START_S - 1)
    rows = list(gpu_check.rows_of(["a", "b"], cpu=True, limit_s=30, clock=clock))
    assert [row["left_out"] for row in rows] == ["the 14 s are over"] * 2


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"VERSION = '{version}'\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)


def test_only_wheels_of_what_is_missing_or_too_old_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"pydantic": "2.3", "pydantic-core": "2.6", "psutil": "7.0", "rich": "15.0.0"}
    monkeypatch.setattr("benchmarks.gpu_check_wheels.installed", here.get)
    wheel(tmp_path, "pydantic", "2.14.4", "Requires-Dist: pydantic-core==2.50.5\n")
    wheel(tmp_path, "pydantic_core", "2.50.5")
    wheel(tmp_path, "psutil", "7.2.2")
    wheel(tmp_path, "peft", "0.21.2")
    site = tmp_path / "site"
    said = list(unpack_missing(tmp_path, site))
    assert sorted(path.name for path in site.iterdir() if "." not in path.name) == [
        "peft",
        "pydantic",
        "pydantic_core",
    ]
    assert any("2.3 was here" in line for line in said)


def test_a_wheel_whose_own_needs_are_not_met_is_left_out_and_so_is_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `datasets` without pyarrow would break transformers' Trainer, which imports it when it is there."""
    monkeypatch.setattr("benchmarks.gpu_check_wheels.installed", lambda name: None)
    wheel(tmp_path, "datasets", "5.2.0", "Requires-Dist: dill\nRequires-Dist: pyarrow>=21\n")
    wheel(tmp_path, "dill", "0.4.1")
    wheel(tmp_path, "trl", "1.16.0", "Requires-Dist: datasets\nRequires-Dist: x; extra == 'y'\n")
    said = list(unpack_missing(tmp_path, tmp_path / "site"))
    assert [line for line in said if "left out" in line] == [
        "datasets-5.2.0-py3-none-any.whl left out: needs pyarrow",
        "trl-1.16.0-py3-none-any.whl left out: needs datasets",
    ]
    assert (tmp_path / "site" / "dill").is_dir()
    assert not (tmp_path / "site" / "trl").exists()


def test_a_wheel_of_another_platform_is_said_not_unpacked(tmp_path: Path) -> None:
    name = "thing-1.0-cp27-cp27m-win32.whl"
    zipfile.ZipFile(tmp_path / name, "w").close()
    assert list(unpack_missing(tmp_path, tmp_path / "site")) == [
        f"{name} is not for this Python and platform"
    ]
