"""A vLLM start-up log as a Recording: weights, activation peak, graphs, KV cache beside the plan."""

from pathlib import Path
from typing import BinaryIO

from planner.doctor.scan import scan
from planner.doctor.vllm_log import VllmLog
from planner.errors import UsageError
from profiler.recording import Recording
from profiler.recording_parts import PhaseRecord


def read_vllm_log(source: Path | BinaryIO | str) -> Recording:
    """Return the Recording of a start-up log; raises UsageError when the log shows no engine.

    Phase `load` holds the weights, `rollout` everything vLLM accounts for: weights, KV cache,
    the profile run's activation peak and CUDA graphs (term engine), and what is outside
    PyTorch (term overhead).
    """
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                found = scan(file)
        except OSError as error:
            raise UsageError(f"log: cannot read {source} ({error.strerror})") from None
    else:
        found = scan(source)
    if not found.vllm.started:
        raise UsageError(
            "log: no vLLM start-up lines in it", hint="it must reach 'Model loading took'"
        )
    partial = found.vllm.kv_bytes is None or bool(found.errors)
    return recording_of(found.vllm, partial=partial)


def load_measured(path: Path) -> Recording:
    """Return a recording.json, or a vLLM start-up log as one."""
    try:
        with path.open("rb") as file:
            is_json = file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise UsageError(f"recording: cannot read {path} ({error.strerror})") from None
    return Recording.load(path) if is_json else read_vllm_log(path)


def recording_of(log: VllmLog, *, partial: bool = False) -> Recording:
    """Return what a parsed log measured; terms that it does not print are left out and noted."""
    weights = {"weights": log.weights_bytes} if log.weights_bytes is not None else {}
    rollout = {
        "weights": log.weights_bytes,
        "kv_cache": log.kv_bytes,
        "engine": _sum(log.activation_bytes, log.graphs_bytes),
        "overhead": log.non_torch_bytes,
    }
    known = {name: value for name, value in rollout.items() if value is not None}
    missing = [name for name, value in rollout.items() if value is None]
    notes = [f"the log does not print {name}" for name in missing]
    if log.kv_tokens:
        notes.append(
            f"KV cache holds {log.kv_tokens:,} tokens, {log.kv_bytes_per_token or 0:,} B each"
        )
    phases = [PhaseRecord(name="rollout", peak_bytes=sum(known.values()), terms_bytes=known)]
    if weights:
        phases.insert(
            0, PhaseRecord(name="load", peak_bytes=sum(weights.values()), terms_bytes=weights)
        )
    environment = {
        "vllm": log.version,
        "gpu_total_bytes": log.total_bytes,
        "gpu_memory_utilization": log.gpu_memory_utilization,
        "budget_bytes": log.budget_bytes,
        "kv_tokens": log.kv_tokens,
        "max_concurrency": log.max_concurrency,
        "request_tokens": log.request_tokens,
        **{f"setting_{key}": value for key, value in log.settings.items()},
    }
    return Recording(
        source="vllm-log",
        subject=f"vllm serve {log.settings.get('model', '')}".strip(),
        environment={key: value for key, value in environment.items() if value not in (None, "")},
        phases=tuple(phases),
        peak_bytes=sum(known.values()),
        peak_phase="rollout",
        partial=partial,
        notes=tuple(notes),
    )


def _sum(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
