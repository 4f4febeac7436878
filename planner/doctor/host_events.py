"""Kills and refusals of host memory: kernel, cgroups, Ray, SLURM, Kubernetes, systemd, launchers.

A launcher that ends the other ranks prints SIGKILL too; only lines about a process that was killed
from outside are kills, and only some of those say that memory was the reason.
"""

import re
from re import Match

from planner.doctor.event import Facts, Reader, Row, gib, nothing
from planner.units import KiB


def _by(killer: str) -> Reader:
    return lambda _match: {"killer": killer}


def _kernel(match: Match[str]) -> Facts:
    facts: Facts = {"killer": "cgroup" if "cgroup" in match.group().lower() else "kernel"}
    if rss := match.groupdict().get("rss"):
        facts["process_rss_bytes"] = int(rss) * KiB
    return facts


def _tried(match: Match[str]) -> Facts:
    return {"host_tried_bytes": int(match["bytes"])}


def _node(match: Match[str]) -> Facts:
    facts: Facts = {
        "killer": "ray",
        "host_used_bytes": gib(match["used"]),
        "host_total_bytes": gib(match["total"]),
    }
    if match["own"]:
        facts["process_rss_bytes"] = gib(match["own"])
    return facts


def _ray_old(match: Match[str]) -> Facts:
    return {
        "killer": "ray",
        "host_used_bytes": gib(match["used"]),
        "host_total_bytes": gib(match["total"]),
    }


def _oomd(match: Match[str]) -> Facts:
    facts: Facts = {"killer": "systemd-oomd"}
    if match["used"]:
        facts |= {"host_used_bytes": int(match["used"]), "host_total_bytes": int(match["total"])}
    return facts


def _virtual(match: Match[str]) -> Facts:
    used = gib(match["used"])
    return {"host_used_bytes": used, "host_total_bytes": round(used * 100 / float(match["pct"]))}


def _user(match: Match[str]) -> Facts:
    return {"user_bytes": gib(match["gb"]), "user": match["name"].strip()[:60]}


NOT_MINE = re.compile(
    r"sigkill_handler\] Killing|forcefully exiting via|Sending (?:process|SIG)|pkill|kill -9|\"?OOMKilled\"?: false",
    re.IGNORECASE,
)
"""Lines of a launcher, or of a person's script, that end processes themselves."""

