"""Which term a block belongs to, told by the stack that allocated it, its size and its lifetime.

Frames carry file, line and function name only. A rule is a term and what must appear in some
frame; the first rule that matches decides. Blocks that autograd's C++ allocates have no Python
frame but `backward`: the first ones with the size of a weight, one for each weight, are gradients. A
block without a stack that was there before the history began and never went is a weight.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from profiler.snapshot import Frame, Stack

UNKNOWN = "unknown"
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (term, re.compile(pattern))
    for term, pattern in (
        (
            "optimizer",
            r"torch/optim/(?!lr_scheduler)|bitsandbytes/optim/|torchao/optim/|optimizer\.py:step$|deepspeed/.*optimizer",
        ),
        (
            "kv_cache",
            r"cache_utils\.py:|_allocate_kv_cache|initialize_kv_cache|KVCache|kv_cache_manager",
        ),
        (
            "engine",
            r"vllm/.*(cuda_graph|cudagraph|capture_model|profile_run)|torch/cuda/graphs\.py:",
        ),
        (
            "logits",
            r"cross_entropy|log_softmax|logsumexp|loss_utils\.py:|ForCausalLM(Loss)?$|selective_log_softmax|chunked_logprob|fused_linear|lm_head|logprob",
        ),
        ("adapters", r"peft/tuners/.*:(update_layer|reset_lora|__init__|inject_adapter)"),
        (
            "weights",
            r"modeling_utils\.py:(from_pretrained|_load|load_|_initialize)|core_model_loading\.py:|safetensors|_load_from_state_dict|load_state_dict|module\.py:(_apply|to|cuda|convert)$|quantizer|weight_utils\.py:|model_loader/|model_executor/model_loader|Parameter|reset_parameters|_init_weights",
        ),
    )
)
_BACKWARD = re.compile(
    r"autograd/(__init__\.py:(backward|grad)|graph\.py:_engine_run_backward)|_tensor\.py:backward|run_backward"
)
_FORWARD = re.compile(r"module\.py:(_call_impl|_wrapped_call_impl)|:forward$|functional\.py:")
_LIBRARY = re.compile(r"/(torch|accelerate|peft|bitsandbytes|contextlib|functools)/|<|^torch/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Term of a block and the line that stands for it."""

    term: str
    where: str
    """"modeling_llama.py:231 forward": the innermost line outside torch itself."""


def key(frame: Frame) -> str:
    """Return a frame as rules see it."""
    return f"{frame.file}:{frame.name}"


def owner_of(
    stack: Stack, size: int, *, gradients: Counter[int], long_lived: bool, vocab: int | None
) -> Owner:
    """Return the owner of a block of `size` bytes.

    `gradients`: sizes of weights that have no gradient yet; one is taken out when it is found.
    `long_lived`: still in use when the recording ended.
    """
    names = [key(frame) for frame in stack]
    where = _place(stack)
    if not names:
        return Owner(term=UNKNOWN, where="no stack: history was off when it was allocated")
    for term, pattern in _RULES:
        if any(pattern.search(name) for name in names):
            return Owner(term=term, where=where)
    if vocab and _is_vocab_sized(size, vocab) and not long_lived:
        return Owner(term="logits", where=where)
    if any(_BACKWARD.search(name) for name in names):
        if gradients[size] <= 0:
            return Owner(term="activations", where=where)
        gradients[size] -= 1
        return Owner(term="gradients", where=where)
    if any(_FORWARD.search(name) for name in names):
        return Owner(term="activations", where=where)
    return Owner(term=UNKNOWN, where=where)


BEFORE = Owner(term="weights", where="allocated before the history began")


def weight_sizes_of(stacks: Iterable[tuple[Stack, int]]) -> Counter[int]:
    """Return how many blocks of each size were allocated as weights or adapters."""
    patterns = [pattern for term, pattern in _RULES if term in ("weights", "adapters")]
    sizes: Counter[int] = Counter()
    for stack, size in stacks:
        names = [key(frame) for frame in stack]
        if any(pattern.search(name) for pattern in patterns for name in names):
            sizes[size] += 1
    return sizes


def _is_vocab_sized(size: int, vocab: int) -> bool:
    """True for whole rows of [rows, vocab] in 2 or 4 bytes, at least 16 of them."""
    return any(size % (vocab * width) == 0 and size // (vocab * width) >= 16 for width in (2, 4))


def _place(stack: Stack) -> str:
    for frame in stack:
        if frame.file != "none" and not _LIBRARY.search(frame.file):
            return _shown(frame)
    return _shown(stack[0]) if stack else ""


def _shown(frame: Frame) -> str:
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.name}"
