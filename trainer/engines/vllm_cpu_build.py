"""What vLLM's CPU build does otherwise than CUDA's: it packs weights, and its ranks share memory by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.engines.vllm_platform import runs_on_cpu


def repack_tied_head(llm: Any) -> None:
    """Pack a tied output head again after new embeddings came.

    Reloading writes the embedding in place, but the CPU build multiplies by a packed copy that it
    made of the head at start-up.
    """
    if not runs_on_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in llm.apply_model(lambda model: model)[0].modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


@contextmanager
def unpacked_cpu_linears(wanted: bool = True) -> Iterator[None]:
    """Keep linear weights as loaded in vLLM's CPU build, which otherwise packs and drops them.

    Who shares or writes the plain weight needs it; vLLM has no switch for it, so the one dispatch that packs
    is replaced while the engine starts or loads. Nothing changes on CUDA, whose weights stay as
    loaded (process_weights_after_loading in model_executor/layers/linear.py, 0.32 and 0.33).
    """
    if not wanted or not runs_on_cpu():
        yield
        return
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    places: list[Any] = [
        module
        for module in (utils, linear, vocab_parallel_embedding)
        if hasattr(module, "dispatch_cpu_unquantized_gemm")
    ]
    originals = [module.dispatch_cpu_unquantized_gemm for module in places]
    for module in places:
        module.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        for module, original in zip(places, originals, strict=True):
            module.dispatch_cpu_unquantized_gemm = original


@contextmanager
def named_cpu_memory(name: str) -> Iterator[None]:
    """Let the CPU build's tensor-parallel ranks share memory under a name of this start's own.

    Under an external launcher all of them on a machine would have one name (v1/worker/cpu_worker.py:
    VLLM_DIST_IDENT is what is behind the last colon of "env://"): two runs would meet there, and what one that
    was killed has left stops the next. Once all are in it, the name goes.
    """
    if not name or not runs_on_cpu():
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    launcher: Any = ExecutorWithExternalLauncher
    original = launcher._distributed_args

    def named(self: Any) -> tuple[str, int, int]:
        method, rank, local_rank = original(self)
        return f"{method}:{name}", rank, local_rank

    launcher._distributed_args = named
    try:
        yield
    finally:
        launcher._distributed_args = original
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)
