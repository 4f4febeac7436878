"""GPU readings: recorded NVML sessions replayed through the real reader; unknown is never 0.

The sessions below are written call by call as `profile watch --record` writes them. Totals and
reserves are those of data/gpus and of published nvidia-smi output (H100 80GB: 81559 MiB total,
516 MiB reserved).
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from planner.errors import NoGpuError, UsageError
from planner.units import MiB
from profiler.amd import AmdSmiReader, AmdSysfsReader, open_amd
from profiler.gpu_reading import GpuReading, ProcessReading, used_by_tree
from profiler.nvml import NVML_FUNCTIONS, NVML_MEMORY_V2, NvmlReader, open_nvml
from profiler.nvml_session import RecordedNvml, ReplayedNvml
from profiler.watch import reading_document, screen

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
VERSION_MISMATCH = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def call(
    name: str, *arguments: Any, answer: Any = None, error: int | None = None
) -> dict[str, Any]:
    line: dict[str, Any] = {"t_s": 0.0, "call": name, "arguments": list(arguments)}
    return {**line, "error": error} if error is not None else {**line, "answer": answer}


def session(*lines: dict[str, Any], count: int = 1) -> NvmlReader:
    head = [
        call("nvmlDeviceGetCount", answer=count),
        call("nvmlSystemGetDriverVersion", answer="570.86.16"),
        call("nvmlSystemGetCudaDriverVersion_v2", answer=12080),
    ]
    return NvmlReader(ReplayedNvml([*head, *lines]))


def gpu(index: int, name: str, memory: dict[str, Any] | int | None, processes: Any) -> list[dict]:
    handle = str(index)
    lines = [
        call("nvmlDeviceGetHandleByIndex", index, answer={"handle": handle}),
        call("nvmlDeviceGetName", handle, answer=name),
        call("nvmlDeviceGetUUID", handle, answer=f"GPU-{index}"),
    ]
    if isinstance(memory, dict):
        lines.append(call("nvmlDeviceGetMemoryInfo", handle, NVML_MEMORY_V2, answer=memory))
    elif isinstance(memory, int):
        lines.append(call("nvmlDeviceGetMemoryInfo", handle, NVML_MEMORY_V2, error=memory))
        lines.append(call("nvmlDeviceGetMemoryInfo", handle, error=memory))
    if isinstance(processes, list):
        lines.append(call("nvmlDeviceGetComputeRunningProcesses", handle, answer=processes))
        lines.append(call("nvmlDeviceGetGraphicsRunningProcesses", handle, answer=[]))
    else:
        lines.append(call("nvmlDeviceGetComputeRunningProcesses", handle, error=processes))
    return lines


def memory(total_mib: int, used_mib: int, reserved_mib: int) -> dict[str, int]:
    free = total_mib - used_mib - reserved_mib
    return {
        "version": NVML_MEMORY_V2,
        "total": total_mib * MiB,
        "reserved": reserved_mib * MiB,
        "used": used_mib * MiB,
        "free": free * MiB,
    }


def process(pid: int, used_mib: int | None, instance: int = 0xFFFFFFFF) -> dict[str, Any]:
    used = None if used_mib is None else used_mib * MiB
    return {"pid": pid, "usedGpuMemory": used, "gpuInstanceId": instance}


def test_an_h100_with_a_training_process_is_read_to_the_byte() -> None:
    reader = session(
        *gpu(0, "NVIDIA H100 80GB HBM3", memory(81559, 40960, 516), [process(77, 40400)])
    )
    (reading,) = reader.read()
    assert reading.total_bytes == 81559 * MiB
    assert reading.used_bytes == 40960 * MiB
    assert reading.reserved_bytes == 516 * MiB
    assert reading.processes == (ProcessReading(pid=77, used_bytes=40400 * MiB),)
    assert reader.versions() == {"driver": "570.86.16", "cuda": "12.8"}


def test_two_gpus_give_two_readings_in_order() -> None:
    reader = session(
        *gpu(0, "NVIDIA A40", memory(46068, 1, 665), []),
        *gpu(1, "NVIDIA L40S", memory(46068, 2, 665), []),
        count=2,
    )
    assert [(r.label, r.name) for r in reader.read()] == [("0", "NVIDIA A40"), ("1", "NVIDIA L40S")]


def test_a_lost_gpu_is_unknown_and_the_other_is_still_read() -> None:
    reader = session(
        call("nvmlDeviceGetHandleByIndex", 0, error=pynvml.NVML_ERROR_GPU_IS_LOST),
        *gpu(1, "NVIDIA A40", memory(46068, 2, 665), []),
        count=2,
    )
    lost, alive = reader.read()
    assert lost.used_bytes is None
    assert "GpuIsLost" in lost.notes[0]
    assert alive.used_bytes == 2 * MiB


def test_an_old_driver_without_the_v2_structure_is_read_by_the_first() -> None:
    lines = gpu(0, "Tesla T4", None, [])
    lines.append(call("nvmlDeviceGetMemoryInfo", "0", NVML_MEMORY_V2, error=VERSION_MISMATCH))
    plain = {"total": 15360 * MiB, "used": 700 * MiB, "free": 14660 * MiB}
    lines.append(call("nvmlDeviceGetMemoryInfo", "0", answer=plain))
    (reading,) = session(*lines).read()
    assert reading.used_bytes == 700 * MiB
    assert reading.reserved_bytes is None


def test_unified_memory_that_nvml_does_not_support_is_unknown() -> None:
    (reading,) = session(*gpu(0, "NVIDIA GB10", NOT_SUPPORTED, [process(5, 900)])).read()
    assert reading.total_bytes is None
    assert reading.used_bytes is None
    assert reading.processes == (ProcessReading(pid=5, used_bytes=900 * MiB),)
    assert "NotSupported" in reading.notes[0]


def test_wsl_lists_processes_without_sizes() -> None:
    (reading,) = session(
        *gpu(0, "NVIDIA GeForce RTX 4090", memory(24564, 3000, 0), [process(9, None)])
    ).read()
    assert reading.processes is not None
    assert reading.processes[0].used_bytes is None
    assert used_by_tree([reading], {9}, {9}) is None


def test_a_process_list_without_permission_is_unknown_not_empty() -> None:
    (reading,) = session(*gpu(0, "NVIDIA A40", memory(46068, 5, 665), NO_PERMISSION)).read()
    assert reading.processes is None
    assert used_by_tree([reading], {1}, {1}) is None


def test_mig_slices_are_read_each_with_its_own_memory() -> None:
    lines = [
        call("nvmlDeviceGetHandleByIndex", 0, answer={"handle": "0"}),
        call("nvmlDeviceGetName", "0", answer="NVIDIA A100-SXM4-40GB"),
        call("nvmlDeviceGetMigMode", "0", answer=[1, 1]),
        call("nvmlDeviceGetMaxMigDeviceCount", "0", answer=7),
    ]
    for number, total in ((0, 19968), (2, 4864)):
        handle = f"0/{number}"
        lines += [
            call("nvmlDeviceGetMigDeviceHandleByIndex", "0", number, answer={"handle": handle}),
            call("nvmlDeviceGetMemoryInfo", handle, NVML_MEMORY_V2, answer=memory(total, 37, 0)),
            call("nvmlDeviceGetComputeRunningProcesses", handle, answer=[process(4, 30, number)]),
        ]
    readings = session(*lines).read()
    assert [r.label for r in readings] == ["0:0", "0:2"]
    assert [r.total_bytes for r in readings] == [19968 * MiB, 4864 * MiB]
    assert readings[1].processes == (ProcessReading(pid=4, used_bytes=30 * MiB, gpu_instance=2),)
    assert readings[0].name == "NVIDIA A100-SXM4-40GB"


def test_mig_mode_on_without_a_visible_slice_falls_back_to_the_whole_gpu() -> None:
    lines = gpu(0, "NVIDIA A100-SXM4-40GB", NO_PERMISSION, NO_PERMISSION)
    lines.append(call("nvmlDeviceGetMigMode", "0", answer=[1, 1]))
    lines.append(call("nvmlDeviceGetMaxMigDeviceCount", "0", answer=7))
    (reading,) = session(*lines).read()
    assert (reading.label, reading.used_bytes) == ("0", None)


def reading_with(*processes: ProcessReading) -> GpuReading:
    return GpuReading(index=0, label="0", name="x", used_bytes=5, processes=processes)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        pytest.param((), 0, id="nothing runs: a true zero"),
        pytest.param(((7, 100), (8, 50)), 150, id="both of ours"),
        pytest.param(((7, 100), (99, 50)), 100, id="another user's process we can see"),
        pytest.param(((4242, 50),), None, id="a foreign PID namespace: ours may hide in it"),
        pytest.param(((7, None),), None, id="ours without a size"),
    ],
)
def test_the_tree_sums_only_what_the_driver_tells(
    processes: tuple[tuple[int, int | None], ...], expected: int | None
) -> None:
    listed = [ProcessReading(pid=pid, used_bytes=used) for pid, used in processes]
    assert used_by_tree([reading_with(*listed)], {7, 8}, {7, 8, 99}) == expected


def test_a_container_that_hides_all_processes_of_a_busy_gpu_is_unknown() -> None:
    (busy,) = session(*gpu(0, "NVIDIA A40", memory(46068, 9000, 665), [])).read()
    (idle,) = session(*gpu(0, "NVIDIA A40", memory(46068, 3, 665), [])).read()
    assert used_by_tree([busy], {1}, {1}) is None
    assert used_by_tree([idle], {1}, {1}) == 0


def test_a_recorded_session_replays_to_the_same_readings(tmp_path: Path) -> None:
    lines = gpu(0, "NVIDIA H100 80GB HBM3", memory(81559, 40960, 516), [process(77, 40400)])
    head = [call("nvmlDeviceGetCount", answer=1)]
    source = ReplayedNvml([*head, *lines])
    path = tmp_path / "session.jsonl"
    with RecordedNvml(source, path) as recorder, NvmlReader(recorder) as reader:
        first = reader.read()
    with NvmlReader(ReplayedNvml.load(path)) as reader:
        assert reader.read() == first
    calls = {json.loads(text)["call"] for text in path.read_text().splitlines()}
    assert calls <= set(NVML_FUNCTIONS)


def test_every_function_of_the_table_is_in_nvidia_ml_py() -> None:
    missing = [name for name in NVML_FUNCTIONS if not callable(getattr(pynvml, name, None))]
    assert missing == []
    assert pynvml.nvmlMemory_v2 == NVML_MEMORY_V2


def test_a_session_file_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"call": "os.system", "arguments": ["id"]}\n')
    with pytest.raises(UsageError, match="line 1"):
        ReplayedNvml.load(path)
    path.write_text("not json")
    with pytest.raises(UsageError, match="not a recorded session"):
        ReplayedNvml.load(path)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has an NVIDIA GPU")
def test_a_machine_without_nvml_says_so() -> None:
    with pytest.raises(NoGpuError) as caught:
        open_nvml()
    assert caught.value.exit_code == 4
    assert caught.value.hint


def test_watch_shows_unknown_and_never_zero() -> None:
    from rich.console import Console

    reader = session(*gpu(0, "NVIDIA GB10", NOT_SUPPORTED, NO_PERMISSION))
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(reader.read(), {}, reader.versions()))
    text = console.export_text()
    assert text.count("unknown") >= 5
    assert " 0 B" not in text
    document = reading_document(reader)
    assert document["gpus"][0]["used_bytes"] is None
    assert document["gpus"][0]["processes"] is None


def test_watch_keeps_the_peak() -> None:
    peaks: dict[str, int] = {}
    for used in (10, 30, 20):
        reading = GpuReading(index=0, label="0", name="x", used_bytes=used, processes=())
        screen([reading], peaks, {})
    assert peaks == {"0": 30}


class FakeAmdSmi:
    """amdsmi's function table for one MI300X, as its Python interface answers."""

    class AmdSmiException(Exception):
        pass

    def amdsmi_init(self) -> None: ...
    def amdsmi_shut_down(self) -> None: ...
    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["handle"]

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, int]:
        return {"vram_total": 196592, "vram_used": 285}

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, str]:
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[dict[str, Any]]:
        return [
            {"pid": 12, "memory_usage": {"vram_mem": 1000}},
            {"pid": 13, "memory_usage": {"vram_mem": "N/A"}},
        ]

    def amdsmi_get_gpu_driver_info(self, handle: str) -> dict[str, str]:
        raise self.AmdSmiException


def test_amd_is_read_through_amdsmi() -> None:
    with AmdSmiReader(FakeAmdSmi()) as reader:
        (reading,) = reader.read()
        assert reader.versions() == {}
    assert reading.total_bytes == 196592 * MiB
    assert reading.processes == (
        ProcessReading(pid=12, used_bytes=1000),
        ProcessReading(pid=13, used_bytes=None),
    )


def test_amd_without_amdsmi_is_read_from_sysfs(tmp_path: Path) -> None:
    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text("206141652992\n")
    reader = open_amd(tmp_path)
    assert isinstance(reader, AmdSysfsReader)
    (reading,) = reader.read()
    assert (reading.total_bytes, reading.used_bytes) == (206141652992, None)
    assert reading.processes is None


def test_a_library_of_another_shape_is_asked_only_for_the_table() -> None:
    bare = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 0, NVMLError=pynvml.NVMLError
    )
    assert NvmlReader(bare).read() == []
