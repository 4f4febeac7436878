"""One-line refusals and notices: vLLM's and SGLang's checks, sleep mode, drivers, DeepSpeed's report."""

import re
from re import Match

from planner.doctor import host_events
from planner.doctor.anchors import speaks
from planner.doctor.event import Event, Facts, Reader, Row, gib, nothing

__all__ = ["Event", "Facts", "match_event"]


def _kv_needed(match: Match[str]) -> Facts:
    facts: Facts = {
        "max_seq_len": int(match["len"]),
        "needed_bytes": gib(match["need"]),
        "available_bytes": gib(match["have"]),
    }
    if match["est"]:
        facts["estimated_len"] = int(match["est"])
    return facts


def _rows(match: Match[str]) -> Facts:
    return {"max_num_seqs": int(match["rows"])}


def _kv_tokens(match: Match[str]) -> Facts:
    return {"max_seq_len": int(match["len"]), "kv_tokens": int(match["tokens"])}


def _free(match: Match[str]) -> Facts:
    return {
        "free_bytes": gib(match["free"]),
        "total_bytes": gib(match["total"]),
        "wanted_bytes": gib(match["want"]),
        "gpu_memory_utilization": float(match["util"]),
    }


def _race(match: Match[str]) -> Facts:
    return {"initial_free_bytes": gib(match["a"]), "free_bytes": gib(match["b"])}


def _sleep(match: Match[str]) -> Facts:
    return {"freed_bytes": gib(match["freed"]), "still_in_use_bytes": gib(match["used"])}


def _deepspeed(match: Match[str]) -> Facts:
    names = ("allocated", "max_allocated", "cached", "max_cached")
    return {f"{name}_bytes": gib(match[name]) for name in names}


def _pool(match: Match[str]) -> Facts:
    share = match["share"] or match["share2"]
    return {"mem_fraction_static": float(share)} if share else {}


def _unbalanced(match: Match[str]) -> Facts:
    return {"initial_free_bytes": gib(match["a"]), "free_bytes": gib(match["b"])}


def _by(owner: str) -> Reader:
    return lambda _match: {"owner": owner}


def _nccl(match: Match[str]) -> Facts:
    facts: Facts = {"owner": "NCCL"}
    if match["bytes"]:
        facts["tried_bytes"] = int(match["bytes"])
    if match["host"]:
        facts["host"] = 1
    return facts


def _pinned(match: Match[str]) -> Facts:
    facts: Facts = {"owner": "TensorFlow", "host": 1}
    if match["bytes"]:
        facts["tried_bytes"] = int(match["bytes"])
    return facts


def _sglang(match: Match[str]) -> Facts:
    return {
        f"{name}_bytes": gib(value)
        for name, value in match.groupdict().items()
        if value is not None
    }


