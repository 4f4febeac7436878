"""What the GPU driver says: memory per GPU, per MIG slice and per process.

    >>> with open_gpus() as gpus:
    ...     for gpu in gpus.read():
    ...         print(gpu.label, gpu.used_bytes)

Every byte count may be None, which means that the driver does not tell: it is never shown or
summed as 0. nvidia-smi equivalents: `--query-gpu=memory.total,memory.used` and
`--query-compute-apps=pid,used_memory`.
"""

from typing import Any, Self

from planner.errors import NoGpuError
from profiler.amd import open_amd
from profiler.gpu_reading import GpuReader, GpuReading, ProcessReading

NVML_FUNCTIONS = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
)
"""The part of nvidia-ml-py's function table that is used here; a recorded session has the same."""

NVML_MEMORY_V2 = 0x02000028
"""nvmlMemory_v2: sizeof(struct) | 2 << 24; nvidia-ml-py takes it as `version=`."""
# after these the whole GPU is beyond asking, not just one figure
_LOST = ("NVMLError_GpuIsLost", "NVMLError_Uninitialized", "NVMLError_Unknown")


class NvmlReader:
    """Reads through nvidia-ml-py, or anything with the same functions and NVMLError."""

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self._memory_v2 = True
        library.nvmlInit()
        self._count = int(library.nvmlDeviceGetCount())
        self._names: dict[str, str] = {}

    def versions(self) -> dict[str, str]:
        """Return {"driver": ..., "cuda": ...}, without what the driver does not tell."""
        found: dict[str, str] = {}
        driver = self._ask("nvmlSystemGetDriverVersion")[0]
        if driver is not None:
            found["driver"] = _text(driver)
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")[0]
        if cuda is not None:
            found["cuda"] = f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}"
        return found

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU; a GPU cut into MIG slices gives one per slice."""
        readings: list[GpuReading] = []
        for index in range(self._count):
            handle, problem = self._ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                readings.append(
                    GpuReading(index=index, label=str(index), name="unknown", notes=(problem,))
                )
                continue
            mig_mode = self._ask("nvmlDeviceGetMigMode", handle)[0]
            slices = self._slices(index, handle) if mig_mode and mig_mode[0] == 1 else []
            readings += slices or [self._device(index, str(index), handle, handle)]
        return readings

    def close(self) -> None:
        """Shut the library down."""
        self._ask("nvmlShutdown")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slices(self, index: int, parent: Any) -> list[GpuReading]:
        maximum = self._ask("nvmlDeviceGetMaxMigDeviceCount", parent)[0] or 0
        found = []
        for number in range(int(maximum)):
            handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, number)[0]
            if handle is not None:
                found.append(self._device(index, f"{index}:{number}", handle, parent))
        return found

    def _device(self, index: int, label: str, handle: Any, named: Any) -> GpuReading:
        memory, problem = self._memory(handle)
        processes, listing = self._processes(handle)
        notes = [f"memory: {problem}"] if problem else []
        notes += [f"processes: {listing}"] if listing else []
        reserved = getattr(memory, "reserved", None)
        return GpuReading(
            index=index,
            label=label,
            name=self._name(handle, label) or self._name(named, str(index)) or "unknown",
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)[0] or ""),
            total_bytes=_size(memory, "total"),
            reserved_bytes=None if reserved is None else int(reserved),
            used_bytes=_size(memory, "used"),
            free_bytes=_size(memory, "free"),
            processes=processes,
            notes=tuple(notes),
        )

    def _name(self, handle: Any, label: str) -> str:
        if label not in self._names:
            self._names[label] = _text(self._ask("nvmlDeviceGetName", handle)[0] or "")
        return self._names[label]

    def _memory(self, handle: Any) -> tuple[Any, str]:
        """Ask for the v2 structure, whose `used` leaves the driver's reserve out; else v1."""
        if self._memory_v2:
            memory, problem = self._ask("nvmlDeviceGetMemoryInfo", handle, version=NVML_MEMORY_V2)
            if memory is not None or problem.startswith(_LOST):
                return memory, problem
        memory, problem = self._ask("nvmlDeviceGetMemoryInfo", handle)
        # v1 works where v2 does not: an old driver, not worth asking again
        self._memory_v2 = self._memory_v2 and memory is None
        return memory, problem

    def _processes(self, handle: Any) -> tuple[tuple[ProcessReading, ...] | None, str]:
        listed, problem = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if listed is None and problem.startswith("NVMLError_FunctionNotFound"):
            listed, problem = self._ask("nvmlDeviceGetComputeRunningProcesses_v2", handle)
        if listed is None:
            return None, problem
        graphics = self._ask("nvmlDeviceGetGraphicsRunningProcesses", handle)[0] or []
        merged: dict[int, ProcessReading] = {}
        for process in (*graphics, *listed):
            instance = getattr(process, "gpuInstanceId", None)
            used = process.usedGpuMemory
            merged[int(process.pid)] = ProcessReading(
                pid=int(process.pid),
                used_bytes=None if used is None else int(used),
                gpu_instance=None if instance in (None, 0xFFFFFFFF) else int(instance),
            )
        return tuple(merged.values()), ""

    def _ask(self, name: str, *arguments: Any, **options: Any) -> tuple[Any, str]:
        """Call one NVML function; return (answer, "") or (None, why there is none)."""
        function = getattr(self._nvml, name, None)
        if function is None:
            return None, f"NVMLError_FunctionNotFound: {name} is not in this library"
        try:
            return function(*arguments, **options), ""
        except self._nvml.NVMLError as error:
            return None, f"{type(error).__name__}: {error}"


def open_nvml() -> NvmlReader:
    """Open NVML; raises NoGpuError saying why there is none."""
    import pynvml

    try:
        return NvmlReader(pynvml)
    except pynvml.NVMLError as error:
        raise NoGpuError(
            f"no NVIDIA GPU can be read: {error}",
            hint="NVML comes with the NVIDIA driver; in a container, start it with --gpus all",
        ) from None


def open_gpus() -> GpuReader:
    """Open whatever GPUs this machine has, NVIDIA first; raises NoGpuError."""
    try:
        return open_nvml()
    except NoGpuError as error:
        amd = open_amd()
        if amd is not None:
            return amd
        raise error from None


def _size(memory: Any, name: str) -> int | None:
    return None if memory is None else int(getattr(memory, name))


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
