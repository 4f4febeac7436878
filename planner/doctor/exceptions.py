"""The exception that ended a run, where it is none of memory."""

import re

_EXCEPTION = re.compile(
    r"^(?:E {1,8}|stderr: |\w{1,10}: )?(?P<name>(?:[A-Za-z_]\w*\.){0,8}[A-Z]\w*(?:Error|Exception|Interrupt|NotFound|Timeout)): (?P<text>\S.*)"
)
_MEMORY = re.compile(
    r"memory|\bOOM\b|alloc|CUDA error|CUresult|killed|SIGKILL|NCCL|cache blocks|mem[-_]fraction",
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
_HINTS = ("Err", "Exce", "Interrupt", "NotFound", "Timeout", "exit", "DUE TO", "Watchdog")
_LAUNCHER = re.compile(
    r"CANCELLED AT \S+ DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)|Watchdog caught collective operation timeout"
    r"|failed \(exitcode: (?!-9\b)-?\d{1,3}\)|exits with return code = (?!-9\b)[1-9-]\d{0,2}"
)


def other_error(text: str) -> str | None:
    """Return the exception of a line, or a launcher's exit line, when it does not speak of memory."""
    if not any(word in text for word in _HINTS):
        return None
    match = _EXCEPTION.match(text)
    if match is None:
        found = _LAUNCHER.search(text)
        return f"the launcher: {found.group()}" if found else None
    if _MEMORY.search(text) or match["name"].rpartition(".")[2] in _WRAPPERS:
        return None
    return f"{match['name']}: {match['text']}"[:400]
