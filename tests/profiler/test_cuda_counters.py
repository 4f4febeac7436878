"""The recorder on a GPU's counters: ours and the program's peaks, whoever resets, on a fake allocator."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.assemble import recordings
from profiler.launch import LaunchSettings, launch
from profiler.torch_recorder import record
from tests.profiler.fake_cuda import FakeCuda, MiB

_EARLY = torch.cuda.reset_peak_memory_stats  # as a program that imported the name before us
ASKS: dict[str, Callable[[], int]] = {
    "cuda.max_memory_allocated": lambda: torch.cuda.max_memory_allocated(),
    "cuda.memory.memory_stats": lambda: torch.cuda.memory.memory_stats(0)[
        "allocated_bytes.all.peak"
    ],
    "cuda.memory_stats_as_nested_dict": lambda: torch.cuda.memory_stats_as_nested_dict()[
        "allocated_bytes"
    ]["all"]["peak"],
    "accelerator.max_memory_allocated": lambda: torch.accelerator.max_memory_allocated(),
    "accelerator.memory_stats": lambda: torch.accelerator.memory_stats(torch.device("cuda", 0))[
        "allocated_bytes.all.peak"
    ],
}
RESETS: dict[str, Callable[[], None]] = {
    "cuda.reset_peak_memory_stats": lambda: torch.cuda.reset_peak_memory_stats("cuda"),
    "cuda.reset_max_memory_allocated": lambda: torch.cuda.reset_max_memory_allocated(),
    "accelerator.reset_peak_memory_stats": lambda: torch.accelerator.reset_peak_memory_stats(),
    "a name imported early": lambda: _EARLY(),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


def peaks(live: Any) -> dict[str, int]:
    return {phase.name: phase.peak_bytes for phase in live.recording.phases}


@pytest.mark.parametrize("ask", ASKS)
def test_the_program_sees_its_own_peak_on_every_road(cuda: FakeCuda, ask: str) -> None:
    with record(follow=False) as live:
        with live.phase("forward"):
            cuda.spike(100 * MiB)
        with live.phase("backward"):
            cuda.spike(40 * MiB)
        assert ASKS[ask]() == 100 * MiB
    assert ASKS[ask]() == 100 * MiB  # also when nobody records any more
    assert peaks(live) == {"load": 0, "forward": 100 * MiB, "backward": 40 * MiB, "other": 0}


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.filterwarnings("ignore:torch.cuda.reset_max_memory")
def test_a_reset_of_the_program_is_its_own(cuda: FakeCuda, reset: str) -> None:
    with record(follow=False) as live:
        with live.phase("forward"):
            cuda.spike(100 * MiB)
            RESETS[reset]()
            cuda.spike(10 * MiB)
            assert all(ask() == 10 * MiB for ask in ASKS.values())
        with live.phase("backward"):
            RESETS[reset]()
            cuda.spike(2 * MiB)
    assert peaks(live)["forward"] == 100 * MiB
    assert peaks(live)["backward"] == 2 * MiB
    assert live.recording.peak_bytes == 100 * MiB
    RESETS[reset]()
    assert all(ask() == 0 for ask in ASKS.values())


def test_torch_has_its_own_functions_back_once_nothing_is_kept_for_the_program(
    cuda: FakeCuda,
) -> None:
    before = torch._C._cuda_memoryStats, torch._C._accelerator_resetPeakStats
    with record(follow=False) as live, live.phase("forward"):
        cuda.spike(MiB)
    torch.cuda.reset_peak_memory_stats()
    assert (torch._C._cuda_memoryStats, torch._C._accelerator_resetPeakStats) == before


def test_recorders_inside_each_other_keep_their_own_peaks(cuda: FakeCuda) -> None:
    with record(follow=False) as outer:
        with outer.phase("rollout"):
            cuda.spike(100 * MiB)
            with record(follow=False) as inner:
                with inner.phase("forward"):
                    cuda.spike(30 * MiB)
                cuda.spike(50 * MiB)
        with outer.phase("step"):
            cuda.spike(MiB)
    assert peaks(inner)["forward"] == 30 * MiB
    assert inner.recording.peak_bytes == 50 * MiB
    assert peaks(outer)["rollout"] == 100 * MiB
    assert peaks(outer)["step"] == MiB
    assert torch.cuda.max_memory_allocated() == 100 * MiB


def test_what_was_before_the_recording_is_not_its_peak(cuda: FakeCuda) -> None:
    cuda.spike(100 * MiB)
    with record(follow=False) as live:
        cuda.spike(MiB)
    assert live.recording.peak_bytes == MiB


def test_a_change_of_phase_reads_the_one_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(8).install(monkeypatch)
    with record(follow=False) as live:
        with live.phase("forward"):
            cuda.spike(MiB)
        cuda.calls.clear()
        live.phases.change("backward")
        assert cuda.calls.pop("_cuda_hasPrimaryContext") == 7  # does the process use another yet?
        assert cuda.calls == {"_cuda_memoryStats": 1, "_cuda_resetPeakMemoryStats": 1}


def test_of_several_devices_in_use_the_fullest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(4).install(monkeypatch)
    with record(follow=False) as live:
        kept = cuda.alloc(10 * MiB)
        with live.phase("forward"):
            cuda.spike(64 * MiB, device=2)
        with live.phase("backward"):
            cuda.spike(MiB, device=2)
    # device 0 has 10 MiB all the time: more than 1 MiB on device 2, less than 64
    assert [peaks(live)[name] for name in ("load", "forward", "backward")] == [
        10 * MiB,
        64 * MiB,
        10 * MiB,
    ]
    assert torch.cuda.max_memory_allocated(2) == 64 * MiB
    assert torch.cuda.max_memory_allocated("cuda:0") == 10 * MiB
    cuda.free(kept)


def test_reserved_memory_is_that_of_the_phase(cuda: FakeCuda) -> None:
    with record(follow=False) as live:
        with live.phase("forward"):
            cuda.spike(33 * MiB)
        torch.cuda.empty_cache()
        with live.phase("step"):
            cuda.spike(3 * MiB)
    reserved = {phase.name: phase.reserved_bytes for phase in live.recording.phases}
    assert reserved["forward"] == 34 * MiB  # segments of 2 MiB
    assert reserved["step"] == 20 * MiB  # tensors from 1 to 10 MiB share one of 20
    assert live.recording.timeline[-1]["reserved_bytes"] == 20 * MiB


def test_torchs_own_summary_is_printed_from_the_fake(cuda: FakeCuda) -> None:
    """The fake has every statistic that torch's Python reads."""
    cuda.spike(5 * MiB)
    assert "5120 KiB" in torch.cuda.memory_summary()


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.profiler.fake_cuda import FakeCuda, MiB
import torch
cuda = FakeCuda(2).install()

