"""Bringing vLLM to rest, and giving its memory back while the trainer works.

vLLM may have a batch queued when the last completion is out: with async scheduling, CUDA's default,
one more is scheduled before the last one is read (EngineCore.step_with_batch_queue, v1/engine/core.py),
and finished requests leave the worker only with the batch after them. Until both are gone
release_kv_cache_memory refuses ("requires a completed pause first"). Read in 0.31, 0.32 and 0.33.
"""

import time
from typing import Any

from planner.errors import VramwiseError

DRAIN_TIMEOUT_S = 60.0
_KEPT_ALLOCATORS: list[Any] = []


def drain(llm: Any, *, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
    """Step until the scheduler holds no request and no batch is queued.

    Raises VramwiseError when vLLM is still busy after `timeout_s`.
    """
    core = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + timeout_s
    while core.scheduler.has_requests() or core.batch_queue:
        if time.monotonic() > deadline:
            raise VramwiseError(
                f"vLLM did not come to rest in {timeout_s:g} s: "
                f"{core.scheduler.get_num_unfinished_requests()} requests unfinished, "
                f"{len(core.batch_queue or ())} batches queued",
                hint="the trainer's state is saved; resume, or use engine kind transformers",
            )
        llm.llm_engine.step()


def forget_prefixes(llm: Any) -> None:
    """Drop cached prefixes: they were computed with weights that are no more.

    vLLM keeps them, with a warning that nobody sees, while any block is in use.
    """
    drain(llm)
    if not llm.reset_prefix_cache():
        raise VramwiseError(
            "vLLM kept cached prefixes of old weights: blocks are still in use",
            hint="another user of this engine holds requests; give the trainer an engine of its own",
        )


def release_kv(llm: Any) -> None:
    """Unmap the KV cache while the weights stay."""
    drain(llm)
    llm.sleep(level=0)
    llm.release_kv_cache_memory()


def resume_kv(llm: Any) -> None:
    """Map the KV cache again and let the scheduler run."""
    _wake(llm, ["kv_cache"])
    llm.wake_up(tags=["scheduling"])


def sleep(llm: Any, *, level: int) -> None:
    """Unmap everything: weights move to the host (level 1) or are dropped (2)."""
    drain(llm)
    llm.sleep(level=level)


def wake(llm: Any) -> None:
    """Map everything again; what was dropped holds nothing of use."""
    _wake(llm, None)


def _wake(llm: Any, tags: list[str] | None) -> None:
    try:
        llm.wake_up(tags=tags)
    except RuntimeError as error:  # csrc/cumem_allocator.cpp: not torch's OutOfMemoryError
        raise VramwiseError(
            f"vLLM could not take its memory back: {str(error).splitlines()[0][:200]}",
            hint="lower engine.kv_bytes or micro_batch_size: the trainer holds what vLLM had",
        ) from error


def keep_allocators() -> None:
    """Keep vLLM's allocators alive after it has shut down: the policy's weights are theirs.

    Its worker drops them (CuMemAllocator.release_pools, device_allocator/cumem.py, 0.31 to 0.33), and
    memory that is freed afterwards would be handed to an object that is gone.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is not None:
        for pools in CuMemAllocator.instance.allocator_and_pools.values():
            pairs = pools if isinstance(pools, list) else [pools]  # 0.31 has one pool a tag
            _KEPT_ALLOCATORS.extend(allocator for _, allocator in pairs)


def shutdown(llm: Any, *, ranks: int = 1) -> None:
    """Stop an in-process engine and drop its process group.

    That of several ranks is the run's: vLLM, which would end it (EngineCore.shutdown in v1/engine/core.py,
    cleanup_dist_env_and_memory), drops its own groups alone.
    """
    from vllm.distributed import parallel_state

    ends: Any = parallel_state.destroy_distributed_environment
    if ranks > 1:
        parallel_state.destroy_distributed_environment = lambda: None
    try:
        llm.llm_engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    finally:
        parallel_state.destroy_distributed_environment = ends
