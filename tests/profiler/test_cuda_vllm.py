"""vLLM's own memory code on a fake allocator: what it measures under the recorder, and what it unmaps."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.startup.vramwise_cuda import CudaMeter
from profiler.torch_recorder import record
from tests.profiler.fake_cuda import FakeCuda, MiB
from trainer.phase_memory import PhaseMemory

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.vllm

WEIGHTS, KV, WORK = 500 * MiB, 8000 * MiB, 10 * MiB


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    import vllm.utils.mem_utils  # noqa: F401  # before torch looks as if it had a GPU

    return FakeCuda().install(monkeypatch)


@pytest.fixture
def pool(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's CuMemAllocator with a KV cache in it; only the driver's map and unmap are missing."""
    from vllm.device_allocator import cumem

    for name in ("python_create_and_map", "python_unmap_and_release"):
        monkeypatch.setattr(cumem, name, lambda *handle: None)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=lambda *args: None))
    allocator = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    for tag, size in (("weights", WEIGHTS), ("kv_cache", KV)):
        allocator.current_tag = tag
        allocator._python_malloc_callback((0, size, cuda.alloc(size), 1))
    return allocator


def test_a_watched_vllm_measures_its_own_headroom(cuda: FakeCuda) -> None:
    """vLLM sizes its KV cache by the peak between its own reset and its own reading."""
    from vllm.utils.mem_utils import MemorySnapshot, memory_profiling

    with record(follow=False) as live:
        before = MemorySnapshot(device=torch.device("cuda", 0))
        cuda.alloc(WEIGHTS)
        with memory_profiling(before, weights_memory=WEIGHTS) as result:
            with live.phase("score"):
                cuda.spike(7000 * MiB)
            with live.phase("rollout"):
                cuda.spike(WORK)
    assert result.transient_peak_headroom == 7000 * MiB
    assert result.torch_peak_increase == 7000 * MiB
    phases = {phase.name: phase.peak_bytes for phase in live.recording.phases}
    assert phases["score"] == WEIGHTS + 7000 * MiB


@contextmanager
def as_recording(cuda: FakeCuda) -> Iterator[tuple[Any, dict[str, int]]]:
    found: dict[str, int] = {}
    with record(follow=False) as live:
        yield live.phase, found
    found |= {phase.name: phase.peak_bytes for phase in live.recording.phases}


@contextmanager
def as_metrics(cuda: FakeCuda) -> Iterator[tuple[Any, dict[str, int]]]:
    memory, found = PhaseMemory(torch.device("cuda")), {}
    yield memory, found
    found |= {phase: allocated for phase, (allocated, _) in memory.peaks.items()}


@pytest.mark.parametrize("way", [as_recording, as_metrics])
def test_a_kv_cache_that_is_not_mapped_does_not_count(cuda: FakeCuda, pool: Any, way: Any) -> None:
    with way(cuda) as (phase, found):
        for _ in range(2):
            with phase("rollout"):
                pool.wake_up(["kv_cache"])
                cuda.spike(WORK)
                pool.discard(("kv_cache",))
            with phase("forward"):
                cuda.spike(2 * WORK)
    assert found["rollout"] == WEIGHTS + KV + WORK
    assert found["forward"] == WEIGHTS + 2 * WORK


def test_a_rehearsal_beside_a_released_cache_does_not_count_it(cuda: FakeCuda, pool: Any) -> None:
    """The step-0 table: the engine gave its cache back before the recorder was there."""
    pool.discard(("kv_cache",))
    with record(follow=False) as live, live.phase("forward"):
        cuda.spike(WORK)
    (forward,) = [phase for phase in live.recording.phases if phase.name == "forward"]
    assert (forward.peak_bytes, forward.reserved_bytes) == (WEIGHTS + WORK, WEIGHTS + WORK)


def test_a_phase_that_only_releases_held_the_cache_at_its_start(cuda: FakeCuda, pool: Any) -> None:
    memory = PhaseMemory(torch.device("cuda"))
    with memory("rollout"):
        pool.discard(("kv_cache",))
        cuda.spike(WORK)
    assert memory.peaks["rollout"] == (WEIGHTS + KV, WEIGHTS + KV)
    with memory("forward"):
        cuda.spike(WORK)
    assert memory.peaks["forward"] == (WEIGHTS + WORK, WEIGHTS + WORK)


def test_a_sleeping_copy_of_the_weights_does_not_count_either(cuda: FakeCuda, pool: Any) -> None:
    memory = PhaseMemory(torch.device("cuda"))
    pool.sleep(offload_tags=("weights",))
    with memory("forward"):
        cuda.spike(WORK)
    pool.wake_up()
    with memory("rollout"):
        cuda.spike(WORK)
    assert memory.peaks["forward"][0] == WORK
    assert memory.peaks["rollout"][0] == WEIGHTS + KV + WORK


def test_an_owner_is_looked_for_where_the_peak_was(cuda: FakeCuda, pool: Any) -> None:
    """Offloaded optimizer state and weights that sleep are no part of a device's peak."""
    weights = next(iter(pool.pointer_to_data))
    meter = CudaMeter(torch)
    meter.take_peak()
    here = torch.device("cuda", 0)
    assert meter.holds(here, weights + 512)
    assert not meter.holds(torch.device("cuda", 1), weights)
    assert not meter.holds(torch.device("cpu"), weights)
    pool.discard(("weights",))
    assert not meter.holds(here, weights + 512)
    assert meter.holds(here, weights + WEIGHTS)
