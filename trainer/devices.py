"""The device of a run: which one, what is wrong with it, how much of it others hold, and its limit.

torch.device("cuda") has no index: it compares unequal to every tensor's device, and
torch.cuda.set_per_process_memory_fraction refuses it (torch 2.13 cuda/memory.py: _get_device_index
without optional=True). So a run's device always has one.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from planner.errors import NoGpuError, UsageError, VramwiseError
from planner.machines.calibration import apply
from planner.machines.machine import Machine
from planner.run.recipe import Recipe, RunFile
from planner.units import MiB, format_bytes, parse_bytes
from profiler import calibration
from profiler.gpu_reading import GpuReading
from profiler.nvml import open_nvml
from trainer.config import TrainSection
from trainer.fake_device import FakeDevice

BF16_CAPABILITY = (8, 0)
"""Ampere; older tensor cores have no bf16: a T4 multiplies at 2.4 TFLOPS in bf16, at 42 in fp16."""
NOTICED_BYTES = 256 * MiB
"""What others hold below this is within what CUDA contexts differ by."""
NO_GPU_REASONS = ("Found no NVIDIA driver", "No CUDA GPUs are available")
"""torch.cuda.init() where there is no GPU, or where CUDA_VISIBLE_DEVICES hides it: not a fault."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def run_device(name: str | torch.device | None = None) -> torch.device:
    """Return `name`, or the GPU that torch uses now, or the CPU; a GPU always with its index."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_driver() -> str:
    """Raise VramwiseError where there is a GPU that torch cannot use; return what else to say.

    torch itself warns about an old driver and then reports that there is no GPU: the run would go on
    on the CPU.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            check_kernels(run_device())
            return ""
    if not torch.backends.cuda.is_built():
        unused = "" if not DRIVER_FILE.exists() else "the NVIDIA GPU here is not used"
        return unused and f"{unused}: torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if reason.startswith(NO_GPU_REASONS):
            return ""
        raise VramwiseError(
            f"torch {torch.__version__} cannot use the GPU: {reason.split(' Please ')[0]}",
            hint=f"update the driver, or install a torch for an older CUDA than {torch.version.cuda}; "
            "CUDA_VISIBLE_DEVICES= trains on the CPU",
        ) from None
    return ""


def check_kernels(device: torch.device) -> None:
    """Raise VramwiseError when torch holds no kernels for this GPU: the first one would say no more.

    Code for X.Y runs on X.Z with Z >= Y (CUDA C++ Programming Guide, "Binary Compatibility").
    """
    built = [
        int("".join(filter(str.isdigit, name)))
        for name in torch.cuda.get_arch_list()
        if name.startswith("sm_")
    ]
    if not built or torch.version.hip:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if not any(code // 10 == major and code % 10 <= minor for code in built):
        low, high = min(built), max(built)
        raise VramwiseError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, torch "
            f"{torch.__version__} holds kernels for {low / 10} to {high / 10}",
            hint="install a torch built for another CUDA: https://pytorch.org/get-started; "
            "CUDA_VISIBLE_DEVICES= trains on the CPU",
        )


def check_dtype(recipe: Recipe, device: torch.device) -> None:
    """Raise UsageError when bf16 is asked of a GPU that has none."""
    if device.type != "cuda" or torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    for field, value in (("dtype", recipe.dtype or "bf16"), ("lora.dtype", recipe.lora.dtype)):
        if value == "bf16" and capability < BF16_CAPABILITY:
            said = "bf16" if recipe.dtype or field != "dtype" else "bf16 (the default)"
            raise UsageError(
                f"recipe.{field}: {said} needs compute capability 8.0 or newer, "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}",
                hint=f"{field}: fp16, or fp32",
            )


