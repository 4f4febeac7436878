"""Calibration: measured arithmetic on a fake device, the file, its use in later plans, no GPU."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.errors import NoGpuError, UsageError, VramwiseError
from planner.machines.machine import make_machine
from planner.units import GiB, MiB
from profiler.calibration import Calibration, apply, calibrate, load, measure, save
from profiler.gpu_reading import GpuReading

FOUND = Calibration(
    gpu="NVIDIA H100 80GB HBM3",
    driver="570.86.16",
    torch="2.13.0",
    taken_at="2026-11-29",
    torch_total_bytes=79 * GiB,
    context_bytes=510 * MiB,
    workspace_bytes=32 * MiB,
    segment_bytes=2 * MiB,
    bandwidth_bytes_per_s=2_700_000_000_000,
    host_to_device_bytes_per_s=52_000_000_000,
)


class FakeTensor:
    nbytes = 1

    def __matmul__(self, other: object) -> "FakeTensor":
        return self

    def copy_(self, other: object, non_blocking: bool = False) -> None: ...


class FakeCuda:
    """A device whose context takes 500 MiB and whose matrix product leaves 32 MiB behind."""

    def __init__(self) -> None:
        self.reserved = 0
        self.context = 0

    def is_available(self) -> bool:
        return True

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3")

    def memory_reserved(self) -> int:
        return self.reserved

    def memory_allocated(self) -> int:
        return 32 * MiB

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        self.reserved = 32 * MiB

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 4 * MiB, 79 * GiB

    def touch(self) -> None:
        self.context = 500 * MiB
        self.reserved += 2 * MiB


def fake_torch() -> Any:
    cuda = FakeCuda()

    def empty(*shape: int, **_: Any) -> FakeTensor:
        cuda.touch()
        return FakeTensor()

    return SimpleNamespace(
        cuda=cuda, empty=empty, ones=empty, uint8=None, bfloat16=None, __version__="2.13.0"
    )


def test_the_context_is_what_the_driver_sees_beyond_torchs_pool() -> None:
    fake = fake_torch()

    def read() -> list[GpuReading]:
        used = 1 * GiB + fake.cuda.context + fake.cuda.reserved
        return [GpuReading(index=0, label="0", name="x", used_bytes=used)]

    found = measure(fake, read, "570")
    assert found.context_bytes == 500 * MiB
    assert found.workspace_bytes == 32 * MiB
    assert found.segment_bytes == 2 * MiB
    assert found.torch_total_bytes == 79 * GiB
    assert found.bandwidth_bytes_per_s > 0


@pytest.mark.parametrize("used", [None, 1 * GiB])
def test_a_driver_that_does_not_tell_gives_no_calibration(used: int | None) -> None:
    reading = GpuReading(index=0, label="0", name="x", used_bytes=used)
    with pytest.raises(VramwiseError, match="calibrate: the driver"):
        measure(fake_torch(), lambda: [reading], "570")


def test_saving_replaces_the_same_gpu_and_keeps_others(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    save(FOUND, path)
    save(replace(FOUND, gpu="NVIDIA A40"), path)
    save(replace(FOUND, context_bytes=1), path)
    found = {each.gpu: each.context_bytes for each in load(path)}
    assert found == {"NVIDIA A40": 510 * MiB, "NVIDIA H100 80GB HBM3": 1}


def test_a_calibrated_machine_uses_it_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save(FOUND, path)
    machine = apply(make_machine("h100-sxm"), path)
    assert machine.context_bytes == 510 * MiB
    assert "measured here on 2026-11-29" in machine.calibration
    other = make_machine("rtx-4090")
    assert apply(other, path) == other
    assert apply(make_machine(vram="24GiB"), path).calibration == ""


@pytest.mark.parametrize("content", ["{", '{"gpus": [{"gpu": "x"}]}', "[]", '{"gpus": 3}'])
def test_a_damaged_file_is_one_line_with_what_to_do(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="cannot be read") as caught:
        load(path)
    assert "calibrate" in (caught.value.hint or "")


def test_no_file_is_no_calibration(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_with_exit_code_4() -> None:
    with pytest.raises(NoGpuError) as caught:
        calibrate()
    assert caught.value.exit_code == 4


def test_the_json_form_has_byte_keys() -> None:
    document = json.loads(json.dumps(FOUND.to_dict()))
    assert document["schema_version"] == 1
    assert document["context_bytes"] == 510 * MiB


def test_a_run_on_a_calibrated_machine_is_planned_with_it(tmp_path: Path, monkeypatch) -> None:
    from planner.models.hub import find_model
    from planner.plan import plan
    from planner.run.recipe import MachineSection
    from planner.run.runfile import machine_of, make_recipe

    def planned() -> Any:
        machine = machine_of(MachineSection(gpu="h100-sxm"))
        return plan(find_model("qwen3-0.6b"), make_recipe(context=128), machine)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    plain = planned()
    save(replace(FOUND, context_bytes=700 * MiB))
    measured = planned()
    assert measured.machine.context_bytes == 700 * MiB
    difference = plain.machine.context_bytes - 700 * MiB
    assert measured.capacity_bytes - plain.capacity_bytes == difference
    assert any("measured here" in line for line in measured.assumptions)
    assert not any("measured here" in line for line in plain.assumptions)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA Unheard-of 80 GB"])
def test_this_machine_is_calibrated_under_the_name_torch_prints(
    tmp_path: Path, monkeypatch, name: str
) -> None:
    """A card that the catalogue lacks can be measured all the same."""
    from profiler.calibration import this_machine

    card = SimpleNamespace(name=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: card}.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {1: (79 * GiB, 80 * GiB)}.__getitem__)
    path = tmp_path / "c.json"
    before = this_machine(path=path)
    assert before is not None
    assert before.calibration == ""
    save(replace(FOUND, gpu=name, context_bytes=333 * MiB), path)
    found = this_machine(path=path)
    assert found is not None
    assert (found.context_bytes, found.vram_bytes) == (333 * MiB, 80 * GiB)
    assert "measured here on 2026-11-29" in found.calibration


def test_a_processor_is_measured_and_its_plans_go_by_it(tmp_path: Path, monkeypatch) -> None:
    """The probe as it runs on a GPU, on small products; what it says is physically possible."""
    from typer.testing import CliRunner

    from app.cli import app
    from profiler import speed_probe
    from profiler.calibration import cpu_name

    monkeypatch.setattr(speed_probe, "CPU_SIDES", (64, 128))
    monkeypatch.setattr(speed_probe, "CPU_BYTES", 1 << 20)
    monkeypatch.setattr(speed_probe, "CPU_TOKENS", 32)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["profile", "calibrate", "--cpu", "--json"])
    assert result.exit_code == 0, result.output
    (found,) = load()
    assert found.gpu == cpu_name()
    assert set(found.matmul) == {"fp32"}
    assert 1e6 < found.fp32_flops_per_s < 1e14
    assert 1e6 < found.attention_flops_per_s < 1e14
    assert found.bandwidth_bytes_per_s > 1e6
    assert found.launch_nanoseconds > 10
    assert found.context_bytes == 0

    from planner.run.recipe import RunFile
    from trainer.config import DatasetSection, TrainSection
    from trainer.devices import this_machine

    train = TrainSection(output="out", dataset=DatasetSection(name="arithmetic"))
    if not torch.cuda.is_available():
        machine = this_machine(RunFile(model="x"), train)
        assert machine.cpu
        assert machine.measured == found
