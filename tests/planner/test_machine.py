"""GPU catalogue and machines: sizes as torch sees them, names as people type them."""

import pytest

from planner.errors import UnknownNameError, UsageError
from planner.machines.machine import find_gpu, gpu_catalogue, make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.units import GiB, MiB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("typed", "gpu_id"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("rtx 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("a100-80gb", "a100-sxm4-80gb"),
        ("Tesla T4", "t4"),
        ("mi300x", "mi300x"),
        ("dgx spark", "gb10-dgx-spark"),
        ("A800", "a800-sxm4-80gb"),
        ("NVIDIA H800", "h800-sxm"),
        ("L20", "l20"),
        ("RTX 4090 D", "rtx-4090-d"),
        ("4090D", "rtx-4090-d"),
        ("5090D", "rtx-5090-d"),
        ("Titan RTX", "titan-rtx"),
        ("H20-141GB", "h20-141gb"),
        ("h20", "h20"),
    ],
)
def test_names_people_type_find_the_card(typed, gpu_id):
    assert find_gpu(typed).id == gpu_id


@pytest.mark.parametrize("name", ["a100", "v100", "rtx 3080", "m3 max"])
def test_a_name_shared_by_two_sizes_is_refused_with_the_choices(name):
    with pytest.raises(UsageError, match="several sizes") as caught:
        find_gpu(name)
    assert caught.value.hint.count(",") >= 1


def test_an_unknown_card_lists_near_matches():
    with pytest.raises(UnknownNameError) as caught:
        find_gpu("rtx-4099")
    assert "rtx-4090" in caught.value.near
    assert caught.value.exit_code == 2


def test_torch_sees_less_than_the_driver_and_the_box():
    for gpu in gpu_catalogue().values():
        if gpu.torch_total_bytes and gpu.driver_total_bytes:
            assert gpu.torch_total_bytes < gpu.driver_total_bytes, gpu.id
            assert gpu.driver_total_bytes <= gpu.marketed_gb * 1.03 * GiB, gpu.id


def test_every_card_carries_its_source():
    for gpu in gpu_catalogue().values():
        assert gpu.source["torch_total_mib"], gpu.id


def test_t4_total_is_what_errors_print():
    # "14.56 GiB total capacity" .. "14.75 GiB" in public out-of-memory messages
    assert find_gpu("t4").torch_total_bytes == 14909 * MiB


def test_vram_overrides_and_stands_alone():
    assert make_machine("rtx-3090", vram="20GiB").vram_bytes == 20 * GiB
    machine = make_machine(vram="24GiB", host_ram="64GB")
    assert (machine.vram_bytes, machine.gpu) == (24 * GiB, None)
    assert machine.host_ram_bytes == 64 * 1000**3


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "GPU"),
        ({"gpu": "t4", "gpus": 0}, "gpus"),
        ({"gpu": "t4", "gpus": -3}, "gpus"),
        ({"vram": "0GiB"}, "vram"),
        ({"vram": "-5GiB"}, "vram"),
        ({"vram": "nan"}, "vram"),
        ({"vram": "1e400GiB"}, "vram"),
        ({"vram": "99999999999999999999GiB"}, "vram"),
        ({"vram": float("nan")}, "vram"),
        ({"gpu": "jetson-orin-nx-16gb"}, "gpu"),
        ({"gpu": "t4", "host_ram": "lots"}, "host-ram"),
    ],
)
def test_bad_machines_name_the_field(arguments, field):
    gpu = arguments.pop("gpu", None)
    with pytest.raises(UsageError, match=field):
        make_machine(gpu, **arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * GiB),
        ("24G", 24 * GiB),
        ("80 GB", 80 * 10**9),
        ("512", 512),
        ("1.5MiB", 3 * MiB // 2),
    ],
)
def test_sizes_parse(text, expected):
    assert parse_bytes(text) == expected


def test_sizes_print_binary():
    assert format_bytes(16060522496) == "14.96 GiB"
    assert format_bytes(-3 * MiB) == "-3.00 MiB"
    assert format_bytes(12) == "12 B"


def test_unified_memory_is_known_as_such():
    assert find_gpu("gb10-dgx-spark").unified
    assert not find_gpu("h100").unified


def test_mig_slices_are_cards_of_their_own():
    slice_ = find_gpu("h100-80gb-mig-1g.10gb")
    assert slice_.kind == "mig"
    assert slice_.parent in gpu_catalogue()
    assert slice_.torch_total_bytes < 11 * GiB


def test_offloading_frees_nothing_in_unified_memory():
    model = find_model("qwen3-8b")
    machine = make_machine("gb10-dgx-spark")
    kept = plan(model, Recipe(task="sft", context=8192, checkpointing="full"), machine)
    moved = plan(model, Recipe(task="sft", context=8192, checkpointing="offload"), machine)
    assert moved.host_peak_bytes > GiB
    assert moved.capacity_bytes == kept.capacity_bytes - moved.host_peak_bytes
    assert any("unified memory" in note for note in moved.assumptions)
