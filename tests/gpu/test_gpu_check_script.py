"""`make gpu-check` itself, tried at toy size on the CPU so that it works when a GPU is at hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py")]


def test_a_toy_case_is_planned_traced_and_recorded_within_three_percent(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = subprocess.run(
        [*SCRIPT, "--cpu", "--case", "sft-lora", "--json", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["cases"]
    assert row["within"]
    assert row["planned_phase"] == row["measured_phase"]
    assert row["traced_peak_bytes"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_exit_code_is_4() -> None:
    done = subprocess.run(SCRIPT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 4
    assert "no GPU" in done.stderr
