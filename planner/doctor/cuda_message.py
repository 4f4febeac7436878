"""Every form of the device out-of-memory message: torch 1.x to 2.1x, cudaMallocAsync, HIP, NPU, MPS."""

import re
from dataclasses import dataclass

from planner.doctor.sizes import SIZE, size_bytes

START = re.compile(
    r"(?:CUDA|HIP|NPU|XPU|MUSA|MPS backend) (?:driver )?(?:error: )?out of memory|cudaMalloc failed: out of memory|HSA_STATUS_ERROR_OUT_OF_RESOURCES|CUDA Error: out of memory|hipErrorOutOfMemory|OUT_OF_DEVICE_MEMORY"
    r"|Allocation on device\s?\d* would exceed allowed memory|OutOfMemoryError: Allocation on device"
    r"|Cuda failure \d+ .out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Tried to allocate \d"
    r"|UR_RESULT_ERROR_OUT_OF_RESOURCES|CUDA error \d+ at \S{1,80}: out of memory|bfc\) ran out of memory"
    r"|RESOURCE_EXHAUSTED: (?:XLA:\w{1,8} compile permanent error\. )?(?:Ran )?Out of memory|Attempting to (?:reserve|allocate) \d+(?:\.\d+)?[KMG]"
    r"|cuda runtime error \(2\) ?: out of memory",
    re.IGNORECASE,
)
_FIELDS: dict[str, tuple[tuple[str, ...], re.Pattern[str]]] = {
    "tried": (
        ("ocate ", "equested"),
        re.compile(rf"(?:Tried|trying) to allocate {SIZE}|Requested\s*:\s*{SIZE}"),
    ),
    "total": (
        ("total capac",),
        re.compile(rf"total capac(?:i)?ty of {SIZE}|{SIZE} total capac(?:i)?ty"),
    ),
    "free": (
        ("free", "Free ("),
        re.compile(
            rf"of which {SIZE} is free|[;,] {SIZE} free|Free \(according to CUDA\)\s*:\s*{SIZE}"
        ),
    ),
    "proc": (("this process has",), re.compile(rf"this process has {SIZE} memory in use")),
    "alloc": (
        ("allocated by PyTorch", "already allocated"),
        re.compile(
            rf"[Oo]f the allocated memory {SIZE} is allocated by PyTorch|{SIZE} already allocated"
        ),
    ),
    "unalloc": (
        ("but unallocated",),
        re.compile(rf"{SIZE} is reserved by PyTorch but unallocated"),
    ),
    "reserved": (
        ("reserved in total", "cached)"),
        re.compile(rf"{SIZE} reserved in total by PyTorch|{SIZE} cached\)"),
    ),
    "private": (("private pools",), re.compile(rf"with {SIZE} allocated in private pools")),
    "allowed": (("allowed",), re.compile(rf"{SIZE} allowed[;,]|max allowed: {SIZE}")),
    "allocated": (
        ("Currently allocated", "MPS allocated"),
        re.compile(rf"Currently allocated\s*:\s*{SIZE}|MPS allocated: {SIZE}"),
    ),
    "other": (("other allocations",), re.compile(rf"other allocations: {SIZE}")),
    "limit": (("Device limit",), re.compile(rf"Device limit\s*:\s*{SIZE}")),
    "fraction_limit": (
        ("PyTorch limit",),
        re.compile(rf"PyTorch limit \([^)]{{0,80}}\)\s*:\s*{SIZE}"),
    ),
}
"""Name -> (words of which a message with it has one, its pattern)."""
_PROCESS = re.compile(rf"Process (\d+) has {SIZE} memory in use")
_HINT = re.compile(r"environment-variables\)|PYTORCH_CUDA_ALLOC_CONF\b(?!=)|avoid fragmentation\.?")
_SENTENCE = re.compile(r"[.)\n]|$")
_GPU = re.compile(r"\b(?:GPU|NPU|XPU) (\d+)\b|on device (\d+)")
CONTEXT_LINES = 8
OVERFLOW = 2**60
"""No card holds this much: the driver of Windows and WSL gives 2^64 where it does not know."""
OVERFLOWED = (
    "the driver did not tell what the process uses (Windows and WSL print an overflow): "
    "that figure is left out"
)
_BINARY = {"KB": "KiB", "MB": "MiB", "GB": "GiB"}
"""What MPS means by its units before torch 2.6: ATen/mps/MPSAllocator.mm divides by 1024."""


@dataclass(frozen=True, kw_only=True)
class CudaMessage:
    """One message as printed. Bytes are the printed value times its unit."""

    backend: str
    """native, async (cudaMallocAsync), cumem (vLLM's sleep pool), driver (no numbers), mps."""
    printed: dict[str, str]
    facts: dict[str, int]
    others_bytes: tuple[int, ...] = ()
    """What other processes hold, as the message lists them."""
    gpu: int | None = None
    text: str = ""
    contradictions: tuple[str, ...] = ()

    def get(self, name: str) -> int | None:
        """Return the bytes of a field ("tried", "total", "free" ...), or None if not printed."""
        return self.facts.get(f"{name}_bytes")


