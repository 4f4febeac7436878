"""Rules for host memory: who killed what, a copy per rank, pinned memory, and kills that say nothing."""

import re

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.state import weights_bytes
from planner.units import format_bytes

KINDS = frozenset({"host_killed", "host_alloc", "host_shm", "killed", "worker_died"})
WHO = {
    "ray": "Ray ended a worker because the node's host memory passed its limit",
    "kernel": "the kernel's out-of-memory killer ended a process: the machine's host memory (RAM and swap) was used up",
    "cgroup": "a process went over the host memory limit of its container or job (cgroup)",
    "slurm": "the job used more host memory than SLURM gave it",
    "systemd-oomd": "systemd-oomd ended a process for host memory or memory pressure, before the kernel had to",
    "systemd": "the system ended a process of this unit for host memory",
    "kubernetes": "the container went over its memory limit, or the node ran short: this is host memory, not the GPU's",
    "launcher": "a rank was killed from outside by signal 9 and left no Python error: nearly always the host ran out of memory",
    "shell": "a process was killed from outside by signal 9: nearly always the host ran out of memory",
    "": "the system killed the process for host memory",
}
"""Who killed, in words; the card is not what ran out."""
_LOADING = re.compile(
    r"[Ll]oading checkpoint shards|[Ll]oading (?:model )?weights|from_pretrained\(|load_state_dict\("
)


def host_memory(signals: Signals) -> Cause | None:
    """The host ran out: pinned swap, a whole copy per rank, or something unsaid."""
    event = signals.event
    context = signals.context
    text = context.text
    killed = event is not None and event.kind in ("host_killed", "host_alloc")
    loading_many = (
        event is None
        and signals.has("load")
        and context.sharding in ("fsdp", "zero3")
        and "from_pretrained" in text
    )
    pinned = "swap_space" in text or (event is None and "sleep" in text and signals.has("wake_up"))
    if pinned and (killed or event is None or event.kind == "sleep_line"):
        return Cause(
            category="host_pinned_swap",
            certainty=Certainty.CONSISTENT,
            explanation="vLLM pins host memory on every worker: swap_space, or the copy of the weights that sleep level 1 keeps.",
            formula="workers * swap_space (or weight bytes)",
        )
    if not (killed or loading_many):
        return None
    if not (loading_many or _loads(signals)):
        return None
    ranks = context.gpus
    formula = ""
    if context.parameters:
        one = weights_bytes(context) or 0
        formula = (
            f"{ranks} ranks * {format_bytes(one)} = {format_bytes(ranks * one)} of host memory"
        )
        if host_gb := context.number("host_ram_gb"):
            formula += f"; the machine has {host_gb} GB"
    return Cause(
        category="host_full_copy_per_rank",
        certainty=Certainty.CONSISTENT,  # that each rank makes a copy is what is assumed
        explanation="every rank loads its own whole copy of the weights into host memory: adding GPUs adds copies.",
        formula=formula,
    )


def _loads(signals: Signals) -> bool:
    """Return whether the model was being loaded by several ranks when the process was killed."""
    event = signals.event
    if event is None or event.facts.get("killer") == "ray":
        return False
    near = event.stack[-40:]
    steps = signals.context.text if len(signals.context.text) < 8000 else ""
    return (
        any(_LOADING.search(line) for line in near)
        or signals.has("load", "host_load")
        or (signals.context.gpus > 1 and "full copy" in steps)
    )


def host_killed(signals: Signals) -> Cause | None:
    """Host memory ran out, and the log does not say what grew."""
    event = signals.event
    if event is None or event.kind not in ("host_killed", "host_alloc"):
        return None
    facts = event.facts
    if event.kind == "host_alloc":
        tried = facts.get("host_tried_bytes")
        explanation = "host memory (RAM) was refused to a single request: a tensor, an array or a copy of the weights on the CPU."
        if facts.get("killer") == "windows":
            explanation = "Windows refused host memory: it counts what is asked for against RAM and page file, used or not, and every DataLoader worker asks again for the same libraries and files."
        return Cause(
            category="host_alloc",
            certainty=Certainty.CONSISTENT,
            explanation=explanation,
            formula=f"requested {format_bytes(int(tried))} of host memory" if tried else "",
        )
    who = WHO.get(str(facts.get("killer", "")), WHO[""])
    parts = []
    if "host_used_bytes" in facts:
        used, total = int(facts["host_used_bytes"]), int(facts["host_total_bytes"])
        parts.append(f"host memory in use {format_bytes(used)} of {format_bytes(total)}")
    if "process_rss_bytes" in facts:
        parts.append(f"the killed process held {format_bytes(int(facts['process_rss_bytes']))}")
    users = sorted(
        (notice.facts for notice in signals.notices if notice.kind == "host_user"),
        key=lambda row: -float(row["user_bytes"]),
    )
    if users:
        largest = ", ".join(
            f"{row['user']} {format_bytes(int(row['user_bytes']))}" for row in users[:3]
        )
        parts.append(f"largest: {largest}")
    return Cause(
        category="host_killed",
        certainty=Certainty.CONSISTENT,
        explanation=f"{who}. The log does not say what grew: data loading, copies of the weights on the CPU, offloaded states, pinned buffers.",
        formula="; ".join(parts),
    )


def shared_memory(signals: Signals) -> Cause | None:
    """/dev/shm or Ray's object store is full: workers pass batches through it."""
    event = signals.event
    if event is None or event.kind != "host_shm":
        return None
    return Cause(
        category="host_shared_memory",
        certainty=Certainty.CONSISTENT,
        explanation="data workers, NCCL or Ray pass tensors through shared memory, which a container limits apart from its RAM (64 MB by Docker's default).",
    )


def killed(signals: Signals) -> Cause | None:
    """Exit code 137 is signal 9: a memory limit, a failed probe or an eviction."""
    event = signals.event
    if event is None or event.kind != "killed":
        return None
    return Cause(
        category="killed",
        certainty=Certainty.UNKNOWN,
        explanation="exit code 137 is signal 9 from outside. Without OOMKilled or a kernel line it may be the memory limit of the container, a failed liveness probe, an eviction, or a person.",
    )


def worker_died(signals: Signals) -> Cause | None:
    """Ray lists what may have ended a worker and names none of it."""
    event = signals.event
    if event is None or event.kind != "worker_died":
        return None
    return Cause(
        category="worker_died",
        certainty=Certainty.UNKNOWN,
        explanation="Ray saw a worker's connection end and lists what may have ended it; an out-of-memory kill is one of several. The worker's own log or the kernel's tells.",
    )


HOST_RULES = (host_memory, host_killed, shared_memory, killed, worker_died)
