"""Rules for what PyTorch's allocator does not see: drivers, libraries, limits, other accelerators, no memory error at all."""

import re

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.state import weights_bytes
from planner.units import GiB, MiB, format_bytes

KINDS = frozenset(
    {"driver_refused", "hf_dispatch", "tms_invalid", "flashinfer_workspace", "other_error"}
)
_WSL = re.compile(r"\bWSL|microsoft-standard|/mnt/[a-z]/")
_PINNED = re.compile(r"pin_memory|pinned|cudaHostAlloc|cudaHostRegister|HostAlloc")
XPU_LIMIT = 4 * GiB
"""The largest single allocation of Intel's client GPUs unless its relaxed limit is asked for."""


def not_memory(signals: Signals) -> Cause | None:
    """Another exception ended the run; launchers print kills of the other ranks after it."""
    event = signals.event
    if event is None or event.kind != "other_error":
        return None
    said = (
        "a launcher reports that a rank ended by itself; the exception stands above, in that rank's own output."
        if event.text.startswith("the launcher")
        else "the exception above ended the run; the launcher's lines about killing processes only end the other ranks."
    )
    return Cause(
        category="not_memory",
        certainty=Certainty.CONSISTENT,
        explanation=f"no memory error is in this text: {said}",
    )


def driver_refused(signals: Signals) -> Cause | None:
    """NCCL or bitsandbytes asked the driver itself, and there was none left."""
    event = signals.event
    if event is None or event.kind != "driver_refused":
        return None
    owner = str(event.facts.get("owner", ""))
    tried = event.facts.get("tried_bytes")
    wsl = bool(_WSL.search(signals.context.text))
    if event.facts.get("host"):
        return Cause(
            category="pinned_memory",
            certainty=Certainty.CONSISTENT,
            explanation=f"{owner} asked for page-locked host memory and the driver refused it: the host's RAM or its locked-memory limit, not the card.",
        )
    if owner == "bitsandbytes":
        managed = "pythonInterface" in event.text
        what = (
            "managed (paged) memory: a paged optimizer keeps its states where the driver may move them between card and host"
            if managed
            else "workspace for its quantised kernels"
        )
        more = (
            " WSL and Windows give managed memory no room to page: it must fit the card."
            if wsl and managed
            else ""
        )
        return Cause(
            category="driver_refused",
            certainty=Certainty.CONSISTENT,
            explanation=f"bitsandbytes asked the driver for {what}, and card or host had none left.{more}",
        )
    return Cause(
        category="driver_refused",
        certainty=Certainty.CONSISTENT,
        explanation="NCCL allocates its buffers through the driver, beside PyTorch's allocator: the card was full when a communicator was made or first used. What PyTorch had reserved and not used was no help to it.",
        formula=f"NCCL asked for {format_bytes(int(tried))}" if tried else "",
    )


def dispatched(signals: Signals) -> Cause | None:
    """accelerate's device map put layers on the CPU, for they do not fit the GPUs it may use."""
    event = signals.event
    if event is None or event.kind != "hf_dispatch":
        return None
    weights, card = weights_bytes(signals.context), signals.card_bytes
    many = signals.context.gpus
    exceeds = bool(weights and card and signals.context.model and weights > many * card)
    formula = (
        f"one copy {format_bytes(weights)}, {many} x {format_bytes(card)}"
        if weights and card
        else ""
    )
    return Cause(
        category="weights",
        certainty=Certainty.PROVEN if exceeds else Certainty.CONSISTENT,
        explanation='device_map="auto" placed layers on the CPU or the disk: the weights do not fit the GPU memory it may use (max_memory, other processes, a copy that is still there).',
        formula=formula,
    )


def pinned_memory(signals: Signals) -> Cause | None:
    """ "CUDA error: out of memory" out of pin_memory is host memory that the driver could not lock."""
    event = signals.event
    if event is None or event.cuda is None or event.cuda.backend != "driver":
        return None
    if not any(_PINNED.search(line) for line in event.stack[-30:]):
        return None
    where = " (WSL locks only a small part of the RAM)" if _WSL.search(signals.context.text) else ""
    return Cause(
        category="pinned_memory",
        certainty=Certainty.CONSISTENT,
        explanation=f"the request was for page-locked host memory, which the driver could not lock{where}: the GPU's memory is not what ran out.",
    )


