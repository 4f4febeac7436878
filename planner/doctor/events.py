"""One-line refusals and notices: vLLM's checks, sleep mode, host out-of-memory, DeepSpeed's report."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.doctor.cuda_message import CudaMessage
from planner.units import GiB, KiB

Facts = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a log says about memory, with what led to it."""

    kind: str
    """cuda_oom, cumem_oom, vllm_kv_len, vllm_no_blocks, vllm_free_memory, vllm_sampler,
    vllm_profile_race, sleep_line, host_killed, host_alloc, host_usage, device_usage."""
    line: int
    text: str
    rank: str = ""
    facts: Facts = field(default_factory=dict)
    cuda: CudaMessage | None = None
    stack: tuple[str, ...] = ()
    """Lines before it in the same stream, the nearest last."""
    ranks: tuple[str, ...] = ()
    """Every stream that reported the same."""

    @property
    def is_error(self) -> bool:
        """True when it ended the run (a notice such as a sleep line does not)."""
        return self.kind not in ("sleep_line", "host_usage", "device_usage")


def _gib(text: str) -> int:
    return round(float(text) * GiB)


def _kv_needed(match: re.Match[str]) -> Facts:
    facts: Facts = {
        "max_seq_len": int(match["len"]),
        "needed_bytes": _gib(match["need"]),
        "available_bytes": _gib(match["have"]),
    }
    if match["est"]:
        facts["estimated_len"] = int(match["est"])
    return facts


def _rows(match: re.Match[str]) -> Facts:
    return {"max_num_seqs": int(match["rows"])}


def _kv_tokens(match: re.Match[str]) -> Facts:
    return {"max_seq_len": int(match["len"]), "kv_tokens": int(match["tokens"])}


def _free(match: re.Match[str]) -> Facts:
    return {
        "free_bytes": _gib(match["free"]),
        "total_bytes": _gib(match["total"]),
        "wanted_bytes": _gib(match["want"]),
        "gpu_memory_utilization": float(match["util"]),
    }


def _race(match: re.Match[str]) -> Facts:
    return {"initial_free_bytes": _gib(match["a"]), "free_bytes": _gib(match["b"])}


def _sleep(match: re.Match[str]) -> Facts:
    return {"freed_bytes": _gib(match["freed"]), "still_in_use_bytes": _gib(match["used"])}


def _killed(match: re.Match[str]) -> Facts:
    rss = match.groupdict().get("rss")
    return {"process_rss_bytes": int(rss) * KiB} if rss else {}


def _tried(match: re.Match[str]) -> Facts:
    return {"host_tried_bytes": int(match["bytes"])}


def _node(match: re.Match[str]) -> Facts:
    return {"host_used_bytes": _gib(match["used"]), "host_total_bytes": _gib(match["total"])}


def _virtual(match: re.Match[str]) -> Facts:
    used = _gib(match["used"])
    return {"host_used_bytes": used, "host_total_bytes": round(used * 100 / float(match["pct"]))}


def _deepspeed(match: re.Match[str]) -> Facts:
    names = ("allocated", "max_allocated", "cached", "max_cached")
    return {f"{name}_bytes": _gib(match[name]) for name in names}


def _none(_match: re.Match[str]) -> Facts:
    return {}


_N = r"(\d+(?:\.\d+)?)"
Reader = Callable[[re.Match[str]], Facts]
_TABLE: tuple[tuple[str, str, int, Reader], ...] = (
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
        _none,
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
        "host_killed",
        r"(?:Out of memory|Memory cgroup out of memory): Killed(?: process \d+ \(.{1,40}?\))?"
        r"(?:.{0,60}?anon-rss:(?P<rss>\d+)kB)?",
        re.IGNORECASE,
        _killed,
    ),
    (
        "host_alloc",
        r"DefaultCPUAllocator: .{0,60}?tried to allocate (?P<bytes>\d+) bytes",
        0,
        _tried,
    ),
    (
        "host_alloc",
        r"Unable to allocate (?:array|\S+ \S+ for an array)|std::bad_alloc|^MemoryError\b",
        0,
        _none,
    ),
    (
        "host_killed",
        r"Memory on the node .{0,80}? was (?P<used>[\d.]+)GB / (?P<total>[\d.]+)GB",
        0,
        _node,
    ),
    (
        "host_killed",
        r"\bOOM ?Killed\b|oom_kill event|srun: error: .{0,80}Out Of Memory|oom-kill(?:er)?\b|exit ?code:? ?\(?-9\b|exitcode *: *-9\b|exit(?:ed with)? (?:code|status):? 137\b"
        r"|SIGKILL|^\s*Killed\s*$|killed due to memory pressure|actor died.{0,40}\b(?:CPU )?OOM\b"
        r"|\b(?:host|CPU|system) (?:RAM |memory )?(?:OOM|out of memory)\b",
        re.IGNORECASE,
        _none,
    ),
    (
        "device_usage",
        rf"\bMA (?P<allocated>{_N}) GB\s+Max_MA (?P<max_allocated>{_N}) GB\s+CA (?P<cached>{_N}) GB\s+"
        rf"Max_CA (?P<max_cached>{_N}) GB",
        0,
        _deepspeed,
    ),
    (
        "host_usage",
        r"CPU Virtual Memory:\s+used = (?P<used>[\d.]+) GB, percent = (?P<pct>[\d.]+)%",
        0,
        _virtual,
    ),
)
RULES: tuple[tuple[str, re.Pattern[str], Reader], ...] = tuple(
    (kind, re.compile(pattern, flags), reader) for kind, pattern, flags, reader in _TABLE
)
QUICK = re.compile(
    r"max seq len|KV cache is needed|cache blocks|auto-fit|Free memory on device|warming up sampler|memory profiling"
    r"|Sleep mode freed|killed|DefaultCPUAllocator|Unable to allocate|bad_alloc|MemoryError|Memory on the node"
    r"|oom|exit ?code|status|SIGKILL|out of memory|Max_MA|CPU Virtual Memory",
    re.IGNORECASE,
)
"""A cheap test that every rule's line passes."""


WRAPPABLE = re.compile(
    r"max seq len|Free memory on device|Sleep mode freed|Error in memory profiling"
)
"""Where a refusal of several numbers starts, which a narrow terminal may break."""


def match_event(text: str) -> tuple[str, str, Facts] | None:
    """Return (kind, matched text, facts) of the first rule that matches a line, or None."""
    if not QUICK.search(text):
        return None
    for kind, pattern, reader in RULES:
        if match := pattern.search(text):
            return kind, match.group()[:400], reader(match)
    return None
