"""What this machine's overheads really are, measured once and used by later plans."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import NoGpuError, UsageError, VramwiseError
from planner.machines.calibration import SCHEMA_VERSION, Calibration, apply, default_path, load
from planner.machines.machine import Machine, find_gpu
from profiler.gpu_reading import GpuReading


def save(found: Calibration, path: Path | None = None) -> Path:
    """Add `found`, replacing an older one of the same GPU; return the file."""
    file = path or default_path()
    others = [each for each in load(file) if each.gpu != found.gpu]
    rows = [
        {name: getattr(each, name) for name in each.__dataclass_fields__}
        for each in [*others, found]
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".part")
        temporary.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "gpus": rows}), "utf-8")
        temporary.replace(file)
    except OSError as error:
        raise VramwiseError(f"cannot write {file}: {error.strerror}") from None
    return file


def this_machine(*, num_gpus: int = 1, path: Path | None = None) -> Machine | None:
    """Return the Machine this process runs on, calibrated if it was; None without a GPU."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    device = torch.cuda.get_device_properties(index)
    try:
        spec = find_gpu(device.name)
    except UsageError:
        spec = None
    machine = Machine(
        vram_bytes=int(torch.cuda.mem_get_info(index)[1]),
        num_gpus=num_gpus,
        host_ram_bytes=psutil.virtual_memory().total,
        gpu=spec,
    )
    if spec is not None and spec.context_bytes is not None:
        machine = replace(machine, context_bytes=spec.context_bytes)
    return apply(machine, path, device=device.name)


def calibrate() -> Calibration:
    """Measure this machine's first GPU, in under a minute; raises NoGpuError without one."""
    import torch

    if not torch.cuda.is_available():
        raise NoGpuError(
            "calibrate: no GPU that torch can use",
            hint="run it where training runs; --cpu measures the processor's speed",
        )
    from profiler.nvml import open_gpus
    from profiler.speed_probe import speeds

    with open_gpus() as gpus:
        found = measure(torch, gpus.read, gpus.versions().get("driver", "unknown"))
    rates: dict[str, Any] = {**speeds(torch.device("cuda", torch.cuda.current_device()))}
    return replace(found, **rates)


def calibrate_cpu() -> Calibration:
    """Measure this machine's processor: how fast it computes and copies with torch's threads as they are."""
    import psutil
    import torch

    from profiler.speed_probe import speeds

    return Calibration(
        gpu=cpu_name(),
        driver="",
        torch=str(torch.__version__),
        taken_at=time.strftime("%Y-%m-%d"),
        torch_total_bytes=psutil.virtual_memory().total,
        context_bytes=0,
        workspace_bytes=0,
        segment_bytes=0,
        **speeds(torch.device("cpu")),
    )


def cpu_name() -> str:
    """Return what a CPU's calibration is kept under: it is of so many threads."""
    import torch

    return f"CPU, {torch.get_num_threads()} threads"


def measure(torch: Any, read_gpus: Any, driver: str) -> Calibration:
    """Measure with the given torch and driver reader; CUDA must not be in use yet."""
    device = torch.cuda.get_device_properties(0)
    before = used_now(read_gpus())
    tiny = torch.empty(1, dtype=torch.uint8, device="cuda")
    segment = int(torch.cuda.memory_reserved())
    square = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
    square @ square
    torch.cuda.synchronize()
    held = tiny.nbytes and square.nbytes
    del tiny, square
    workspace = int(torch.cuda.memory_allocated())
    torch.cuda.empty_cache()
    context = used_now(read_gpus()) - before - int(torch.cuda.memory_reserved())
    if context <= 0 or not held:
        raise VramwiseError(
            "calibrate: the driver's memory count did not move when a CUDA context was made",
            hint="another process may have freed memory at that moment; try again on an idle GPU",
        )
    return Calibration(
        gpu=str(device.name),
        driver=driver,
        torch=str(torch.__version__),
        taken_at=time.strftime("%Y-%m-%d"),
        torch_total_bytes=int(torch.cuda.mem_get_info(0)[1]),
        context_bytes=context,
        workspace_bytes=workspace,
        segment_bytes=segment,
        bandwidth_bytes_per_s=_copy_rate(torch, "cuda", moved=2),
        host_to_device_bytes_per_s=_copy_rate(torch, "cpu", moved=1),
    )


def used_now(readings: list[GpuReading]) -> int:
    """Return the first GPU's used bytes; raises VramwiseError where the driver does not tell."""
    if not readings or readings[0].used_bytes is None:
        raise VramwiseError("calibrate: the driver does not tell how much memory is used")
    return readings[0].used_bytes


def _copy_rate(torch: Any, source: str, *, moved: int) -> int:
    """Return the best of five copies of up to 1 GiB in bytes/s; `moved` = bytes touched per byte."""
    size = min(1 << 30, int(torch.cuda.mem_get_info(0)[0]) // 4)
    origin = torch.empty(size, dtype=torch.uint8, device=source, pin_memory=source == "cpu")
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(origin, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, moved * size / (time.perf_counter() - started_s))
    return int(best)
