"""What was measured on this machine's GPU or processor, for plans: read from the user's configuration.

`vramwise profile calibrate` writes the file (profiler/calibration.py); here it is only read.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.machines.machine import Machine

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured on one GPU."""

    gpu: str
    """Device name as torch prints it."""
    driver: str
    torch: str
    taken_at: str
    torch_total_bytes: int
    """What torch.cuda.mem_get_info says is there."""
    context_bytes: int
    """Taken by a torch process that has run a matrix product and holds no tensor."""
    workspace_bytes: int
    """What cuBLAS keeps in torch's pool after that product."""
    segment_bytes: int
    """Reserved for one 1-byte tensor: the allocator's small segment."""
    bandwidth_bytes_per_s: int
    """Read and write of a device copy together."""
    host_to_device_bytes_per_s: int
    """From pinned memory."""
    device_to_host_bytes_per_s: int = 0
    """To pinned memory; 0 here and below = not measured (by an older version)."""
    bf16_flops_per_s: int = 0
    """The best matmul in bf16."""
    fp16_flops_per_s: int = 0
    fp32_flops_per_s: int = 0
    """As torch computes it by default: without TF32."""
    attention_flops_per_s: int = 0
    """Causal scaled_dot_product_attention, forward and backward, in the fastest dtype."""
    launch_nanoseconds: int = 0
    """Host time of one small operation and its autograd node."""

    @property
    def matmul(self) -> dict[str, float]:
        """Return dtype -> FLOP/s of those that were measured."""
        rates = {dtype: getattr(self, f"{dtype}_flops_per_s") for dtype in ("bf16", "fp16", "fp32")}
        return {dtype: float(rate) for dtype, rate in rates.items() if rate}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"schema_version": SCHEMA_VERSION, **fields}


def default_path() -> Path:
    """Return where calibrations of this user live."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "vramwise" / "calibration.json"


def load(path: Path | None = None) -> list[Calibration]:
    """Read saved calibrations; none yet is an empty list."""
    file = path or default_path()
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["gpus"]
        return [Calibration(**row) for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"calibration: {file} cannot be read: {type(error).__name__}",
            hint="delete it and run `vramwise profile calibrate` again",
        ) from None


def apply(machine: "Machine", path: Path | None = None, *, device: str = "") -> "Machine":
    """Return `machine` with measured overheads if its GPU was calibrated here, and say so in it.

    `device`: its name as torch prints it, where that is known; the catalogue may lack the card.
    """
    names = {device} if device else set()
    if machine.gpu is not None:
        names |= {machine.gpu.name, machine.gpu.id}
    for found in load(path) if names else ():
        if found.gpu in names:
            return replace(
                machine,
                context_bytes=found.context_bytes,
                calibration=f"measured here on {found.taken_at} with torch {found.torch}",
                measured=found,
            )
    return machine
