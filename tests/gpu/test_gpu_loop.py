"""The loop on a real GPU: plan, trace and recording agree within 3%; NVML and snapshots are real.

    python -m pytest tests/gpu -m gpu

Skipped without a GPU. Models have random weights and catalogue shapes: nothing is downloaded.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import JOB_LIMIT_S, Clock, rows_of
from benchmarks.gpu_check_jobs import JOBS
from planner.units import MiB

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", [job.name for job in JOBS])
def test_every_case_and_probe_of_gpu_check_is_good(name: str) -> None:
    """A case: plan and trace within 3% of the run, and GRPO's rollout recorded as such."""
    (row,) = rows_of([name], cpu=False, limit_s=2 * JOB_LIMIT_S, clock=Clock(float("inf")))
    if "left_out" in row:
        pytest.skip(row["left_out"])
    assert row.get("ok"), row


STEP = """
import torch
model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(1024, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.reset_peak_memory_stats()
held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
del held
print("PEAK", torch.cuda.max_memory_allocated())
"""
WEIGHT = 4096 * 4096 * 4


def test_profile_run_sees_the_process_in_torch_and_in_the_driver(tmp_path: Path) -> None:
    from profiler.assemble import recordings
    from profiler.launch import LaunchSettings, launch

    script = tmp_path / "step.py"
    script.write_text(STEP)
    result = launch([sys.executable, str(script)], LaunchSettings(out=tmp_path / "o", rate_hz=50))
    assert result.exit_code == 0
    (recording,) = recordings(result)
    phases = {phase.name: phase for phase in recording.phases}
    assert phases["step"].terms_bytes["weights"] == WEIGHT
    assert phases["step"].terms_bytes["gradients"] == WEIGHT
    assert phases["step"].peak_bytes >= 4 * WEIGHT
    assert recording.peak_reserved_bytes is not None
    assert recording.peak_reserved_bytes >= recording.peak_bytes
    if recording.peak_device_bytes is not None:  # None in a container that hides its PIDs
        assert recording.peak_device_bytes > recording.peak_reserved_bytes


def test_the_programs_own_peak_is_its_own_under_the_recorder(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    bare = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    watched = subprocess.run(
        [
            sys.executable,
            "-c",
            "from profiler.cli import profile; profile()",
            "run",
            "--out",
            str(tmp_path / "o"),
            "--",
            sys.executable,
            str(script),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert watched.stdout == bare.stdout


def test_an_oom_leaves_a_snapshot_that_can_be_read(tmp_path: Path) -> None:
    from profiler.launch import LaunchSettings, launch
    from profiler.snapshot import read_snapshot
    from profiler.snapshot_analysis import analyse

    script = tmp_path / "oom.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(1024, 1024, device='cuda')\n"
        "model(torch.randn(8, 1024, device='cuda')).sum().backward()\n"
        "model(torch.randn(8, 1024, device='cuda'))\n"
        "torch.empty(1 << 50, dtype=torch.uint8, device='cuda')\n"
    )
    result = launch([sys.executable, str(script)], LaunchSettings(out=tmp_path / "o"))
    assert result.exit_code == 1
    (file,) = (tmp_path / "o" / "journal").glob("snapshot-oom-*.pickle")
    analysis = analyse(read_snapshot(file))
    assert analysis.fragmentation.allocated_bytes >= 1024 * 1024 * 4
    (journal,) = result.journals
    assert journal.ooms[0]["requested"] >= 1 << 50


def test_a_snapshot_of_the_peak_names_its_owners(tmp_path: Path) -> None:
    from profiler.launch import LaunchSettings, launch
    from profiler.snapshot import read_snapshot
    from profiler.snapshot_analysis import analyse

    script = tmp_path / "step.py"
    script.write_text(STEP)
    settings = LaunchSettings(out=tmp_path / "o", snapshot="peak")
    assert launch([sys.executable, str(script)], settings).exit_code == 0
    (file,) = (tmp_path / "o" / "journal").glob("snapshot-peak-*.pickle")
    terms = analyse(read_snapshot(file)).terms_bytes()
    assert terms["optimizer"] >= 2 * WEIGHT
    assert terms["gradients"] >= WEIGHT


def test_calibration_measures_a_context(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from profiler.cli import profile; profile()",
            "calibrate",
            "--json",
            "--path",
            str(tmp_path / "c.json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    import json

    found = json.loads(done.stdout)
    assert 100 * MiB < found["context_bytes"] < 2048 * MiB
    assert found["bandwidth_bytes_per_s"] > 1e11
