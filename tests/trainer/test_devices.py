"""A GPU's index, its limit, its faults and who else is on it: the code for CUDA, run without a card."""

import os
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from planner.errors import UsageError, VramwiseError
from planner.run.recipe import Checkpointing, Recipe
from planner.units import GiB, MiB
from profiler.calibration import Calibration, save
from profiler.nvml import GpuReading, ProcessReading
from tests.trainer import cardless
from trainer import devices
from trainer.checkpoint import rng_state, set_rng_state
from trainer.checkpointing import checkpoint_layers
from trainer.config import parse_run
from trainer.elementwise_optimizer import ElementwiseOptimizer, OptimizerSettings, StateFormat
from trainer.host_store import HostStore
from trainer.preflight import prepare
from trainer.run import train_parsed

GPU = torch.device("cuda", 0)
TOTAL = cardless.TOTAL_BYTES


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Stand behind torch.cuda; no calibration of the person who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    found = cardless.install(monkeypatch)
    with cardless.OnHost(found):
        yield found


def test_torch_itself_refuses_a_device_without_an_index(driver):
    """What crashed every run with train.device_memory on a GPU; guards the stand-in too."""
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_per_process_memory_fraction(0.5, torch.device("cuda"))
    torch.cuda.set_per_process_memory_fraction(0.5, torch.device("cuda", 0))
    assert driver.fractions == [0.5]


@pytest.mark.parametrize("name", [None, "cuda", "cuda:0", torch.device("cuda")])
def test_a_runs_device_has_an_index(driver, name):
    assert devices.run_device(name) == GPU
    assert devices.run_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("task", ["grpo", "sft"])
@pytest.mark.parametrize("preflight", [True, False])
def test_a_whole_run_on_a_limited_gpu(driver, document, tmp_path, task, preflight):
    """Rehearsal, steps, checkpoint and resume; a limit is gone when the run is over."""
    made = document(
        recipe={"task": task, "checkpointing": "offload"},
        train={"device_memory": "6GiB", "preflight": preflight, "steps": 2, "save_every": 1},
    )
    if task == "sft":
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "1 + 2 =", "completion": " 3"}\n' * 8)
        made["train"] |= {"dataset": str(rows), "rewards": []}
        made["recipe"] |= {"context": 40, "prompt_length": None, "completion_length": None}
    run, section = parse_run(made, root=tmp_path)
    result = train_parsed(run, section, root=tmp_path)
    assert result.steps == 2
    assert driver.fractions == [0.25, 1.0] * (2 if preflight else 1)
    longer = section.model_copy(update={"steps": 3})
    assert train_parsed(run, longer, root=tmp_path, resume=True).steps == 3
    assert driver.fraction == 1.0


def test_a_limit_ends_with_an_error_and_keeps_what_was_set_before(driver, document, tmp_path):
    run, section = parse_run(document(train={"device_memory": "12GiB"}), root=tmp_path)
    driver.fraction = 0.9
    ready = prepare(run, section)
    assert ready.policy.device == GPU
    with pytest.raises(ZeroDivisionError), ready.device:
        _ = 1 / 0
    for _ in range(2):
        assert driver.fraction == 0.9
        with ready.device:
            assert driver.fraction == 0.5


def test_a_limit_above_the_card_is_the_card(driver):
    with devices.limited(torch.device("cuda"), 10 * TOTAL, model=None):
        assert driver.fraction == 1.0


