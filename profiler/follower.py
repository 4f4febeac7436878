"""Follows every real tensor storage of a running loop, step by step, in bounded memory.

`StorageTracker` lists events; a live run would list them without end. So at every optimizer step
the events are folded into the phases' peaks, and what is alive goes on to the next step. Needs
torch and the standard library only: `profile run --follow` loads it into any program.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from profiler.attribute import Summary, assign_terms, summarise, to_events
from profiler.dtensors import is_wrapper, visible
from profiler.recording_parts import Event, LiveTensor, PhaseRecord
from profiler.startup.vramwise_meters import quantisation_tables
from profiler.startup.vramwise_phases import PhaseTracker
from profiler.storages import DEVICE, HOST, Block, BlockEvent, StorageTracker

MAX_EVENTS = 200_000
"""Fold earlier than at the step when so many have come (about 60 MB of them)."""
CPU = "cpu"
STANDING = "standing"
"""Pseudo-phase of what was alive when a fold began: no phase's peak."""


class LiveStorages(StorageTracker):
    """A StorageTracker that counts tensors of other device types as host memory.

    Which type it follows, the first tensor on an accelerator decides; until one comes, the CPU.
    """

    def __init__(self, *, on_full: Callable[[], None], on_device: Callable[[], None]) -> None:
        super().__init__()
        self.device_type = CPU
        self.enabled = True
        self._on_full = on_full
        self._on_device = on_device

    def _add(self, tensor: torch.Tensor, op: str) -> Block | None:
        if not self.enabled:
            return None
        if len(self.events) > MAX_EVENTS:
            self._on_full()
        kind = tensor.device.type
        if self.device_type == CPU and kind not in (CPU, "meta"):
            self.device_type = kind
            self._on_device()
        if kind == self.device_type:
            return super()._add(tensor, op)
        with self.on_host():
            return super()._add(tensor, op)