ROWS: tuple[Row, ...] = (
    (
        "worker_died",
        r"There are some potential root causes\. \(1\) The process is killed by SIGKILL by OOM killer"
        r"|Worker exit type: SYSTEM_ERROR|(?:actor|[Ww]orker) died unexpectedly|worker process has died\b"
        r"|\b0 Workers \(tasks / actors\) killed due to memory pressure \(OOM\), [1-9]\d* Workers crashed",
        0,
        nothing,
    ),
    (
        "host_killed",
        r"Memory on the node .{0,700}?(?:memory used=(?P<own>[\d.]+)GB.{0,80}?)?"
        r"\bwas (?P<used>\d+(?:\.\d+)?)GB / (?P<total>\d+(?:\.\d+)?)GB",
        0,
        _node,
    ),
    (
        "host_killed",
        r"More than \d+% of the memory on node .{1,80}? is used \((?P<used>[\d.]+) / (?P<total>[\d.]+) GB\)",
        0,
        _ray_old,
    ),
    (
        "host_killed",
        r"(?<!\b0 Workers \(tasks / actors\) )killed due to (?:the node running low on memory|memory pressure \(OOM\))"
        r"|Ray killed this worker|actor died.{0,40}\b(?:CPU )?OOM\b",
        re.IGNORECASE,
        _by("ray"),
    ),
    (
        "host_killed",
        r"slurmstepd\S* error: Detected \d+ oom[-_ ]kill|Detected \d+ oom[-_ ]kill event|srun: error: .{0,80}Out Of Memory"
        r"|Exceeded (?:job|step) memory limit|\bOUT_OF_MEMORY\b.{0,40}(?:COMPLETED|ExitCode|0:125)|State\s?[:=]\s?OUT_OF_ME",
        0,
        _by("slurm"),
    ),
    (
        "host_killed",
        r"systemd-oomd.{0,20}: Killed \S{1,300}(?: due to (?:memory used \((?P<used>\d+)\) / total \((?P<total>\d+)\))?)?"
        r"|systemd-oomd killed \d+ process",
        0,
        _oomd,
    ),
    (
        "host_killed",
        r"killed by the OOM killer|result 'oom-kill'|code=killed, status=9/KILL|earlyoom.{0,60}sending SIG(?:TERM|KILL)",
        0,
        _by("systemd"),
    ),
    (
        "host_killed",
        r"\bReason['\"]?:\s+\"?OOMKilled|\bOOM ?Killed\b|node was low on resource: memory|exceeds? (?:its )?memory limit",
        re.IGNORECASE,
        _by("kubernetes"),
    ),
    (
        "host_killed",
        r"crashed after using all available RAM|ran out of (?:system )?RAM\b",
        re.IGNORECASE,
        _by(""),
    ),
    (
        "host_killed",
        r"(?:(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)?(?: process \d+ \(.{1,40}?\))?|\bKilled process \d+ \(.{1,40}?\))"
        r"(?:.{0,60}?anon-rss:(?P<rss>\d+)kB)?|invoked oom-killer|oom-kill:constraint=\S{0,40}"
        r"|oom_reaper: reaped process|\boom-killer\b",
        re.IGNORECASE,
        _kernel,
    ),
    (
        "host_shm",
        r"killed by signal: Bus error|bus error encountered in worker|Signal 7 \(SIGBUS\)|(?:exitcode *: *|return code = )-7\b|/dev/shm/nccl|insufficient shared memory|out of shared memory|ObjectStoreFullError"
        r"|No space left on device.{0,40}/dev/shm|/dev/shm.{0,40}No space left on device",
        re.IGNORECASE,
        nothing,
    ),
    (
        "host_alloc",
        r"DefaultCPUAllocator: .{0,60}?tried to allocate (?P<bytes>\d+) bytes",
        0,
        _tried,
    ),
    (
        "host_alloc",
        r"Unable to allocate (?:array|\S+ \S+ for an array)|std::bad_alloc|^MemoryError\b"
        r"|\b[Cc]an(?:not|'t) allocate memory(?! in static TLS)|ERROR_OUT_OF_HOST_MEMORY",
        0,
        nothing,
    ),
    (
        "host_alloc",
        r"paging file is too small|\[WinError 1455\]|\(os error 1455\)",
        0,
        _by("windows"),
    ),
    (
        "host_killed",
        r"(?:exit|error) ?code:? ?\(?-9\b|exitcode *: *-9\b|Signal 9 \(SIGKILL\)|died with <Signals\.SIGKILL"
        r"|return code = -9\b|return code -9\b|exited on signal 9|killed by signal(?: 9\b|: Killed)|terminated (?:by|with) signal(?: 9\b| SIGKILL)"
        r"|\bkilled by SIGKILL|\breceived signal 9\b|failed due to signal 9|-SIGKILL\b",
        re.IGNORECASE,
        _by("launcher"),
    ),
    (
        "host_killed",
        r"^\s*Killed\s*$|line \d+:\s+\d+ Killed\b|^(?:zsh: killed|\[\d+\]\s*[+-]?\s+(?:\d+ )?Killed)\b|^\s*已杀死\s*$"
        r"|\bKilled: 9\b|\(core dumped\) Killed",
        re.IGNORECASE | re.MULTILINE,
        _by("shell"),
    ),
    (
        "host_killed",
        r"\b(?:host|CPU|system) (?:RAM |memory )?(?:OOM|out of memory)\b",
        re.IGNORECASE,
        _by(""),
    ),
    (
        "killed",
        r"\bexit(?:ed)?[_ ]?(?:with )?(?:code|status)\"?:?\s{1,8}137\b|\"ExitCode\": 137\b|exit code 137\b|returned 137\b|Docker Container: 137\b",
        re.IGNORECASE,
        nothing,
    ),
    (
        "host_user",
        r"^\s*\d{1,8}\s+(?P<gb>\d{1,4}(?:\.\d{1,2})?)(?:GB)?\s+(?P<name>(?:ray::|ray_|python|\S*/python|VLLM)\S.{0,80}|(?:ray::|ray_)\S{1,60})",
        0,
        _user,
    ),
    (
        "host_usage",
        r"CPU Virtual Memory:\s+used = (?P<used>[\d.]+) GB, percent = (?P<pct>[\d.]+)%",
        0,
        _virtual,
    ),
)