def this_machine(run: RunFile, train: TrainSection) -> Machine:
    """Return what the run may use: the pretended limit, this GPU, or this host's memory.

    This GPU: with its calibration, and without what others hold of it.
    """
    stated = run.machine.host_ram
    host_ram = parse_bytes(stated, field="machine.host_ram") if stated else None
    if train.device_memory:
        limit = parse_bytes(train.device_memory, field="train.device_memory")
        cpu = run_device().type == "cpu"
        made = Machine(vram_bytes=limit, host_ram_bytes=host_ram, context_bytes=0, cpu=cpu)
        return _calibrated_cpu(made) if cpu else made
    found = calibration.this_machine()
    if found is None:
        available = min(psutil.virtual_memory().available, host_ram or sys.maxsize)
        return _calibrated_cpu(
            Machine(vram_bytes=available, host_ram_bytes=host_ram, context_bytes=0, cpu=True)
        )
    total = found.vram_bytes
    return replace(found, vram_bytes=total - others_bytes(found, total), host_ram_bytes=host_ram)


def _calibrated_cpu(machine: Machine) -> Machine:
    """Return the machine with its processor's measured speeds, if there are any."""
    return apply(machine, device=calibration.cpu_name())


def others_bytes(machine: Machine, total_bytes: int) -> int:
    """Return what other processes hold of this GPU: all that is not free, but for our own part.

    Our part is the CUDA context (there since the driver was asked) and torch's pool. Unified memory
    has no such figure: what the host's page cache holds is not free there either.
    """
    if machine.gpu is not None and machine.gpu.unified:
        return 0
    device = run_device()
    free, _ = torch.cuda.mem_get_info(device)
    own = machine.context_bytes + torch.cuda.memory_reserved(device)
    return min(max(0, total_bytes - free - own), total_bytes - 1)


def occupied(machine: Machine) -> str:
    """Return one sentence on what others hold of this run's GPU; "" when it is not worth one."""
    if not torch.cuda.is_available():
        return ""
    device = run_device()
    _, total = torch.cuda.mem_get_info(device)
    others = others_bytes(machine, total)
    if others < NOTICED_BYTES:
        return ""
    holders = "; ".join(_holders(device))
    return (
        f"{format_bytes(others)} of the {format_bytes(total)} of {torch.cuda.get_device_name(device)} "
        f"are used by others{f' ({holders})' if holders else ''}"
    )


def _holders(device: torch.device, limit: int = 3) -> Iterator[str]:
    """Yield the largest other processes on the GPU, as far as the driver tells."""
    try:
        with open_nvml() as gpus:
            readings = gpus.read()
    except (NoGpuError, ImportError):
        return
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    here = next((each for each in readings if uuid and uuid in each.uuid), None)
    yield from _named(here, limit) if here else ()


def _named(reading: GpuReading, limit: int) -> Iterator[str]:
    others = [each for each in reading.processes or () if each.pid != os.getpid()]
    for process in sorted(others, key=lambda each: -(each.used_bytes or 0))[:limit]:
        try:
            name = f" {psutil.Process(process.pid).name()}"
        except psutil.Error:  # of another container, or gone
            name = ""
        size = f" {format_bytes(process.used_bytes)}" if process.used_bytes else ""
        yield f"pid {process.pid}{name}{size}"


@dataclass
class GpuLimit:
    """`with limit:` holds torch's allocator on `device` to `limit_bytes`, then gives it back what it had."""

    device: torch.device
    limit_bytes: int

    def __enter__(self) -> "GpuLimit":
        self._before = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = min(1.0, self.limit_bytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_per_process_memory_fraction(self._before, self.device)


def limited(device: torch.device, limit_bytes: int, model: Any) -> GpuLimit | FakeDevice:
    """Return the context in which `model`'s device holds only `limit_bytes`."""
    if device.type == "cuda":
        return GpuLimit(run_device(device), limit_bytes)
    pretended = FakeDevice(limit_bytes)
    for tensor in (*model.parameters(), *model.buffers()):
        pretended.adopt(tensor)
    return pretended
