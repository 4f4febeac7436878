"""What must be alike on all ranks before they load anything: code, run file, rewards, data, packages, GPUs."""

import hashlib
import importlib.metadata
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from planner.errors import UsageError
from planner.run.recipe import RunFile
from trainer.data import FILE_LOADERS
from trainer.foreign import Given
from trainer.parallel.ranks import Ranks

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "vllm")
ABSENT = "none"
SHARED_FOLDER_S = 10.0
"""For a network file system to show on all nodes what one has written."""


def check_alike(ranks: Ranks, path: Path, given: Given) -> None:
    """Raise the same UsageError on every rank where they would not train the same thing."""
    if not ranks.several:
        return
    every: list[dict[str, Any]] = ranks.gather_objects(
        {"host": socket.gethostname(), "facts": _facts(path, given), "gpu": _gpu()}
    )
    first, here = every[0], [f"rank {rank} on {each['host']}" for rank, each in enumerate(every)]
    for rank, each in enumerate(every):
        for name, value in each["facts"].items():
            expected = first["facts"].get(name, ABSENT)
            if value == expected:
                continue
            if ABSENT in (value, expected):
                lacking = here[rank] if value == ABSENT else here[0]
                raise UsageError(
                    f"{name}: {lacking} has none", hint="every node needs it, at the same place"
                )
            raise UsageError(
                f"{name}: {here[rank]} has another one than {here[0]} ({value}, {expected})",
                hint="all ranks train from the same files and packages: use a folder that all nodes share",
            )
        if each["gpu"] != first["gpu"]:
            raise UsageError(
                f"GPU: {here[rank]} has {each['gpu']}, {here[0]} {first['gpu']}",
                hint="ranks are planned alike and wait for the slowest: use GPUs of one kind",
            )


def check_world(run: RunFile, ranks: Ranks) -> None:
    """Raise UsageError where the run file says another number of GPUs than there are ranks.

    One that says nothing is for as many as there are.
    """
    stated = run.machine.gpus if "gpus" in run.machine.model_fields_set else ranks.size
    if stated != ranks.size:
        runs = "1 rank runs" if ranks.size == 1 else f"{ranks.size} ranks run"
        raise UsageError(
            f"machine.gpus: {stated}, but {runs}",
            hint=f"vramwise train RUN.yaml --nproc {stated}, torchrun --nproc-per-node {stated} -m trainer "
            "RUN.yaml, or leave machine.gpus out",
        )


def check_shared(ranks: Ranks, output: Path) -> None:
    """Raise UsageError where a rank does not see what the first one writes into the output folder."""
    if not ranks.several:
        return
    token, theirs = ranks.broadcast_object((uuid.uuid4().hex, str(output)))
    mark = output / f".seen-{token}"
    if ranks.first:
        mark.touch()
    hosts = ranks.gather_objects((_appears(mark.exists), socket.gethostname()))
    if ranks.first:
        mark.unlink()
    for rank, (sees, host) in enumerate(hosts):
        if not sees:
            raise UsageError(
                f"train.output: rank {rank} on {host} does not see {theirs} of the first rank",
                hint="a folder that all nodes share: every rank writes its part of a checkpoint there",
            )


def _appears(there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SHARED_FOLDER_S
    while not there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _facts(path: Path, given: Given) -> dict[str, str]:
    """Return name -> a short digest, or a version."""
    root = Path(__file__).parents[2]
    packages = [root / name for name in ("planner", "profiler", "trainer")]
    code = (file for package in packages for file in sorted(package.rglob("*.py")))
    facts = {"code": _digest(code, root), "run file": _digest([path], path.parent)}
    for name, value in (("rewards", [r.name for r in given.train.rewards]), ("callbacks", given.train.callbacks)):  # fmt: skip
        for each in value:
            file = each.partition(".py:")[0] + ".py" if ".py:" in each else ""
            if file:
                facts[f"train.{name}: {file}"] = _digest([given.root / file], given.root)
    sections = {"dataset": given.train.dataset, "validation": given.train.validation}
    for key, section in sections.items():
        if section is not None and Path(section.name).suffix in FILE_LOADERS:
            rows = given.root / Path(section.name).expanduser()
            facts[f"train.{key}: {section.name}"] = _digest([rows], rows.parent)
    for package in PACKAGES:
        facts[package] = _version(package)
    return facts


def _digest(files: Iterable[Path], root: Path) -> str:
    made, some = hashlib.sha256(), False
    for file in files:
        if file.is_file():
            some = True
            made.update(os.path.relpath(file, root).encode() + b"\0")
            with file.open("rb") as opened:  # samples may be many
                made.update(hashlib.file_digest(opened, "sha256").digest())
    return f"sha256 {made.hexdigest()[:12]}" if some else ABSENT


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.name} with {round(found.total_memory / 2**30)} GiB"
