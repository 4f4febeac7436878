"""How much memory this process holds on a CPU, and who owns the bytes at a phase's peak.

A GPU's meter is in vramwise_cuda. Standard library only at import, Python 3.9 or newer; see
vramwise_phases. A reading that is not available is None, never 0.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from typing import Any


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            [
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ]
        )
    ]


_CREDIT_S = 0.2


class CpuMeter:
    """The C heap, where torch keeps CPU tensors: bytes in use since the meter was made.

    glibc walks its free lists to answer, up to tens of milliseconds in a fragmented heap. So
    asking is paid from an account: _CREDIT_S at first, 2% of the time that passes after that.
    When it is empty the last answer stands.
    Only totals: which tensors they are is for the follower to say.
    """

    kind = "cpu"
    reserved_now: int | None = None

    def __init__(self, torch: Any = None, holding: int = 0) -> None:
        """`holding`: bytes of tensors that exist already and are to be counted."""
        try:
            self._mallinfo: Any = ctypes.CDLL(None).mallinfo2
            self._mallinfo.restype = _MallInfo
        except (AttributeError, OSError):  # not glibc 2.33 or newer
            self._mallinfo = None
        self._credit_s, self._cost_s, self._then_s = _CREDIT_S, 0.0, time.perf_counter()
        self._now = self._base = self._peak = 0
        self._base = max(0, (self._ask() or 0) - holding)
        self._peak = self._now = 0

    def read(self, keep_s: float = _CREDIT_S / 2) -> tuple[int | None, None]:
        """Return (bytes in use, None): a C heap has no pool of its own to report.

        Asks only if at least `keep_s` stays in the account, for the changes of phase.
        """
        if self._mallinfo is None:
            return None, None
        now_s = time.perf_counter()
        self._credit_s = min(_CREDIT_S, self._credit_s + 0.02 * (now_s - self._then_s))
        self._then_s = now_s
        if self._credit_s - self._cost_s >= keep_s:
            self._now = max(0, (self._ask() or 0) - self._base)
            self._peak = max(self._peak, self._now)
            self._cost_s = time.perf_counter() - now_s
            self._credit_s -= self._cost_s
        return self._now, None

    def take_peak(self) -> tuple[int | None, None]:
        """Return the largest reading since the last call, and start again."""
        now, _ = self.read(keep_s=0.0)
        if now is None:
            return None, None
        peak, self._peak = max(self._peak, now), now
        return peak, None

    def holds(self, device: Any, address: int) -> bool:
        """Return True: what has an owner counts, whether the C heap or another allocator has it."""
        return True

    def close(self) -> None:
        """Nothing to undo."""

    def _ask(self) -> int | None:
        if self._mallinfo is None:
            return None
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)


_FIRST_ROUNDS = 4


class PeakBook:
    """The largest peak of every phase, and who owned the bytes then."""

    def __init__(self, meter: Any, tracker: Any) -> None:
        self.meter = meter
        self.peaks: dict[str, dict[str, Any]] = {}  # phase -> {"peak", "reserved", "terms"}
        self._closed: dict[str, int] = {}  # phase -> how often
        self._tracker = tracker
        self._overhead: int | None = None

    def close(self, phase: str) -> tuple[int | None, dict[str, Any] | None]:
        """End `phase`; return (its peak, its entry if that is the largest so far else None)."""
        peak, reserved = self.meter.take_peak()
        if peak is None:
            return None, None
        best = self.peaks.get(phase)
        self._closed[phase] = self._closed.get(phase, 0) + 1
        higher = best is None or peak > best["peak"] * 1.001
        # optimizer state comes with the first step: the first rounds are looked at whatever was read
        if not higher and self._closed[phase] > _FIRST_ROUNDS:
            return peak, None
        terms = self._terms(peak)
        # what has an owner is there for certain; a sampled CPU peak may have missed it
        peak = max(peak, sum(terms.values()))
        if best is not None and peak <= best["peak"]:
            return peak, None
        entry = {"peak": peak, "reserved": reserved, "terms": terms}
        self.peaks[phase] = entry
        return peak, entry

    def _terms(self, peak: int) -> dict[str, int]:
        """Bytes with an owner now. A C heap also holds what is no tensor: libraries, tokenizers."""
        terms = static_terms(
            self._tracker.models(), self._tracker.optimizers(), holds=self.meter.holds
        )
        if self.meter.kind == "cpu":
            if self._overhead is None:  # the first pass has not started: no activations yet
                self._overhead = max(0, peak - sum(terms.values()))
            terms["overhead"] = self._overhead
        return terms


def everywhere(device: Any, address: int) -> bool:
    """Count tensors wherever they are."""
    return True


def tensor_bytes(
    tensors: Iterable[Any], seen: set[int], holds: Callable[[Any, int], bool] = everywhere
) -> int:
    """Sum the storages that `holds` and that are not in `seen` (a set of addresses, extended)."""
    total = 0
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (AttributeError, NotImplementedError, RuntimeError):
            continue  # a wrapper without a storage of its own (DTensor, functional tensors)
        if address and address not in seen and holds(tensor.device, address):
            seen.add(address)
            total += size
    return total


def static_terms(
    models: Iterable[Any],
    optimizers: Iterable[Any],
    holds: Callable[[Any, int], bool] = everywhere,
) -> dict[str, int]:
    """Bytes of weights, adapters, gradients and optimizer state that exist now where `holds`.

    Quantised weights are counted by the storage they really have; their absmax tables hang off
    `quant_state` and count as weights too.
    """
    seen: set[int] = set()
    models = list(models)
    named = [(n, p) for model in models for n, p in model.named_parameters()]
    buffers = [b for model in models for b in model.buffers()]
    adapters = [p for n, p in named if "lora_" in n or "modules_to_save" in n]
    weights = [p for n, p in named if not ("lora_" in n or "modules_to_save" in n)]
    tables = [table for model in models for _, table in quantisation_tables(model)]
    terms = {
        "adapters": tensor_bytes(adapters, seen, holds),
        "weights": tensor_bytes(weights + buffers + tables, seen, holds),
        "gradients": tensor_bytes([p.grad for _, p in named if p.grad is not None], seen, holds),
        "optimizer": 0,
    }
    for optimizer in optimizers:
        states = list(optimizer.state.values())
        tensors = [t for s in states if isinstance(s, dict) for t in s.values() if _is_tensor(t)]
        terms["optimizer"] += tensor_bytes(tensors, seen, holds)
    return {name: size for name, size in terms.items() if size}


def quantisation_tables(model: Any) -> list[tuple[str, Any]]:
    """(module's path, tensor) of every absmax and code table of 4-bit weights.

    They hang off the weight; off the linear alone once FSDP2 has divided the weight.
    """
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        owners = [module, *module.parameters(recurse=False)]
        states = {id(s): s for s in (getattr(o, "quant_state", None) for o in owners) if s}
        for state in states.values():
            for holder in (state, getattr(state, "state2", None)):
                if holder is not None:
                    found += [(path, t) for t in vars(holder).values() if _is_tensor(t)]
    return found


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")
