"""GpuSpec and Machine: how much memory torch really sees, and what surrounds it.

What fits is decided by the total that torch reports (`torch.cuda.mem_get_info`), which is
0.2-1.2 GiB less than the marketed size: the driver reserves some, ECC takes some.
"""

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import isfinite
from typing import Any

from planner.datafiles import data_dir
from planner.errors import UnknownNameError, UsageError, words_of
from planner.machines.calibration import Calibration
from planner.names import COUNTED, NOISE, memory_named, sized, without_memory
from planner.units import MiB, format_bytes, parse_memory

MAX_GPUS = 65536
GPUS_PER_NODE = 8
DEFAULT_CONTEXT_BYTES = 525 * MiB
"""CUDA context with torch's kernels loaded lazily, when only --vram is known: the middle of
0.25-0.83 GiB measured on data-centre cards (data/gpus, context_mib)."""
UNIFIED_CLASSES = frozenset({"unified", "embedded"})


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One GPU (or MIG slice, or the GPU's share of unified memory)."""

    id: str
    name: str
    """Device name as torch prints it."""
    vendor: str
    kind: str
    """consumer, workstation, datacenter, mig, embedded or unified."""
    arch: str = ""
    compute_capability: str = ""
    aliases: tuple[str, ...] = ()
    marketed_gb: float = 0
    driver_total_bytes: int | None = None
    """nvidia-smi's memory.total; None = not known."""
    torch_total_bytes: int | None = None
    """What torch.cuda.mem_get_info says is there; None = not known."""
    torch_total_basis: str = "read"
    """read: printed by a run on such a card. derived: worked out from the driver's total or a near
    card, as `source` says; a plan then says so."""
    context_bytes: int | None = None
    """CUDA context of one process; None = not known."""
    bandwidth_bytes_per_s: int | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    nvlink_bytes_per_s: int = 0
    """Both directions together; 0 = none."""
    pcie_gen: float | None = None
    pcie_lanes: int | None = None
    bf16_native: bool = True
    fp8_native: bool = False
    flash_attention: bool = False
    flash_attention_note: str = ""
    parent: str = ""
    """For a MIG slice, the GPU it is cut from."""
    notes: str = ""
    source: dict[str, str] = field(default_factory=dict)

    @property
    def unified(self) -> bool:
        """True when host and GPU share one memory: host terms count against it."""
        return self.kind in UNIFIED_CLASSES

    @property
    def pcie_bytes_per_s(self) -> int | None:
        """One direction of the host link in bytes/s (about 0.985 GB/s a PCIe 3 lane); None = not known."""
        if self.pcie_gen is None or self.pcie_lanes is None:
            return None
        return int(0.985e9 * 2 ** (self.pcie_gen - 3) * self.pcie_lanes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the run may use."""

    vram_bytes: int
    """Memory that torch sees on one GPU."""
    num_gpus: int = 1
    nodes: int = 0
    """Hosts that the GPUs are in; 0 = as few as hold eight each."""
    host_ram_bytes: int | None = None
    """None = not stated: host terms are shown but not judged."""
    gpu: GpuSpec | None = None
    """None when only --vram was given."""
    context_bytes: int = DEFAULT_CONTEXT_BYTES
    calibration: str = ""
    """Where measured overheads came from; "" = catalogue values."""
    measured: Calibration | None = None
    """What was measured here (vramwise profile calibrate)."""
    cpu: bool = False
    """No GPU: tensors lie in host memory, and torch's CPU kernels run."""

    def __post_init__(self) -> None:
        if self.vram_bytes <= 0:
            raise UsageError(f"vram: {self.vram_bytes} is not a size", hint="more than 0 bytes")
        if not 1 <= self.num_gpus <= MAX_GPUS:
            raise UsageError(f"gpus: {self.num_gpus} is outside 1..{MAX_GPUS}")
        if self.nodes and self.num_gpus % self.nodes:
            raise UsageError(
                f"nodes: {self.nodes} do not hold the same number of the {self.num_gpus} GPUs",
                hint="a number that divides --gpus",
            )
        if self.host_ram_bytes is not None and self.host_ram_bytes <= 0:
            raise UsageError(f"host-ram: {self.host_ram_bytes} is not a size")

    @property
    def node_gpus(self) -> int:
        """GPUs of one host: boards of DGX and HGX machines have eight."""
        return self.num_gpus // self.nodes if self.nodes else min(self.num_gpus, GPUS_PER_NODE)

    @property
    def label(self) -> str:
        """For a person: '2 x NVIDIA H100 80GB HBM3 (79.10 GiB)'."""
        name = self.gpu.name if self.gpu else "GPU"
        count = f"{self.num_gpus} x " if self.num_gpus > 1 else ""
        return f"{count}{name} ({format_bytes(self.vram_bytes)})"


@cache
def gpu_catalogue() -> dict[str, GpuSpec]:
    """Return every GPU of data/gpus by id, in file order."""
    catalogue: dict[str, GpuSpec] = {}
    for entry in sorted((data_dir() / "gpus").iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".json"):
            continue
        vendor = entry.name.removesuffix(".json")
        for row in json.loads(entry.read_text(encoding="utf-8")):
            catalogue[row["id"]] = _gpu_from_row(vendor, row)
    return catalogue


def _gpu_from_row(vendor: str, row: dict[str, Any]) -> GpuSpec:
    def mib(key: str) -> int | None:
        return int(row[key] * MiB) if row.get(key) else None

    bandwidth, nvlink = row.get("bandwidth_gb_s"), row.get("nvlink_gb_s")
    return GpuSpec(
        id=row["id"],
        name=row["name"],
        vendor=vendor,
        kind=row["class"],
        arch=row.get("arch", ""),
        compute_capability=str(row.get("compute_capability", "")),
        aliases=tuple(row.get("aliases", ())),
        marketed_gb=row.get("marketed_gb", 0),
        driver_total_bytes=mib("driver_total_mib"),
        torch_total_bytes=mib("torch_total_mib"),
        torch_total_basis=row.get("torch_total_basis", "read"),
        context_bytes=mib("context_mib"),
        bandwidth_bytes_per_s=int(bandwidth * 1e9) if bandwidth else None,
        bf16_tflops=row.get("bf16_tflops"),
        fp16_tflops=row.get("fp16_tflops"),
        fp8_tflops=row.get("fp8_tflops"),
        nvlink_bytes_per_s=int(nvlink * 1e9) if nvlink else 0,
        pcie_gen=row.get("pcie_gen"),
        pcie_lanes=row.get("pcie_lanes"),
        bf16_native=row.get("bf16_native", False),
        fp8_native=row.get("fp8_native", False),
        flash_attention=row.get("flash_attention", False),
        flash_attention_note=row.get("flash_attention_note", ""),
        parent=row.get("parent", ""),
        notes=row.get("notes", ""),
        source=row.get("source", {}),
    )


def _squash(name: str) -> str:
    """Fold a name to letters and digits, without the words people leave out."""
    folded = re.sub(r"nvidia|geforce|tesla|amd|radeon|instinct|intel|apple", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", folded)


@cache
def _index() -> dict[str, tuple[str, ...]]:
    """Map every folded id, alias and device name to the ids it may mean."""
    index: dict[str, tuple[str, ...]] = {}
    for gpu in gpu_catalogue().values():
        for name in {_squash(gpu.id), *map(_squash, gpu.aliases), _squash(gpu.name)}:
            index[name] = (*index.get(name, ()), gpu.id)
    for gpu in gpu_catalogue().values():  # an id always means itself
        index[_squash(gpu.id)] = (gpu.id,)
        for alias in gpu.aliases:
            index[_squash(alias)] = (gpu.id,)
    return index


@lru_cache(maxsize=512)
def gpus_like(name: str) -> tuple[str, ...]:
    """Return the ids of every card that a typed name could mean, the likest first."""
    plain = NOISE.sub(" ", name.lower().replace("-", " ").replace("_", " "))
    asked = [
        word for word in sized(words_of(plain)) if word not in ("with", "vram", "ram", "memory")
    ]
    exact = _index().get(_squash(name), ())
    found = []
    for gpu in gpu_catalogue().values():
        spelled = " ".join((gpu.id, gpu.name, *gpu.aliases)).lower().replace("-", " ")
        own = {*sized(words_of(NOISE.sub(" ", spelled))), f"{gpu.marketed_gb:g}gb"}
        if asked and set(asked) <= own:
            beside = [
                word for word in sized(words_of(gpu.id.replace("-", " "))) if word not in asked
            ]
            found.append((gpu.id not in exact, gpu.kind == "mig", len(beside), len(gpu.id), gpu.id))
    return tuple(gpu_id for *_, gpu_id in sorted(found))


def find_gpu(name: str) -> GpuSpec:
    """Return the catalogue's GPU for an id, alias or device name.

    Raises UnknownNameError with near matches, or with all candidates when the name is shared
    by cards of different size (a100: 40 or 80 GB).
    """
    folded = _squash(name)
    exact = _index().get(folded, ())
    if not exact and folded:
        # a prefix is enough when all cards it starts hold the same memory: h100-sx, rtx3060
        exact = tuple(
            gpu.id
            for gpu in gpu_catalogue().values()
            if _squash(gpu.id).startswith(folded) and gpu.kind != "mig"
        )
    if exact:
        totals = {gpu_catalogue()[gpu_id].torch_total_bytes for gpu_id in exact}
        if len(exact) == 1 or len(totals) == 1:
            return gpu_catalogue()[exact[0]]
        raise UsageError(
            f"gpu: {name[:60]!r} comes in several sizes", hint=f"say which: {', '.join(exact[:8])}"
        )
    like = gpus_like(name)
    whole = [gpu_id for gpu_id in like if gpu_catalogue()[gpu_id].kind != "mig"] or list(like)
    # the card that is called just that, before those with more to their names: 3090 24GB is no 3090 Ti
    called = [
        gpu_id for gpu_id in _index().get(_squash(without_memory(name)), ()) if gpu_id in whole
    ]
    whole = called or whole
    if whole and len({gpu_catalogue()[gpu_id].torch_total_bytes for gpu_id in whole}) == 1:
        return gpu_catalogue()[whole[0]]
    if len(whole) > 1:
        raise UsageError(
            f"gpu: {name[:60]!r} could be several cards", hint=f"say which: {', '.join(whole[:8])}"
        )
    if counted := COUNTED.fullmatch(name.strip()):
        card = find_gpu(counted["card"] or counted["each"])
        raise UsageError(
            f"gpu: {name[:60]!r} counts cards; one is named here",
            hint=f"--gpu {card.id} --gpus {counted['count'] or counted['times']}",
        )
    names = [*gpu_catalogue(), *(a for gpu in gpu_catalogue().values() for a in gpu.aliases)]
    raise UnknownNameError(
        "gpu", name, names, hint="`vramwise gpus` lists all; or give --vram 24GiB"
    )


def card_of_memory(marketed_gb: float) -> GpuSpec | None:
    """Return what any card of so many GB may count on: NVIDIA's of that size of which torch sees least."""
    kinds = ("consumer", "workstation", "datacenter")
    cards = [
        gpu
        for gpu in gpu_catalogue().values()
        if gpu.marketed_gb == marketed_gb and gpu.kind in kinds and gpu.torch_total_bytes
        if gpu.vendor == "nvidia"
    ]
    usual = [gpu for gpu in cards if gpu.kind == "consumer"] or cards
    if not usual:
        return None
    least = min(usual, key=lambda gpu: (gpu.torch_total_bytes or 0, gpu.id))
    return replace(least, name=f"card of {marketed_gb:g} GB, as the {least.name}")


def make_machine(
    gpu: str | None = None,
    *,
    gpus: int = 1,
    nodes: int | None = None,
    vram: str | int | None = None,
    host_ram: str | int | None = None,
) -> Machine:
    """Return the Machine for command-line style arguments.

    `vram` overrides the catalogue's total (a card with a display, a container's limit).
    Raises UsageError when neither a GPU nor its memory is given.
    """
    memory = memory_named(gpu) if gpu else None
    spec = card_of_memory(memory) if memory is not None else find_gpu(gpu) if gpu else None
    if memory is not None and spec is None and vram is None:
        vram = f"{memory:g}GiB"
    total = _size(vram, "vram") if vram is not None else (spec.torch_total_bytes if spec else None)
    if total is None:
        if spec is None:
            raise UsageError("no GPU given", hint="--gpu rtx-4090 or --vram 24GiB")
        raise UsageError(
            f"gpu: how much memory torch sees on {spec.name!r} is not known",
            hint="add --vram, for example --vram 7.1GiB",
        )
    context = spec.context_bytes if spec else DEFAULT_CONTEXT_BYTES
    return Machine(
        vram_bytes=total,
        num_gpus=gpus,
        nodes=nodes or 0,
        host_ram_bytes=_size(host_ram, "host-ram") if host_ram is not None else None,
        gpu=spec,
        context_bytes=context if context is not None else 0,
    )


def _size(value: str | int | float, name: str) -> int:
    if isinstance(value, str):
        return parse_memory(value, field=name)
    if not isfinite(value) or value <= 0:
        raise UsageError(f"{name}: {value} is not a size", hint="for example 24GiB")
    return int(value)
