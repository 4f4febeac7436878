"""Runs a training step on fake tensors and records every allocation: no GPU, no memory, seconds.

The step is real code (transformers, PEFT, TRL, this project's trainer) run by torch on FakeTensors:
shapes and dtypes without data. `StorageTracker` follows the storages, `CudaBehaviour` makes
allocations those of CUDA, `attribute` turns the events into phases x terms.
"""

import gc
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.allocator.caching import AllocatorConfig, replay
from planner.errors import UnsupportedError, VramwiseError
from profiler.attribute import assign_terms, summarise, to_events
from profiler.cuda_behaviour import CudaBehaviour, workspaces
from profiler.dtensors import states_found, visible
from profiler.recording import Recording
from profiler.sharded import Shard, process_group
from profiler.storages import StorageTracker

DEFAULT_TIME_LIMIT_S = 600.0


class Subject(Protocol):
    """A step that can be traced."""

    name: str
    notes: tuple[str, ...]
    vocab: int
    trained_embedding: tuple[int, ...]
    """Shape of the input embedding when it is trained."""
    padded: bool
    """The batch's mask is not all ones."""
    standing_bytes: tuple[int, ...]
    """What CUDA libraries take through torch's allocator for good: a workspace a BLAS handle."""

    shard: Shard | None
    """How the model is divided over ranks; None: it is not."""

    def build(self) -> torch.nn.Module:
        """Return the model on the meta device."""
        ...

    def divide(self, model: torch.nn.Module) -> None:
        """Divide the model on the meta device over the ranks, if there are several."""
        ...

    def allocate(self, model: torch.nn.Module, tracker: StorageTracker) -> None:
        """Give the model memory, and do what else belongs to loading."""
        ...

    def run(self, model: torch.nn.Module, tracker: StorageTracker) -> None:
        """Run the steps on the materialised model."""
        ...


def trace(
    subject: Subject,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Callable[[int, str], None] | None = None,
    allocator: AllocatorConfig | None = None,
    in_place: bool = True,
    cpu: bool = False,
) -> Recording:
    """Return the Recording of `subject` run on fake tensors; `allocator` decides what is reserved.

    `cpu`: by the kernels of a CPU, not CUDA's. `in_place=False` counts as torch's own memory trackers do (see StorageTracker).
    Raises TraceTimeoutError at `time_limit_s`, UnsupportedError naming op and module when the
    model cannot run on fake tensors.
    """
    started = time.monotonic()
    tracker = run_subject(
        subject, time_limit_s=time_limit_s, progress=progress, in_place=in_place, cpu=cpu
    )
    assign_terms(tracker.events, vocab=subject.vocab, embedding=subject.trained_embedding)
    summary = summarise(tracker.events)
    events = to_events(tracker.events)
    pool = replay(events, config=allocator)
    return Recording(
        source="trace",
        subject=subject.name,
        environment=environment(seconds=time.monotonic() - started, operators=tracker.ops),
        phases=summary.phases,
        peak_bytes=summary.peak_bytes,
        peak_phase=summary.peak_phase,
        peak_reserved_bytes=pool.peak_reserved_bytes,
        host_peak_bytes=summary.host_peak_bytes,
        peak_op=summary.peak_op,
        peak_module=summary.peak_module,
        largest=summary.largest,
        events=events,
        notes=subject.notes,
    )


def run_subject(
    subject: Subject,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Callable[[int, str], None] | None = None,
    fake: bool = True,
    in_place: bool = True,
    cpu: bool = False,
) -> StorageTracker:
    """Run `subject` and return the tracker; `fake=False` runs it on real CPU memory, `cpu` by a CPU's kernels."""
    tracker = StorageTracker(
        workspaces=workspaces(), deadline_s=time.monotonic() + time_limit_s, in_place=in_place
    )
    if progress is not None:
        tracker.on_op = progress
    shard = subject.shard
    with ExitStack() as stack:
        if shard is not None:
            stack.enter_context(process_group(shard))
        model = subject.build()
        if shard is not None:
            subject.divide(model)
            stack.enter_context(visible(tracker))
        if fake:  # FSDP2 holds meta tensors until they get memory
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=shard is not None))
            stack.enter_context(states_found())
        stack.enter_context(tracker)
        stack.enter_context(CudaBehaviour(tracker, padded=subject.padded, kernels=not cpu))
        stack.enter_context(_collected_by_hand())
        try:
            subject.allocate(model, tracker)
            with tracker.in_phase("forward"):  # the first product comes after loading
                for size in subject.standing_bytes:
                    tracker.standing(size, op="cublasSetWorkspace", term="overhead")
            stack.enter_context(tracker.module_names(model))
            watch_gradients(model, tracker)
            subject.run(model, tracker)
            tracker.stop()
        except VramwiseError:
            raise
        except Exception as error:
            raise explain(error, subject=subject, tracker=tracker) from error
    return tracker


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """Keep Python's cycle collector from freeing tensors at moments of its own choice.

    What exists already is frozen: collections by hand then look at the trace's own objects only.
    """
    gc.collect()
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freezes:
            gc.unfreeze()


def watch_gradients(model: torch.nn.Module, tracker: StorageTracker) -> None:
    """Tag every `.grad` as a gradient when autograd sets it."""
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            module = path.rpartition(".")[0]

            def tag(updated: torch.Tensor, module: str = module) -> None:
                if updated.grad is not None:
                    tracker.adopt(updated.grad, term="gradients", module=module)

            parameter.register_post_accumulate_grad_hook(tag)


def explain(error: Exception, *, subject: Subject, tracker: StorageTracker) -> VramwiseError:
    """Return one line that says which op of which module cannot be traced, and why."""
    where = (
        f"operator {tracker.last_op or '?'}, module {tracker.where() or '?'}, phase {tracker.phase}"
    )
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return UnsupportedError(
            f"{subject.name} cannot be traced: data-dependent control flow at {where} ({error})",
            hint="the code branches on tensor values, which fake tensors do not have",
        )
    lines = str(error).strip().splitlines()
    first = next((line for line in lines if line.strip()), kind)
    return UnsupportedError(f"{subject.name} cannot be traced: {kind} at {where}: {first[:240]}")


def environment(*, seconds: float, operators: int) -> dict[str, Any]:
    """Return what the trace ran on."""
    versions: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "seconds": round(seconds, 2),
        "operators": operators,
    }
    from importlib.metadata import PackageNotFoundError, version

    for package in ("transformers", "peft", "bitsandbytes", "trl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