class Follower:
    """Phases x terms of a live run from its tensors' storages."""

    def __init__(self, phases: PhaseTracker) -> None:
        self.storages = LiveStorages(on_full=self.fold, on_device=self._all_so_far_is_host)
        self.phases: dict[str, PhaseRecord] = {}
        self.largest: tuple[LiveTensor, ...] = ()
        self.events: tuple[Event, ...] = ()
        self.peak_bytes = 0
        self.host_peak_bytes = 0
        self.vocab = 0
        self._tracker = phases
        self._adopted: set[int] = set()
        self._standing: list[Block] = []
        self._stack = ExitStack()
        self._sees_shards = False

    def start(self) -> None:
        """Begin to follow."""
        self.storages.phase = self._tracker.phase
        self.storages.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Fold what is left and stop following."""
        self.fold()
        self._stack.close()
        self.storages.enabled = False
        # leaving a mode takes away the newest one, whoever's it is: ours only if it is ours
        if _get_current_dispatch_mode() is self.storages:
            self.storages.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def adopt(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give parameters, gradients and optimizer state of a model their terms."""
        if id(model) in self._adopted:
            return
        self._adopted.add(id(model))
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab = self.vocab or int(getattr(text, "vocab_size", 0) or 0)
        if any(is_wrapper(type(parameter)) for parameter in model.parameters()):
            self._see_shards()
        with self.storages.in_phase("load"):
            for name, parameter in model.named_parameters():
                # whatever touched it first: a parameter is a parameter
                module = name.rpartition(".")[0]
                self.storages.adopt(parameter, term=_term_of(name), module=module)
                self._own(parameter.grad, "gradients", name)
                if parameter.requires_grad:
                    self._tag_gradient(parameter, name)
            for name, buffer in model.named_buffers():
                self._own(buffer, "weights", name)
            for path, table in quantisation_tables(model):
                self._own(table, "weights", f"{path}.weight")
            for optimizer in optimizers:
                for state in optimizer.state.values():
                    for tensor in state.values():
                        self._own(tensor, "optimizer", "")
        self._stack.enter_context(self.storages.module_names(model))

    def _see_shards(self) -> None:
        """See what FSDP2 gathers and sends; once, however many models are sharded."""
        if not self._sees_shards:
            self._sees_shards = True
            self._stack.enter_context(visible(self.storages))

    def adopt_known(self) -> None:
        """Adopt every model that the phase tracker has seen."""
        optimizers = self._tracker.optimizers()
        for model in self._tracker.models():
            self.adopt(model, optimizers)
        for optimizer in optimizers:  # it may step before any pass of its model
            if id(optimizer) not in self._adopted:
                self._adopted.add(id(optimizer))
                self._adopt_groups(optimizer)

    def on_change(self, old: str, new: str) -> bool:
        """Follow the loop into phase `new`; True when a step was folded."""
        self.storages.phase = new or old
        self.adopt_known()
        if old == "step" or not new:
            self.fold()
            return True
        return False

    def fold(self) -> None:
        """Take the events so far into the phases' peaks and forget them."""
        events, self.storages.events = self.storages.events, []
        before = [
            BlockEvent(True, block, STANDING, block.op, block.module) for block in self._standing
        ]
        self._standing = self.storages.live_blocks()
        if not events:
            return
        whole = before + events
        if not any(event.block.place == DEVICE for event in whole):
            on_host = sum(event.block.bytes for event in whole if event.alloc)
            self.host_peak_bytes = max(self.host_peak_bytes, on_host)
            return
        assign_terms(whole, vocab=self.vocab)
        self._take(summarise(whole), whole)

    def _all_so_far_is_host(self) -> None:
        """Count what a program made before its first tensor on an accelerator as host memory."""
        self.host_peak_bytes = max(self.host_peak_bytes, self.peak_bytes)
        self.phases, self.largest, self.events, self.peak_bytes = {}, (), (), 0
        made = (event.block for event in self.storages.events)
        for block in (*made, *self._standing, *self.storages.live_blocks()):
            block.place = HOST

    def _take(self, summary: Summary, events: list[BlockEvent]) -> None:
        self.host_peak_bytes = max(self.host_peak_bytes, summary.host_peak_bytes)
        for phase in summary.phases:
            if not phase.peak_bytes:  # host memory alone, before anything was on the device
                continue
            known = self.phases.get(phase.name)
            if phase.name != STANDING and (known is None or phase.peak_bytes > known.peak_bytes):
                self.phases[phase.name] = phase
        if summary.peak_phase != STANDING and summary.peak_bytes > self.peak_bytes:
            self.peak_bytes = summary.peak_bytes
            self.largest = summary.largest
            self.events = to_events(events)

    def live_bytes(self) -> int:
        """Return the bytes of all storages alive on the device now."""
        return sum(b.bytes for b in self.storages.live_blocks() if b.place == DEVICE)

    def to_dict(self) -> dict[str, Any]:
        """Return the device type followed, phases and the largest tensors, JSON-ready."""
        return {
            "device": self.storages.device_type,
            "phases": [asdict(phase) for phase in self.phases.values()],
            "largest": [asdict(tensor) for tensor in self.largest],
        }

    def _adopt_groups(self, optimizer: torch.optim.Optimizer) -> None:
        with self.storages.in_phase("load"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._own(parameter, "weights", "")
                    self._own(parameter.grad, "gradients", "")

    def _own(self, tensor: Any, term: str, name: str) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        block = self.storages.block_of(tensor)
        if block is None or not block.term:
            self.storages.adopt(tensor, term=term, module=name.rpartition(".")[0])

    def _tag_gradient(self, parameter: torch.nn.Parameter, name: str) -> None:
        def tag(updated: torch.Tensor) -> None:
            if updated.grad is not None:
                self.storages.adopt(updated.grad, term="gradients", module=name.rpartition(".")[0])

        handle: Any = parameter.register_post_accumulate_grad_hook(tag)
        self._stack.callback(handle.remove)


def _term_of(name: str) -> str:
    return "adapters" if "lora_" in name or "modules_to_save" in name else "weights"
