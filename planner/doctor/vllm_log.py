"""vLLM's start-up log: what each step said it took, across versions (v0 and v1 engines)."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from planner.units import GiB

_LINES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("version", r"(?:LLM engine|vLLM API server|vLLM) \(?(?:version |v)(?P<v>\d+\.\d+[\w.+]*)"),
        ("weights", r"(?:Model loading took|Loading model weights took) (?P<gib>[\d.]+) ?Gi?B"),
        (
            "profile_v0",
            r"model weights take (?P<weights>[\d.]+)GiB; non_torch_memory takes (?P<non_torch>-?[\d.]+)GiB;"
            r" PyTorch activation peak memory takes (?P<activation>[\d.]+)GiB; the rest of the memory reserved"
            r" for KV Cache is (?P<kv>-?[\d.]+)GiB",
        ),
        (
            "budget",
            r"total_gpu_memory \((?P<total>[\d.]+)GiB\) x gpu_memory_utilization \((?P<util>[\d.]+)\)"
            r" = (?P<budget>[\d.]+)GiB",
        ),
        (
            "profile_v1",
            r"Total non KV cache memory: (?P<non_kv>[\d.]+)GiB; torch peak memory increase: (?P<activation>[\d.]+)GiB;"
            r" (?:non-torch forward increase memory: (?P<non_torch>-?[\d.]+)|total consumed \(from mem_get_info\): [\d.]+)GiB;"
            r" weights memory: (?P<weights>[\d.]+)GiB",
        ),
        (
            "summary",
            r"Free memory on device \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup\. Desired GPU memory"
            r" utilization is \((?P<util>[\d.]+), (?P<budget>[\d.]+) GiB\)\. Actual usage is (?P<consumed>[\d.]+) GiB for"
            r" (?P<what>weight|consumed memory \(weights \+ non-torch\)), (?P<activation>[\d.]+) GiB for peak activation,"
            r" (?:(?P<non_torch>-?[\d.]+) GiB for non-torch memory, )?and (?P<graphs>-?[\d.]+) GiB for CUDAGraph memory",
        ),
        ("kv", r"Available KV cache memory: (?P<gib>-?[\d.]+) GiB"),
        ("tokens", r"(?:GPU|cuda|CUDA) KV cache size: (?P<n>[\d,]+) tokens"),
        ("blocks", r"# (?:GPU|cuda|CUDA) blocks: (?P<n>\d+)"),
        (
            "concurrency",
            r"Maximum concurrency for (?P<len>[\d,]+) tokens per request: (?P<x>[\d.]+)x",
        ),
        ("graphs", r"Graph capturing finished in \d+ secs?, took (?P<gib>-?[\d.]+) GiB"),
        ("graph_estimate", r"Estimated CUDA graph memory: (?P<gib>[\d.]+) GiB"),
    )
)
_QUICK = re.compile(
    r"LLM engine|non-default args|took [\d.]+ ?Gi?B|model weights take|total_gpu_memory|Total non KV cache"
    r"|Desired GPU memory|Available KV|KV cache size|blocks: \d|Maximum concurrency|raph capturing finished"
    r"|CUDA graph memory|vLLM API server"
)
_SETTING = re.compile(
    r"['\"]?(?P<key>model_tag|model|dtype|max_seq_len|max_model_len|max_num_seqs|max_num_batched_tokens"
    r"|tensor_parallel_size|pipeline_parallel_size|quantization|kv_cache_dtype|enforce_eager|gpu_memory_utilization"
    r"|enable_lora|max_loras|max_lora_rank|enable_expert_parallel|block_size|cpu_offload_gb"
    r"|enable_sleep_mode)['\"]?\s*[=:]\s*['\"]?(?P<value>[^,'\"}{\s]+)"
)


@dataclass(frozen=True, kw_only=True)
class VllmLog:
    """What one engine's start-up said; None = the log does not say."""

    version: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    total_bytes: int | None = None
    free_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    budget_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    activation_bytes: int | None = None
    graphs_bytes: int | None = None
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    gpu_blocks: int | None = None
    request_tokens: int | None = None
    """Length for which the log printed the concurrency."""
    max_concurrency: float | None = None

    @property
    def started(self) -> bool:
        """True when the log got as far as weights or a KV cache."""
        return self.weights_bytes is not None or self.kv_bytes is not None

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV bytes of one token by the log's own numbers."""
        if self.kv_bytes and self.kv_tokens:
            return round(self.kv_bytes / self.kv_tokens)
        return None


def read_vllm_line(log: VllmLog, text: str) -> VllmLog:
    """Return `log` with what the line adds; a line of something else changes nothing."""
    if not _QUICK.search(text):
        return log
    changes: dict[str, Any] = {}
    for name, pattern in _LINES:
        if match := pattern.search(text):
            changes.update(_changes(name, match))
    if "LLM engine" in text or "non-default args" in text:
        found = {match["key"]: match["value"] for match in _SETTING.finditer(text)}
        changes["settings"] = {**log.settings, **found}
        if "gpu_memory_utilization" in found:
            changes.setdefault("gpu_memory_utilization", _number(found["gpu_memory_utilization"]))
    return replace(log, **changes) if changes else log


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _gib(text: str | None) -> int | None:
    return None if text is None else round(float(text) * GiB)


def _changes(name: str, match: re.Match[str]) -> dict[str, Any]:
    got = match.groupdict()
    single = {
        "weights": "weights_bytes",
        "kv": "kv_bytes",
        "graphs": "graphs_bytes",
        "graph_estimate": "graphs_bytes",
    }
    if name in single:
        return {single[name]: _gib(got["gib"])}
    if name == "version":
        return {"version": got["v"]}
    if name == "tokens":
        return {"kv_tokens": int(got["n"].replace(",", ""))}
    if name == "blocks":
        return {"gpu_blocks": int(got["n"])}
    if name == "concurrency":
        return {
            "request_tokens": int(got["len"].replace(",", "")),
            "max_concurrency": float(got["x"]),
        }
    changes: dict[str, Any] = {
        f"{key}_bytes": _gib(got[key])
        for key in ("weights", "non_torch", "activation", "kv", "total", "free", "budget", "graphs")
        if got.get(key) is not None
    }
    if got.get("util"):
        changes["gpu_memory_utilization"] = float(got["util"])
    if got.get("what") == "weight":
        changes["weights_bytes"] = _gib(got["consumed"])
    return changes