def parse_cuda(text: str) -> CudaMessage | None:
    """Return the message that starts in `text` (a line and what follows it), or None."""
    start = START.search(text)
    if start is None:
        return None
    body = text[start.start() :]
    if (
        second := START.search(body, start.end() - start.start() + 200)
    ) and "Tried" not in second.group():
        body = body[: second.start()]
    shown: dict[str, str] = {}
    facts: dict[str, int] = {}
    backend, last = _backend(body), 0
    for name, (words, pattern) in _FIELDS.items():
        if not any(word in body for word in words):
            continue
        found = list(pattern.finditer(body))
        if not found:
            continue
        last = max(last, found[-1].end())
        number, unit = [group for group in found[0].groups() if group is not None][:2]
        if backend == "mps":
            unit = _BINARY.get(unit, unit)
        shown[name] = f"{number} {unit}"
        facts[f"{name}_bytes"] = size_bytes(number, unit)
    processes = list(_PROCESS.finditer(body)) if "Process " in body else []
    last = max([last, *(match.end() for match in processes)])
    overflowed = [name for name in facts if facts[name] >= OVERFLOW]
    for name in overflowed:
        del facts[name], shown[name.removesuffix("_bytes")]
    named = [size_bytes(match.group(2), match.group(3)) for match in processes]
    if any(size >= OVERFLOW for size in named):
        overflowed.append("process")
        named = [size for size in named if size < OVERFLOW]
    others = _assign_processes(named, facts)
    gpu = _GPU.search(body)
    return CudaMessage(
        backend=backend,
        printed=shown,
        facts=facts,
        others_bytes=others,
        gpu=int(gpu.group(1) or gpu.group(2)) if gpu else None,
        text=_shorten(body, last or min(len(body), 120)),
        contradictions=(*(OVERFLOWED for _ in overflowed[:1]), *_contradictions(facts, others)),
    )


def _backend(body: str) -> str:
    lowered = body.lower()
    if "would exceed allowed memory" in lowered or "currently allocated" in lowered:
        return "async"
    if "cumem" in lowered or ("cuda error: out of memory at" in lowered):
        return "cumem"
    if "mps backend" in lowered:
        return "mps"
    return "native" if "tried to allocate" in lowered else "driver"


def _assign_processes(named: list[int], facts: dict[str, int]) -> tuple[int, ...]:
    """Split "Process N has" lines into this process and others.

    Inside a container the driver's process ids differ from the program's, so torch prints
    its own process as one of them: the smallest that can hold what torch reserved.
    """
    if not named or facts.get("proc_bytes"):
        return tuple(named)
    held = facts.get("alloc_bytes", 0) + facts.get("unalloc_bytes", 0)
    if not held:
        if len(named) == 1:
            facts["proc_named_bytes"] = named.pop()
        return tuple(named)
    slack = held // 200
    fitting = [size for size in named if size + slack >= held]
    if fitting:
        own = min(fitting)
        facts["proc_named_bytes"] = own
        named.remove(own)
    return tuple(named)


def _contradictions(facts: dict[str, int], others: tuple[int, ...]) -> tuple[str, ...]:
    """Return sentences on numbers that cannot all be true."""
    get = facts.get
    total, free, tried = get("total_bytes"), get("free_bytes"), get("tried_bytes")
    alloc, unalloc = get("alloc_bytes"), get("unalloc_bytes", 0)
    reserved, proc = get("reserved_bytes"), get("proc_bytes") or get("proc_named_bytes")
    found: list[str] = []
    # printed values have two decimals, and NVML is read a moment after the allocator
    slack = (total or 0) // 100 + 2**26
    if total and free and free > total:
        found.append("more memory is free than the card has")
    if total and alloc and alloc + (unalloc or 0) > total + slack:
        found.append(
            "PyTorch holds more than the card has (Windows and WSL spill into host memory)"
        )
    if total and proc and free is not None and proc + sum(others) + free > total + slack:
        found.append("processes plus free memory exceed the card")
    if reserved and alloc and reserved + slack < alloc:
        found.append("reserved is smaller than allocated")
    if proc and alloc and alloc + (unalloc or 0) > proc + slack:
        found.append("PyTorch holds more than its process is said to use")
    if (
        tried
        and free
        and tried < free // 2
        and "allowed_bytes" not in facts
        and total
        and tried < total
    ):
        found.append(
            "the request is much smaller than the free memory: a memory fraction limit, "
            "another GPU than the one shown, or two messages mixed up"
        )
    return tuple(found)


def _shorten(body: str, last: int) -> str:
    """Return the message without what follows it: up to its hint, else to its last number's sentence."""
    hint = _HINT.search(body, last)
    sentence = _SENTENCE.search(body, last)
    end = hint.end() if hint else sentence.end() if sentence else last
    return " ".join(body[:end].split())[:900]
