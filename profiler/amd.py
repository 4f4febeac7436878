"""AMD GPUs: amdsmi where it is installed, else the amdgpu driver's files under /sys."""

from pathlib import Path
from typing import Any, Self

from planner.units import MiB
from profiler.gpu_reading import GpuReader, GpuReading, ProcessReading

DRM = Path("/sys/class/drm")


class AmdSmiReader:
    """Reads through the amdsmi package, or anything with the same functions."""

    def __init__(self, library: Any) -> None:
        self._smi = library
        library.amdsmi_init()
        self._handles = list(library.amdsmi_get_processor_handles())

    def versions(self) -> dict[str, str]:
        """Return {"driver": ...} where amdsmi tells it."""
        if not self._handles:
            return {}
        info = self._ask("amdsmi_get_gpu_driver_info", self._handles[0]) or {}
        return {"driver": str(info["driver_version"])} if "driver_version" in info else {}

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU."""
        return [self._device(index, handle) for index, handle in enumerate(self._handles)]

    def close(self) -> None:
        """Shut the library down."""
        self._ask("amdsmi_shut_down")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _device(self, index: int, handle: Any) -> GpuReading:
        usage = self._ask("amdsmi_get_gpu_vram_usage", handle)
        asic = self._ask("amdsmi_get_gpu_asic_info", handle) or {}
        listed = self._ask("amdsmi_get_gpu_process_list", handle)
        total = None if usage is None else int(usage["vram_total"]) * MiB
        used = None if usage is None else int(usage["vram_used"]) * MiB
        return GpuReading(
            index=index,
            label=str(index),
            name=str(asic.get("market_name", "AMD GPU")),
            total_bytes=total,
            used_bytes=used,
            free_bytes=None if total is None or used is None else total - used,
            processes=None if listed is None else tuple(map(_process, listed)),
            notes=() if usage is not None else ("memory: amdsmi does not tell",),
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._smi, name)(*arguments)
        except self._smi.AmdSmiException:
            return None


def _process(entry: dict[str, Any]) -> ProcessReading:
    memory = entry.get("memory_usage", {}).get("vram_mem", entry.get("mem"))
    # amdsmi writes "N/A" where it has no figure
    return ProcessReading(
        pid=int(entry["pid"]), used_bytes=memory if isinstance(memory, int) else None
    )


class AmdSysfsReader:
    """Reads mem_info_vram_* of the amdgpu kernel driver: totals only, no processes."""

    def __init__(self, cards: list[Path]) -> None:
        self._cards = cards

    def versions(self) -> dict[str, str]:
        """Return nothing: the files carry no version."""
        return {}

    def read(self) -> list[GpuReading]:
        """Return one reading per card."""
        readings = []
        for index, card in enumerate(self._cards):
            total, used = (_number(card / f"mem_info_vram_{what}") for what in ("total", "used"))
            readings.append(
                GpuReading(
                    index=index,
                    label=str(index),
                    name="AMD GPU",
                    total_bytes=total,
                    used_bytes=used,
                    free_bytes=None if total is None or used is None else total - used,
                    notes=("processes: install amdsmi to see them",),
                )
            )
        return readings

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def open_amd(drm: Path = DRM) -> GpuReader | None:
    """Open AMD GPUs, or return None when there are none."""
    try:
        import amdsmi

        return AmdSmiReader(amdsmi)
    except Exception:  # absent, or present without a driver: amdsmi raises many kinds
        cards = [path.parent for path in sorted(drm.glob("card[0-9]*/device/mem_info_vram_total"))]
        return AmdSysfsReader(cards) if cards else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