_N = r"(\d+(?:\.\d+)?)"
_ROWS: tuple[Row, ...] = (
    (
        "device_usage",
        rf"\bMA (?P<allocated>{_N}) GB\s+Max_MA (?P<max_allocated>{_N}) GB\s+CA (?P<cached>{_N}) GB\s+"
        rf"Max_CA (?P<max_cached>{_N}) GB",
        0,
        _deepspeed,
    ),
    (
        "vllm_kv_len",
        r"max(?:imum)? (?:seq|model) len(?:gth)? \((?P<len>\d+)\)[, ]{1,3}\(?(?P<need>[\d.]+) ?GiB KV cache is needed,"
        r" which is larger than the available KV cache memory \((?P<have>-?[\d.]+) ?GiB\)"
        r"(?:.{0,80}?estimated maximum model length is (?P<est>\d+))?",
        0,
        _kv_needed,
    ),
    (
        "vllm_kv_len",
        r"max seq len \((?P<len>\d+)\) is larger than the maximum number of tokens that can be stored"
        r" in (?:the )?KV cache \((?P<tokens>\d+)\)",
        0,
        _kv_tokens,
    ),
    (
        "vllm_no_blocks",
        r"No available memory for the cache blocks|Cannot auto-fit max_model_len",
        0,
        nothing,
    ),
    (
        "vllm_free_memory",
        r"Free memory on device (?:\S+ )?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than"
        r".{0,60}?\((?P<util>[\d.]+), (?P<want>[\d.]+) GiB\)",
        0,
        _free,
    ),
    (
        "vllm_sampler",
        r"out of memory occurred when warming up sampler with (?P<rows>\d+) dummy requests",
        re.IGNORECASE,
        _rows,
    ),
    (
        "vllm_profile_race",
        r"Error in memory profiling\. Initial free memory (?P<a>[\d.]+) GiB, current free memory (?P<b>[\d.]+)",
        0,
        _race,
    ),
    (
        "sleep_line",
        r"Sleep mode freed (?P<freed>[\d.]+) GiB memory, (?P<used>[\d.]+) GiB memory is still in use",
        0,
        _sleep,
    ),
    (
        "tms_oom",
        r"torch_memory_saver\S*\] (?:CUresult error:? +(?:result=)?2\b|cudaError error:? +(?:result=)?2\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY)",
        0,
        nothing,
    ),
    (
        "tms_invalid",
        r"torch_memory_saver\S*\] CUresult error:? +(?:result=)?1\b|TorchMemorySaver is disabled.{0,80}expandable_segments"
        r"|expandable_segments.{0,80}(?:not (?:supported|compatible)|conflict).{0,40}(?:memory.?saver|memory pool)",
        re.IGNORECASE,
        nothing,
    ),
    (
        "sglang_pool",
        r"Not enough memory\. Please try to increase --mem-fraction-static\.?(?:.{0,40}mem_fraction_static=(?P<share>0?\.\d+|1\.0))?"
        r"|Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=(?P<share2>[\d.]*\d)",
        0,
        _pool,
    ),
    (
        "sglang_unbalanced",
        r"memory capacity is unbalanced.{0,200}?pre_model_load_memory=(?P<b>[\d.]+).{0,60}?local_gpu_memory=(?P<a>[\d.]+)",
        0,
        _unbalanced,
    ),
    (
        "flashinfer_workspace",
        r"Failed to allocate memory for batch_(?:prefill|decode)_\w+ with size \d+ and alignment \d+ in AlignedAllocator"
        r"|Buffer overflow when allocating memory for batch_(?:prefill|decode)_\w+",
        0,
        nothing,
    ),
    (
        "sglang_line",
        r"Load weight end\..{0,120}?avail mem=(?P<avail>[\d.]+) GB, mem usage=(?P<weights>[\d.]+) GB"
        r"|Memory pool end\. avail mem=(?P<after_pool>[\d.]+) GB",
        0,
        _sglang,
    ),
    (
        "driver_refused",
        r"Error out of memory at line \d+ in file .{0,160}?(?:pythonInterface|bitsandbytes|ops)\S*"
        r"|\bout of memory at line \d+ in file .{0,120}?csrc",
        re.IGNORECASE,
        _by("bitsandbytes"),
    ),
    (
        "driver_refused",
        r"Failed to CUDA (?:(?P<host>host )?(?:calloc|alloc|malloc)\w*)(?: async)?(?: of size)? ?(?P<bytes>\d+)?"
        r"|Cuda failure(?: \d+)? .out of memory.|ncclUnhandledCudaError.{0,80}out of memory"
        r"|NCCL.{0,80}CUDA out of memory(?!\. Tried)",
        re.IGNORECASE,
        _nccl,
    ),
    (
        "driver_refused",
        r"failed to alloc(?:ate)? (?P<bytes>\d+) bytes on host|could not allocate pinned host memory",
        0,
        _pinned,
    ),
    (
        "sglang_pool_full",
        r"(?:Prefill|Decode) out of memory\. Try to lower your batch size|alloc_req_slots runs out of memory",
        0,
        nothing,
    ),
    (
        "hf_dispatch",
        r"Some modules are dispatched on the CPU or the disk|had weights offloaded to the disk"
        r"|train a model that (?:has been|was) loaded (?:in|with) (?:8-bit|4-bit|8-bit or 4-bit).{0,40}(?:CPU|disk)",
        re.IGNORECASE,
        nothing,
    ),
)
RULES: tuple[tuple[str, re.Pattern[str], Reader], ...] = tuple(
    (kind, re.compile(pattern, flags), reader)
    for kind, pattern, flags, reader in (*_ROWS, *host_events.ROWS)
)
WRAPPABLE = (
    "max seq len",
    "Free memory on device",
    "Sleep mode freed",
    "Error in memory profiling",
    "Memory on the node",
    "modules are dispatched",
)
"""Where a refusal of several numbers starts, which a narrow terminal may break."""


MAX_SILENT = 2048
_silent: set[str] = set()
"""Shapes of lines that no rule matches: a log repeats them with other numbers."""
_DIGITS = re.compile(r"(?<![\w.-])(?!(?:1|2|9|12|137)(?!\d))\d+")
"""Numbers that no rule asks for by value."""


def may_wrap(text: str) -> bool:
    """Return whether a refusal of several numbers starts here."""
    return any(word in text for word in WRAPPABLE)


def match_event(text: str) -> tuple[str, str, Facts] | None:
    """Return (kind, matched text, facts) of the first rule that matches a line, or None."""
    if not speaks(text):
        return None
    shape = _DIGITS.sub("0", text)
    if shape in _silent:
        return None
    if not host_events.NOT_MINE.search(text):
        for kind, pattern, reader in RULES:
            if match := pattern.search(text):
                return kind, match.group()[:400], reader(match)
    if len(_silent) >= MAX_SILENT:
        _silent.clear()
    _silent.add(shape)
    return None
