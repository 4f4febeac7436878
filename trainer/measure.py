"""Peaks by phase of a piece of real work: torch's counters on a GPU, every storage followed on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from profiler.attribute import assign_terms, summarise
from profiler.storages import StorageTracker
from trainer.model import Policy
from trainer.phase_memory import PhaseMemory


class Recorder(Protocol):
    """Notes the peak of every phase."""

    def phase(self, name: str) -> Any:
        """Return a context: what runs inside belongs to phase `name`."""
        ...

    def peaks(self) -> dict[str, int]:
        """Return phase -> peak bytes."""
        ...


class _Counters:
    """On a GPU: the allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        self.phase = PhaseMemory(device)

    def peaks(self) -> dict[str, int]:
        """Return phase -> peak allocated bytes."""
        return {phase: allocated for phase, (allocated, _) in self.phase.peaks.items()}


class _Follower:
    """On a CPU: every storage from its first byte to its last."""

    def __init__(self, policy: Policy) -> None:
        self.tracker = StorageTracker()
        self._vocab = policy.head.weight.shape[0]
        for name, parameter in policy.model.named_parameters():
            term = "adapters" if parameter.requires_grad and "lora_" in name else "weights"
            self.tracker.adopt(parameter, term=term, module=name)
        for name, buffer in policy.model.named_buffers():
            self.tracker.adopt(buffer, term="weights", module=name)

    def phase(self, name: str) -> Any:
        """Return a context: what runs inside belongs to phase `name`."""
        return self.tracker.in_phase(name)

    def peaks(self) -> dict[str, int]:
        """Return phase -> peak bytes of live storages."""
        assign_terms(self.tracker.events, vocab=self._vocab)
        return {phase.name: phase.peak_bytes for phase in summarise(self.tracker.events).phases}


@contextmanager
def measured(policy: Policy) -> Iterator[Recorder]:
    """Yield a recorder of what the device holds, the policy's own weights included."""
    if policy.device.type == "cuda":
        yield _Counters(policy.device)
        return
    follower = _Follower(policy)
    with follower.tracker:
        yield follower