# a GPU without bf16


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"dtype": None}, r"recipe\.dtype: bf16 \(the default\) needs compute capability 8\.0"),
        ({"dtype": "bf16"}, r"recipe\.dtype: bf16 needs .* Tesla T4 has 7\.5"),
        ({"dtype": "fp16", "lora": {"dtype": "bf16"}}, r"recipe\.lora\.dtype: bf16 needs"),
    ],
)
def test_bf16_on_a_gpu_without_it_is_one_line_before_anything_is_loaded(
    driver, document, tmp_path, monkeypatch, recipe, message
):
    monkeypatch.setattr("trainer.preflight.load_policy", lambda *a, **k: pytest.fail("loaded"))
    driver.name, driver.capability = "Tesla T4", (7, 5)
    run, section = parse_run(document(recipe=recipe), root=tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        prepare(run, section)
    assert "fp16" in caught.value.hint


def test_other_dtypes_and_other_devices_may(driver):
    driver.capability = (7, 5)
    devices.check_dtype(Recipe(task="sft", dtype="fp16"), GPU)
    devices.check_dtype(Recipe(task="sft", dtype="bf16"), torch.device("cpu"))
    driver.capability = (8, 0)
    devices.check_dtype(Recipe(task="sft", dtype="bf16"), GPU)


# a GPU that others use


def nvml_of(*processes):
    """Return open_nvml of a driver that lists `processes` on this card."""
    reading = GpuReading(index=0, label="0", name="x", uuid="GPU-11aa", processes=processes)
    return lambda: closing(SimpleNamespace(read=lambda: [reading], close=lambda: None))


def test_what_others_hold_is_planned_around_and_said(driver, document, tmp_path, monkeypatch):
    monkeypatch.setattr(
        devices,
        "open_nvml",
        nvml_of(
            ProcessReading(pid=os.getpid(), used_bytes=9 * GiB),
            ProcessReading(pid=os.getppid(), used_bytes=11 * GiB),
            ProcessReading(pid=2**22 + 1, used_bytes=None),
        ),
    )
    monkeypatch.setattr(cardless, "UUID", "11aa")
    run, section = parse_run(document(train={"preflight": False}), root=tmp_path)
    alone = devices.this_machine(run, section)
    assert alone.vram_bytes == TOTAL
    assert devices.occupied(alone) == ""
    driver.free_bytes -= 12 * GiB
    shared = devices.this_machine(run, section)
    assert shared.vram_bytes == pytest.approx(12 * GiB, abs=400 * MiB)
    said = []
    prepare(run, section, say=said.append)
    (line,) = said
    assert "of the 24.00 GiB of NVIDIA GeForce RTX 4090 are used by others" in line
    assert f"pid {os.getppid()} " in line
    assert "11.00 GiB; pid 4194305)" in line
    assert str(os.getpid()) not in line.split()


def test_a_run_that_others_leave_no_room_for_says_so(driver, document, tmp_path):
    driver.free_bytes = 1 * MiB
    run, section = parse_run(document(), root=tmp_path)
    with pytest.raises(VramwiseError, match="does not fit") as caught:
        prepare(run, section)
    assert "are used by others" in caught.value.message
    assert "\n" not in caught.value.message


def test_our_own_memory_is_not_others(driver, document, tmp_path):
    run, section = parse_run(document(), root=tmp_path)
    driver.free_bytes -= 3 * GiB
    driver.counters.alloc(3 * GiB)
    assert devices.this_machine(run, section).vram_bytes == TOTAL


def test_a_pretended_limit_is_not_judged_by_others(driver, document, tmp_path):
    driver.free_bytes = 1 * MiB
    run, section = parse_run(document(train={"device_memory": "6GiB"}), root=tmp_path)
    assert devices.this_machine(run, section).vram_bytes == 6 * GiB
    said = []
    prepare(run, section, say=said.append)
    assert said == []


def test_unified_memory_has_no_such_figure(driver, document, tmp_path):
    driver.name, driver.free_bytes = "NVIDIA GB10", 1 * MiB
    run, section = parse_run(document(), root=tmp_path)
    machine = devices.this_machine(run, section)
    assert machine.gpu.unified
    assert machine.vram_bytes == TOTAL


# the calibration


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA Unheard-of 24 GB"])
def test_this_machine_is_planned_with_its_calibration(driver, document, tmp_path, name):
    driver.name, driver.free_bytes = name, TOTAL
    run, section = parse_run(document(train={"preflight": False}), root=tmp_path)
    before = devices.this_machine(run, section)
    assert before.calibration == ""
    save(
        Calibration(
            gpu=name,
            driver="570",
            torch="2.13.0",
            taken_at="2026-11-30",
            torch_total_bytes=TOTAL,
            context_bytes=321 * MiB,
            workspace_bytes=0,
            segment_bytes=0,
            bandwidth_bytes_per_s=1,
            host_to_device_bytes_per_s=1,
        )
    )
    machine = devices.this_machine(run, section)
    assert machine.context_bytes == 321 * MiB
    planned = prepare(run, section).plan
    assert planned.capacity_bytes == TOTAL - 321 * MiB
    assert any("measured here on 2026-11-30" in line for line in planned.assumptions)


# a GPU that torch cannot start

OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver "
    "by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
    "Alternatively, go to: https://pytorch.org to install a PyTorch version that has been compiled with "
    "your version of the CUDA driver."
)


@pytest.fixture
def broken(monkeypatch):
    """Return a function that makes torch a CUDA build whose start fails with a text."""

    def set_up(text):
        def init():
            raise RuntimeError(text)

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)

    return set_up