def expandable_conflict(signals: Signals) -> Cause | None:
    """torch_memory_saver cannot track segments that PyTorch maps itself."""
    event = signals.event
    if event is None or event.kind != "tms_invalid":
        return None
    return Cause(
        category="expandable_conflict",
        certainty=Certainty.CONSISTENT,
        explanation="the memory saver maps and unmaps memory by address; with expandable_segments PyTorch maps it itself, and the driver answers 'invalid argument'. This is no lack of memory.",
    )


def workspace(signals: Signals) -> Cause | None:
    """FlashInfer's workspace has a fixed size."""
    event = signals.event
    if event is None or event.kind != "flashinfer_workspace":
        return None
    return Cause(
        category="flashinfer_workspace",
        certainty=Certainty.CONSISTENT,
        explanation="FlashInfer works in a buffer of fixed size that the engine allocated at its start; this batch needs more of it. The card need not be full.",
    )


def contexts(signals: Signals) -> Cause | None:
    """Several small processes on one GPU: other ranks made a context there."""
    event, budget = signals.event, signals.budget
    if event is None or event.cuda is None or budget is None:
        return None
    sizes = event.cuda.others_bytes
    small = [size for size in sizes if 200 * MiB < size < 2 * GiB]
    alike = [size for size in small if abs(size - small[0]) <= small[0] // 8] if small else []
    if len(alike) < 3 or len(alike) < len(sizes) - 1:
        return None
    return Cause(
        category="contexts_on_one_gpu",
        certainty=Certainty.CONSISTENT,
        explanation=f"{len(alike)} processes of about {format_bytes(alike[0])} each are on this GPU: what a CUDA context takes. The other ranks of a run touched it before they chose their own.",
        formula=f"{len(alike)} * {format_bytes(alike[0])} = {format_bytes(sum(alike))}",
    )


def mps_full(signals: Signals) -> Cause | None:
    """Apple's GPU shares the machine's memory, up to a limit that PyTorch sets."""
    event, budget = signals.event, signals.budget
    if event is None or event.cuda is None or event.cuda.backend != "mps" or budget is None:
        return None
    allocated, other, limit = budget.allocated_bytes, budget.other_bytes, budget.total_bytes
    if allocated is None or limit is None:
        return None
    parts = f"PyTorch {format_bytes(allocated)} + others {format_bytes(other or 0)} + request {format_bytes(budget.requested_bytes or 0)} > {format_bytes(limit)}"
    outside = (other or 0) > allocated
    return Cause(
        category="mps_full",
        certainty=Certainty.CONSISTENT,
        explanation="the Mac's memory is shared by the CPU, the GPU and every program; "
        + (
            "what is not PyTorch's tensors takes most of the allowed part: kernels' buffers, other programs, another model."
            if outside
            else "PyTorch's own tensors take most of the allowed part."
        ),
        formula=parts,
    )


def refused_with_room(signals: Signals) -> Cause | None:
    """More was free than asked for: a limit, another device, or the driver."""
    event, budget = signals.event, signals.budget
    if event is None or event.cuda is None or budget is None or event.cuda.backend == "mps":
        return None
    tried, total, free = budget.requested_bytes, budget.total_bytes, budget.free_bytes
    if event.text.startswith("XPU") or "XPU out of memory" in event.text:
        held = (budget.allocated_bytes or 0) + (budget.unallocated_bytes or 0)
        if tried and total and tried >= XPU_LIMIT and held + tried < total:
            return Cause(
                category="free_but_refused",
                certainty=Certainty.CONSISTENT,
                explanation="Intel's client GPUs take no single allocation of 4 GiB or more unless the relaxed limit is asked for; the card itself had room.",
                formula=f"held {format_bytes(held)} + request {format_bytes(tried)} < {format_bytes(total)}",
            )
        return None
    if (
        not tried
        or not total
        or free is None
        or not budget.had_room
        or "allowed_bytes" in event.facts
    ):
        return None
    return Cause(
        category="free_but_refused",
        certainty=Certainty.UNKNOWN,
        explanation=f"{format_bytes(free)} of the card were free for a request of {format_bytes(tried)}: its size is not what refused it. A memory fraction (set_per_process_memory_fraction), an allocator beside PyTorch's (an engine's sleep pool), a driver limit (WSL, unified memory, MIG), or memory freed a moment later.",
        formula=f"free {format_bytes(free)} > requested {format_bytes(tried)}",
    )


OUTSIDE_RULES = (
    not_memory,
    driver_refused,
    dispatched,
    expandable_conflict,
    workspace,
    pinned_memory,
    contexts,
    mps_full,
    refused_with_room,
)
