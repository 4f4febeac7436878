"""CUDA without a card: the trainer's code for a GPU runs, its tensors stay in host memory.

torch's own Python functions run, with their own rules for arguments (torch 2.13 cuda/memory.py,
cuda/_utils.py); only what they call in the driver is replaced, by functions that take what the driver
takes: a device number. Tensors asked for on "cuda" are made on the CPU.
"""

from types import SimpleNamespace
from typing import Any

import bitsandbytes  # noqa: F401  before torch.cuda says that there is a card: it looks when imported
import peft  # noqa: F401
import torch
from torch.overrides import TorchFunctionMode

from planner.units import GiB, MiB
from tests.profiler.fake_cuda import FakeCuda

TOTAL_BYTES = 24 * GiB
UUID = ""
"""As torch prints it: without the driver's prefix "GPU-"."""


class Driver:
    """What torch._C would ask: one card, its free memory, its counters and its last error."""

    def __init__(self, counters: FakeCuda) -> None:
        self.counters = counters
        """torch's memory counters."""
        self.name = "NVIDIA GeForce RTX 4090"
        self.capability = (8, 9)
        self.free_bytes = TOTAL_BYTES - 400 * MiB
        self.fraction = 1.0
        self.fractions: list[float] = []
        self.last_error = 0
        self.refuses_to_pin = False
        self.pinned: set[int] = set()

    # torch._C
    def set_fraction(self, fraction: float, device: int) -> None:
        """Take what torch._C._cuda_setMemoryFraction takes."""
        assert type(device) is int
        self.fraction = fraction
        self.fractions.append(fraction)

    def get_fraction(self, device: int) -> float:
        """Answer as torch._C._cuda_getMemoryFraction."""
        assert type(device) is int
        return self.fraction

    def properties(self, device: int) -> Any:
        """Answer as torch._C._get_device_properties."""
        assert type(device) is int
        return SimpleNamespace(
            name=self.name,
            total_memory=TOTAL_BYTES,
            major=self.capability[0],
            minor=self.capability[1],
            uuid=UUID,
        )

    # torch.cuda.cudart()
    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Return (free, total)."""
        assert type(device) is int
        return self.free_bytes, TOTAL_BYTES

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin, or fail and remember it as CUDA does."""
        if self.refuses_to_pin:
            self.last_error = 2
            return 2
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin; what was never pinned is an error that is remembered."""
        if address not in self.pinned:
            self.last_error = 713
            return 713
        self.pinned.discard(address)
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        """Return CUDA's words."""
        return {2: "out of memory", 713: "memory not registered"}[status]

    def launch(self) -> None:
        """Check after a launch as C10_CUDA_KERNEL_LAUNCH_CHECK: cudaGetLastError reads and resets."""
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {self.cudaGetErrorString(error)}")


class OnHost(TorchFunctionMode):
    """Make on the CPU what is asked for on a GPU; every such call is a launch."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` with CPU devices."""
        kwargs = kwargs or {}
        wanted = [*args, *kwargs.values()]
        if func is not torch.device and any(_is_gpu(value) for value in wanted):
            self._driver.launch()
            args = tuple(_on_host(value) for value in args)
            kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if _is_gpu(value) else value


def install(monkeypatch: Any) -> Driver:
    """Put a Driver behind torch.cuda for one test; return it. Tensors need `OnHost` beside it."""
    properties = torch.cuda.get_device_properties
    driver = Driver(FakeCuda(total_bytes=TOTAL_BYTES).install(monkeypatch))

    def replace(owner: Any, name: str, value: Any) -> None:
        monkeypatch.setattr(owner, name, value, raising=False)

    replace(torch.cuda, "is_available", lambda: True)
    replace(torch.cuda, "get_device_properties", properties)
    replace(torch.cuda, "_get_device_properties", driver.properties)
    replace(torch.cuda, "cudart", lambda: driver)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        replace(module, "_lazy_init", lambda: None)
    replace(torch.cuda, "default_generators", (torch.Generator(),))
    replace(torch._C, "_cuda_setMemoryFraction", driver.set_fraction)
    replace(torch._C, "_cuda_getMemoryFraction", driver.get_fraction)
    replace(torch._C, "_cuda_getArchFlags", lambda: "sm_75 sm_80 sm_86 sm_90a sm_100 sm_120")
    generator = torch.Generator
    replace(torch, "Generator", lambda device="cpu": generator(_on_host(device)))
    # threads that load weights would not see OnHost
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    return driver
