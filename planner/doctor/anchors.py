"""What a line worth reading contains, in lower case: a cheap test for blocks and for lines.

Every rule of events.py, host_events.py, cuda_message.py and vllm_log.py needs one of these in each
line that it matches; a test checks it on examples.
"""

from collections.abc import Iterable

WORDS: tuple[str, ...] = (
    # devices
    "out of memory",
    "outofmemory",
    "out_of_device_memory",
    "tried to allocate",
    "would exceed allowed",
    "allocation on device",
    "error_out_of_resources",
    "attempting to reserve",
    "attempting to allocate",
    "bytes on host",
    "pinned host memory",
    "alloc_failed",
    "cudaerrormemoryallocation",
    "cuda failure",
    "failed to cuda",
    "torch_memory_saver",
    "torchmemorysaver",
    "expandable_segments",
    "dispatched on the",
    "offloaded to the disk",
    "train a model that",
    "max_ma",
    # engines
    "max seq len",
    "max model len",
    "maximum model len",
    "kv cache is needed",
    "cache blocks",
    "auto-fit",
    "free memory on device",
    "memory profiling",
    "sleep mode freed",
    "mem-fraction-static",
    "capacity is unbalanced",
    "allocating memory for batch_",
    "allocate memory for batch_",
    "load weight end",
    "memory pool end",
    "model loading took",
    "loading model weights took",
    "model weights take",
    "total_gpu_memory",
    "non kv cache memory",
    "desired gpu memory",
    "kv cache size",
    "available kv",
    "gpu blocks",
    "cuda blocks",
    "graph capturing",
    "cuda graph memory",
    "maximum concurrency",
    "llm engine",
    "vllm api server",
    "vllm (",
    "vllm v",
    "non-default args",
    # host
    "killed",
    "oom-kill",
    "oom_kill",
    "oomkill",
    "oom kill",
    "oom-killer",
    "oom_reaper",
    "earlyoom",
    "cpu oom",
    "host oom",
    "ram oom",
    "system oom",
    "memory oom",
    "memory on the node",
    "of the memory on node",
    "root causes",
    "system_error",
    "died unexpectedly",
    "process has died",
    "actor died",
    "memory limit",
    "out_of_me",
    "low on resource",
    "bus error",
    "shared memory",
    "/dev/shm",
    "workers crashed",
    "error 1455",
    "winerror 1455",
    "paging file is too small",
    "out_of_host_memory",
    "container: 137",
    "error code",
    "errorcode",
    "objectstorefull",
    "defaultcpuallocator",
    "unable to allocate",
    "bad_alloc",
    "memoryerror",
    "cannot allocate memory",
    "can't allocate memory",
    "exitcode",
    "exit code",
    "exit_code",
    "exited with",
    "exit status",
    "return code",
    "returned 137",
    "signal 9",
    "signal 7",
    "all available ram",
    "out of ram",
    "out of system ram",
    "due to time limit",
    "due to preemption",
    "watchdog caught",
    "cuda driver error",
    "cudamalloc failed",
    "hsa_status_error",
    "hiperroroutofmemory",
    "signal: killed",
    "by signal",
    "sigkill",
    "杀死",
    "ray::",
    "cpu virtual memory",
)
NOTICES: tuple[bytes, ...] = (
    b"max_ma",
    b"sleep mode freed",
    b"load weight end",
    b"memory pool end",
    b"cpu virtual memory",
    b"ray::",
    # an engine's start, which a server that is restarted says again and again
    b"model loading took",
    b"loading model weights took",
    b"model weights take",
    b"total_gpu_memory",
    b"non kv cache memory",
    b"kv cache size",
    b"available kv",
    b"gpu blocks",
    b"cuda blocks",
    b"graph capturing",
    b"cuda graph memory",
    b"maximum concurrency",
    b"llm engine",
    b"vllm api server",
    b"vllm (",
    b"vllm v",
    b"non-default args",
)
"""What a log may print at every step: of these the last one of a block is enough."""
ANCHORS: tuple[bytes, ...] = (
    *(word.encode() for word in WORDS),
    b"traceback (most recent",
)


DIGITS = b"0123456789"
LONG_LINE = 4096
"""Bytes of an average line above which what stands between commas is looked at once, not the line."""
ROOTS: tuple[bytes, ...] = (
    *(
        b"memory",
        b"alloc",
        b"kill",
        b"oom",
        b"exit",
        b"signal",
        b"died",
        b"cuda",
        b"cache",
        b"model",
    ),
    *(
        b"vllm",
        b"error",
        b"ail",
        b"ram",
        b"ax",
        b"code",
        b"due to",
        b"load",
        b"expand",
        b"seg",
        b"pat",
    ),
)
"""What several anchors have in common: a block without a root holds none of its anchors."""


def _by_root() -> tuple[tuple[bytes, tuple[tuple[bytes, bytes], ...]], ...]:
    """Return each root with its anchors, plain (without digits) and whole; an anchor without one is its own."""
    groups: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for anchor in ANCHORS:
        plain = anchor.translate(None, DIGITS)
        root = next((root for root in ROOTS if root in plain), plain)
        groups.setdefault(root, []).append((plain, anchor))
    return tuple((root, tuple(rows)) for root, rows in groups.items())


_GROUPS = _by_root()


def shapes_of(block: bytes) -> frozenset[bytes]:
    """Return a block's lines without their digits, each once; a progress bar's carriage returns end lines too."""
    plain = block.translate(None, DIGITS)
    if b"\r" in plain:
        plain = plain.replace(b"\r", b"\n")
    if len(plain) > LONG_LINE * (1 + plain.count(b"\n")):
        plain = plain.replace(b",", b"\n")  # no anchor has a comma
    return frozenset(plain.split(b"\n"))


def spoken(shapes: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the anchors that may stand in lines of these shapes."""
    text = b"\n".join(shapes).lower()
    near = [rows for root, rows in _GROUPS if root in text]
    return tuple(anchor for rows in near for plain, anchor in rows if plain in text)


def speaks(text: str) -> bool:
    """Return whether any rule may match this line."""
    lowered = text.lower()
    return any(word in lowered for word in WORDS)
