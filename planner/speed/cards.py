"""How fast a card is: published peaks and bandwidths, and the best matmul anybody measured on it.

data/speed/cards.csv, matmul.csv and links.csv hold one fact a row with its source; they are joined to
data/gpus by the id of the one resolver (planner/machines/machine.py).
"""

import csv
from functools import cache
from math import sqrt
from typing import NamedTuple

from planner.datafiles import data_dir

PEAKS = {
    "bf16": "bf16_tflops_fp32acc",
    "fp16": "fp16_tflops_fp32acc",
    "fp32": "fp32_tflops",
    "tf32": "tf32_tflops",
    "fp8": "fp8_tflops_fp32acc",
    "int8": "int8_tops",
    "fp4": "fp4_tflops",
}
TERA, GIGA = 1e12, 1e9
BRIDGES = (
    ("h200-nvl", 4),
    ("-nvl", 2),
    ("-pcie", 2),
    ("rtx-", 2),
    ("a30", 2),
    ("a40", 2),
    ("mi210", 4),
)
"""Cards whose NVLink (Infinity Fabric) is a bridge over the tops of neighbours, and how many it joins; SXM and
OAM boards have switches or links between all."""
GEFORCE = ("rtx-20", "rtx-30", "rtx-40", "rtx-50")
THROUGH_HOST = 11.28 / 27.12
"""Of a PCIe link, what passes between cards of which none reads another's memory: 11.28 GB/s, where a patched driver
has 27.12 (data/speed/links.csv: RTX 3090, p2pBandwidthLatencyTest)."""
CPU = "cpu"
"""The id of a processor whose speeds were measured (planner/speed/measured.py): no table has one."""


class CardSpeed(NamedTuple):
    """One card's speeds, in FLOP/s and bytes/s."""

    id: str
    peaks: dict[str, float]
    """Dense FLOP/s by dtype, as sold."""
    measured: dict[str, float]
    """The best matmul measured, by dtype."""
    bandwidth: float
    nvlink: float
    """One direction; 0 = none. A bridge joins few cards: `link` says what so many have between them."""
    pcie: float
    """One direction; 0 = not known (memory shared with the host)."""
    tdp_watts: float
    """0 = not known."""
    peers: bool = True
    """One card may read another's memory over PCIe; the driver of GeForce cards lets none."""

    def ceiling(self, dtype: str) -> tuple[float, bool]:
        """Return the fastest matmul in a dtype, and whether it was measured; (0, False): not known.

        A card without the dtype computes in another: what it would use is fp32. A processor has no sheet:
        only what was measured on it.
        """
        if dtype in self.measured:
            return self.measured[dtype], True
        sheet = self.peaks.get(dtype) or self.peaks.get("fp32")
        return (
            (sheet, False) if sheet else (self.measured.get("fp32", 0.0), "fp32" in self.measured)
        )

    def link(self, gpus: int) -> float:
        """Return bytes/s of one direction between so many cards of a node: NVLink where it joins all of them."""
        joined = next((most for part, most in BRIDGES if part in self.id), gpus)
        if self.nvlink and gpus <= joined:
            return self.nvlink
        return self.pcie * (1.0 if self.peers else THROUGH_HOST)

    def fastest(self, dtype: str) -> float:
        """Return what no matmul exceeds: the sheet's peak, or a measurement above it."""
        return max(self.peaks.get(dtype, 0.0), self.measured.get(dtype, 0.0))


class HostMemory(NamedTuple):
    """What the memory of a node's host moves, in bytes/s, as its channels say."""

    low: float
    high: float
    host: str

    @property
    def reached(self) -> float:
        """Bytes/s that an optimizer reaches: of a range its middle, by its ends' ratio."""
        return HOST_SHARE * sqrt(self.low * self.high)

    @property
    def either(self) -> float:
        """Return the factor by which it may be more or less."""
        return sqrt(self.high / self.low)


HOST_SHARE = 0.72
"""STREAM on a DGX A100's host: 148 GB/s of a socket's 205, with 32 threads (gist.github.com/v0dro/0559e1d9)."""


@cache
def host_memory(gpu_id: str) -> HostMemory:
    """Return the host memory of the nodes that a card is sold in (data/speed/hosts.csv); a range where they differ."""
    rows = csv.DictReader(_lines("hosts.csv"))
    row = next(row for row in rows if gpu_id.startswith(row["gpus"]))
    return HostMemory(float(row["low_gb_s"]) * GIGA, float(row["high_gb_s"]) * GIGA, row["host"])


@cache
def card_speed(gpu_id: str) -> CardSpeed | None:
    """Return a card's speeds, or None where its bandwidth or its matmul speed is not known."""
    rows = _rows("cards.csv", gpu_id)
    if not rows:
        return None
    row = rows[0]
    peaks = {dtype: float(row[name]) * TERA for dtype, name in PEAKS.items() if row[name]}
    measured = {each["dtype"]: float(each["tflops"]) * TERA for each in _rows("matmul.csv", gpu_id)}
    bandwidth = _number(row["mem_bandwidth_gb_s"]) * GIGA
    if not bandwidth or not (peaks or measured):
        return None
    return CardSpeed(
        id=gpu_id,
        peaks=peaks,
        measured=measured,
        bandwidth=bandwidth,
        nvlink=_number(row["nvlink_gb_s_both_directions"]) * GIGA / 2,
        pcie=_number(row["pcie_gb_s_one_way_theory"]) * GIGA,
        tdp_watts=_number(row["tdp_w"]),
        peers=not gpu_id.startswith(GEFORCE),
    )


def _number(text: str) -> float:
    return float(text) if text else 0.0


def _rows(name: str, gpu_id: str) -> list[dict[str, str]]:
    """Return one card's rows; the file's other lines are not parsed."""
    lines = _lines(name)
    kept = [line for line in lines[1:] if line.startswith(f"{gpu_id},")]
    return list(csv.DictReader([lines[0], *kept]))


@cache
def _lines(name: str) -> list[str]:
    return (data_dir() / "speed" / name).read_text(encoding="utf-8").splitlines()
