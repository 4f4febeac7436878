"""A rank of a fake process group allocates what a rank of a real one does, byte for byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiler.attribute import assign_terms
from profiler.trace import run_subject
from tests.profiler.sharded_cases import CASES, subject
from tests.profiler.sharded_rank import peaks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("process-groups")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Every case on two gloo ranks: rank 0's peaks."""
    file = tmp_path_factory.mktemp("ranks") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.profiler.sharded_rank", str(rank), str(file), ",".join(CASES)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found: dict[str, dict[str, int]] = json.loads(said[0].splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_fake_rank_allocates_what_a_real_one_does(name: str, real: dict[str, dict[str, int]]):
    step = subject(CASES[name])
    tracker = run_subject(step)
    assign_terms(tracker.events, vocab=step.vocab, embedding=step.trained_embedding)
    assert peaks(tracker.events) == real[name]