class Model(torch.nn.Linear):
    def forward(self, x):
        cuda.spike(self.work)
        return super().forward(x)

model = Model(8, 8)
for model.work in (100 * MiB, 30 * MiB):
    with torch.no_grad():
        model(torch.zeros(1, 8))
        torch.accelerator.reset_peak_memory_stats()
        model(torch.zeros(1, 8))
    model.work = 20 * MiB
    model(torch.zeros(1, 8)).sum().backward()
print(torch.accelerator.max_memory_allocated() // MiB, torch.cuda.max_memory_allocated() // MiB)
"""


FOLLOWED = """
import sys
sys.path.insert(0, {root!r})
from tests.profiler.fake_cuda import FakeCuda, MiB
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
mode = FakeTensorMode()  # imports what must not see a GPU yet
cuda = FakeCuda().install()

def on_gpu(*shape):
    return FakeTensor(mode, torch.empty(*shape, device="meta"), torch.device("cuda", 0))

class Model(torch.nn.Linear):
    def forward(self, x):
        self.hidden = on_gpu(64, 64) @ on_gpu(64, 4096)
        cuda.spike(5 * MiB)
        return super().forward(x)

with torch.no_grad():
    Model(8, 8)(torch.zeros(1, 8))
"""


def watch(folder: Path, program: str, **settings: Any) -> tuple[Any, str]:
    (folder / "train.py").write_text(program.format(root=str(Path(__file__).parents[2])))
    with (folder / "stdout").open("w") as stdout:
        result = launch(
            [sys.executable, str(folder / "train.py")],
            LaunchSettings(out=folder / "out", stdout=stdout, **settings),
        )
    (recording,) = recordings(result)
    assert result.exit_code == 0
    assert not recording.partial
    assert recording.environment["gpu"] == "NVIDIA Fake"
    return recording, (folder / "stdout").read_text()


def test_a_watched_program_on_a_gpu(tmp_path: Path) -> None:
    recording, printed = watch(tmp_path, PROGRAM)
    found = {phase.name: phase.peak_bytes for phase in recording.phases}
    assert (found["score"], found["forward"]) == (100 * MiB, 20 * MiB)
    # what the program saw since its own reset: 30 and 20 MiB
    assert printed.split() == ["30", "30"]


def test_following_a_gpu_program_follows_its_gpu_tensors(tmp_path: Path) -> None:
    """What the allocator held beyond them is named, and the note says what was followed."""
    recording, _ = watch(tmp_path, FOLLOWED, follow=True)
    phases = {phase.name: phase for phase in recording.phases}
    assert phases["score"].terms_bytes == {"activations": MiB, "overhead": 4 * MiB}
    assert phases["score"].peak_bytes == recording.peak_bytes == 5 * MiB
    assert phases["score"].reserved_bytes == 20 * MiB
    assert [tuple(tensor.shape) for tensor in recording.largest] == [(64, 4096)]
    assert any("every cuda tensor's storage" in note for note in recording.notes)
