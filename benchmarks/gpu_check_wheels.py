"""Wheels for `make gpu-check` on a machine that has torch and transformers and reaches no index.

    python benchmarks/gpu_check_wheels.py DIR [--python 3.12]    # where there is a network
    python benchmarks/gpu_check.py --wheels DIR                  # there

Fetches what the checks need beyond torch and transformers, for Linux on x86-64, in the versions of
constraints.txt, and says how large the whole is (60 MiB is the limit). `datasets` and `trl` come along
for machines that have pyarrow and pandas, which alone would be over the limit; elsewhere their case is
left out by name. There, only what is missing or too old is unpacked, beside the machine's own packages.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LIMIT_BYTES = 60 * 2**20
LIGHT = [
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "nvidia-ml-py",
    "psutil",
    "typer",
    "click",
    "shellingham",
    "rich",
    "markdown-it-py",
    "mdurl",
    "Pygments",
]
TRAIN = ["accelerate", "peft", "bitsandbytes"]
TRL = ["trl", "datasets", "dill", "multiprocess", "xxhash"]
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5))
PLATFORMS += ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")


def main() -> int:
    """Fetch the wheels; 1 if pip failed or they are too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help=f"version over there; default {here}")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", options.python, "--implementation", "cp", "-d", options.folder]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    wanted = [*LIGHT, *TRAIN, *TRL]
    if subprocess.run([*command, *(pinned(name) for name in wanted)], check=False).returncode:
        return 1
    wheels = sorted(options.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{total / 2**20:6.2f} MiB  in {len(wheels)} wheels")
    return 0 if total <= LIMIT_BYTES else 1


def pinned(name: str) -> str:
    """Return `name` in the version that constraints.txt names."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        found, separator, number = line.partition("==")
        if separator and normal(found) == normal(name):
            return f"{found}=={number.split(';')[0].strip()}"
    return name


def unpack_missing(folder: Path, site: Path) -> Iterator[str]:
    """Unpack into `site` what this machine lacks of the wheels in `folder`; yield what was done."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    here = set(sys_tags())
    wheels: dict[str, Path] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, _, _, tags = parse_wheel_filename(wheel.name)
        if tags & here:
            wheels[str(name)] = wheel
        else:
            yield f"{wheel.name} is not for this Python and platform"
    for name, lacking in unusable(wheels):
        yield f"{wheels.pop(name).name} left out: needs {lacking}"
    # what an unpacked wheel asks for decides about the others: pydantic wants one pydantic_core
    wanted = project_requirements()
    waiting = wheels.copy()
    while chosen := [name for name in waiting if not satisfied(name, wanted)]:
        for name in chosen:
            wheel = waiting.pop(name)
            zipfile.ZipFile(wheel).extractall(site)
            wanted += requirements_of(wheel)
            yield f"{wheel.name} unpacked ({installed(name) or 'none'} was here)"


def unusable(wheels: dict[str, Path]) -> list[tuple[str, str]]:
    """Return (name, what it needs) of wheels with a need that is neither here nor among them.

    A package that is there but does not import is worse than none: transformers' Trainer imports
    `datasets` when it sees it, and that imports pyarrow.
    """
    needs = {name: [normal(each.name) for each in requirements_of(wheels[name])] for name in wheels}
    found: dict[str, str] = {}
    while True:
        usable = wheels.keys() - found.keys()
        more = {
            name: need
            for name in usable
            for need in needs[name]
            if need not in usable and installed(need) is None
        }
        if not more:
            return sorted(found.items())
        found |= more


def satisfied(name: str, wanted: Sequence["Requirement"]) -> bool:
    """Return whether the version of `name` installed here is one that all of `wanted` allow."""
    found = installed(name)
    ranges = [each.specifier for each in wanted if normal(each.name) == name]
    return found is not None and all(each.contains(found, prereleases=True) for each in ranges)


def project_requirements() -> list["Requirement"]:
    """Return what pyproject.toml asks for to plan, train and compare with TRL."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [
        Requirement(line) for line in (*project["dependencies"], *extras["train"], *extras["dev"])
    ]


def requirements_of(wheel: Path) -> list["Requirement"]:
    """Return what a wheel asks for on this machine, extras left out."""
    from email.parser import Parser

    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    found = [Requirement(line) for line in lines]
    return [each for each in found if not each.marker or each.marker.evaluate({"extra": ""})]


def installed(name: str) -> str | None:
    """Return the version of a package here; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def normal(name: str) -> str:
    """Return a package's name as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