def test_an_old_driver_is_one_line_and_no_run_on_the_cpu(broken, document, tmp_path):
    broken(OLD)
    run, section = parse_run(document(), root=tmp_path)
    with pytest.raises(VramwiseError, match=r"too old \(found version 11040\)\.?$") as caught:
        prepare(run, section)
    assert "\n" not in caught.value.message
    assert "driver" in caught.value.hint
    assert "CUDA_VISIBLE_DEVICES=" in caught.value.hint


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 0), False), ((7, 5), True), ((8, 9), True), ((11, 0), False), ((12, 1), True)],
)
def test_a_gpu_that_torch_has_no_kernels_for_is_one_line(driver, capability, runs):
    driver.capability = capability
    if runs:
        devices.check_driver()
        return
    with pytest.raises(VramwiseError, match=r"holds kernels for 7\.5 to 12\.0") as caught:
        devices.check_driver()
    assert f"{capability[0]}.{capability[1]}" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "No CUDA GPUs are available",
    ],
)
def test_a_machine_without_a_gpu_trains_on_its_cpu(broken, text):
    broken(text)
    assert devices.check_driver() == ""


def test_any_other_failure_to_start_is_said(broken):
    broken(
        "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized\nmore"
    )
    with pytest.raises(VramwiseError, match=r"802: system not yet initialized$"):
        devices.check_driver()


def test_a_cpu_build_beside_a_driver_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "DRIVER_FILE", tmp_path / "version")
    assert devices.check_driver() == ""
    (tmp_path / "version").write_text("570")
    assert "built without CUDA" in devices.check_driver()


# host memory that cannot be pinned


class Stream:
    """torch.cuda.Stream's rule for its device; no work."""

    def __init__(self, device):
        self.device_index = torch.cuda._utils._get_device_index(device, optional=True)


@pytest.fixture
def store(driver, monkeypatch):
    """Return (host store on a GPU, what it said)."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    said = []
    layers = [torch.nn.Identity() for _ in range(4)]
    handle = checkpoint_layers(layers, mode=Checkpointing.OFFLOAD, say=said.append)
    yield handle.store, said
    handle.store.close()


@pytest.mark.parametrize("device", [GPU, torch.device("cuda")])
def test_a_refused_pin_is_said_once_and_poisons_no_kernel(driver, store, device):
    driver.refuses_to_pin = True
    kept, said = store
    kept.reserve(1000, device)
    assert kept.counts.slab_bytes == 3 * 1008
    assert driver.last_error == 0
    torch.zeros(8, device="cuda")  # a launch of its own would have raised
    kept.reserve(5000, device)
    assert driver.last_error == 0
    assert len(said) == 1
    assert "could not pin" in said[0]
    assert "out of memory" in said[0]
    kept.close()
    assert driver.last_error == 0


def test_a_pinned_slab_is_unpinned_and_nothing_is_said(driver, store):
    kept, said = store
    kept.reserve(1000, GPU)
    assert len(driver.pinned) == 1
    kept.close()
    assert not driver.pinned
    assert said == []


def test_a_failed_unpin_poisons_no_kernel(driver, store):
    kept, _ = store
    kept.reserve(1000, GPU)
    driver.pinned.clear()
    kept.close()
    assert driver.last_error == 0


def test_the_stand_in_raises_what_cuda_would(driver):
    driver.refuses_to_pin = True
    assert int(torch.cuda.cudart().cudaHostRegister(1, 1, 0)) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.zeros(8, device=GPU)
    torch.zeros(8, device=GPU)


def test_a_store_without_say_is_silent():
    assert HostStore(2)._say("anything") is None


# resuming on other devices


def test_random_states_of_more_gpus_than_there_are(driver):
    state = rng_state()
    assert len(state["cuda"]) == 1
    torch.cuda.default_generators[0].manual_seed(5)
    drawn = torch.cuda.default_generators[0].get_state()
    set_rng_state({"cpu": state["cpu"], "cuda": [drawn, drawn, drawn]})
    assert torch.equal(torch.cuda.get_rng_state(0), drawn)


def test_rounding_states_of_devices_that_are_not_here_are_left_out():
    weights = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = ElementwiseOptimizer(
        [weights], OptimizerSettings(state_format=StateFormat.BF16, seed=1)
    )
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    document = optimizer.state_dict()
    (own,) = document["generators"]
    assert own == "cpu"
    document["generators"]["cuda:1"] = document["generators"]["cpu"]
    optimizer.load_state_dict(document)
    assert set(optimizer.state_dict()["generators"]) == {"cpu"}
