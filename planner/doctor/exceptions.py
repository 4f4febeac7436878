"""The exception that ended a run, where it is none of memory."""

import re
from typing import NamedTuple

_EXCEPTION = re.compile(
    r"^(?:E {1,8}|stderr: |\w{1,10}: )?(?P<name>(?:[A-Za-z_]\w*\.){0,8}(?:[A-Z]\w*(?:Error|Exception|Interrupt|NotFound|Timeout)|Exception|OutOfResources)): (?P<text>\S.*)"
)
_DEVICE = re.compile(
    r"(?:CUDA|HIP|NPU) error: (?:an illegal memory access|device-side assert|unspecified launch failure|misaligned address|no kernel image"
    r"|invalid (?:argument|device \w+|configuration argument|resource handle)|uncorrectable|initialization error|too many resources requested|all CUDA-capable devices)[^\n]{0,80}"
    r"|Cuda failure(?: \d+)? '(?!out of memory)[^'\n]{1,60}'|\bAssertion `[^`\n]{1,120}` failed|UR_RESULT_ERROR_DEVICE_LOST"
)
"""What a device reports that is no lack of memory, though the text may speak of memory."""
_ELSEWHERE = re.compile(
    r"out of resource: shared memory|INTERNAL ASSERT FAILED|in static TLS block|killed by signal: (?:Segmentation|Abort|Terminat|Illegal|Floating)"
)
"""A kernel's on-chip memory, a loader's table, a broken invariant and crashes: no lack of the card's or the host's memory."""
_MEMORY = re.compile(
    r"memory|\bOOM\b|alloc|CUDA error|CUresult|killed|SIGKILL|NCCL|cache blocks|mem[-_]fraction|OUT_OF_RESOURCES|RESOURCE[_ ]EXHAUSTED",
    re.IGNORECASE,
)
_WRAPPERS = (
    "ChildFailedError",
    "CalledProcessError",
    "RayTaskError",
    "RayActorError",
    "ActorDiedError",
    "WorkerCrashedError",
    "BrokenProcessPool",
    "EOFError",
    "BrokenPipeError",
    "ConnectionResetError",
    "SystemExit",
)
"""What launchers raise because a rank ended; it names no reason of its own."""
_HINTS = (
    *("Err", "Exce", "Interrupt", "NotFound", "Timeout", "exit", "DUE TO", "atchdog", "OutOfRes"),
    *("DA error", "IP error", "PU error", "failure", "Assertion", "DEVICE_LOST"),
)
_LAUNCHER = re.compile(
    r"CANCELLED AT \S+ DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)|Watchdog caught collective operation timeout|watchdog got stuck for \d+ seconds"
    r"|exitcode *: *(?!-[79]\b|0\b)-?\d{1,3} \(pid|failed \(exitcode: (?!-9\b)-?\d{1,3}\)|exits with return code = (?!-[79]\b)[1-9-]\d{0,2}"
)


class Said(NamedTuple):
    """What ended a run, in its own words."""

    text: str
    device: bool = False
    """A device reported it: later refusals of the driver follow from it."""


def other_error(text: str) -> Said | None:
    """Return what a line says ended the run, an exception or a launcher's exit line, when it is none of memory."""
    if not any(word in text for word in _HINTS):
        return None
    if found := _DEVICE.search(text):
        return Said(found.group(), device=True)
    match = _EXCEPTION.match(text)
    if match is None:
        found = _LAUNCHER.search(text)
        return Said(f"the launcher: {found.group()}") if found else None
    said = f"{match['name']}: {match['text']}"[:400]
    if _ELSEWHERE.search(text):
        return Said(said)
    if _MEMORY.search(text) or match["name"].rpartition(".")[2] in _WRAPPERS:
        return None
    return Said(said)
