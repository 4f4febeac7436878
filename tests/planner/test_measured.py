"""Speeds measured on this machine, in plans: products, copies, links and launches as they were found."""

from dataclasses import replace

import pytest

from planner.machines.calibration import Calibration
from planner.machines.machine import Machine, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.speed.cards import card_speed
from planner.speed.measured import speed_of
from planner.speed.parameters import parameters
from planner.speed.roofline import LINK_SHARE, rates, seconds
from planner.speed.time import time_of, why_not
from planner.speed.work import Pass
from planner.units import GiB

FOUND = Calibration(
    gpu="NVIDIA A40",
    driver="570",
    torch="2.13.0",
    taken_at="2026-11-30",
    torch_total_bytes=44 * GiB,
    context_bytes=400 * 2**20,
    workspace_bytes=0,
    segment_bytes=0,
    bandwidth_bytes_per_s=500 * 10**9,
    host_to_device_bytes_per_s=24 * 10**9,
    device_to_host_bytes_per_s=20 * 10**9,
    bf16_flops_per_s=100 * 10**12,
    fp32_flops_per_s=30 * 10**12,
    attention_flops_per_s=40 * 10**12,
    launch_nanoseconds=20_000,
)
PROCESSOR = replace(
    FOUND,
    gpu="CPU, 1 threads",
    context_bytes=0,
    bf16_flops_per_s=0,
    fp32_flops_per_s=100 * 10**9,
    attention_flops_per_s=50 * 10**9,
    bandwidth_bytes_per_s=10 * 10**9,
)


def planned(machine, **recipe):
    values = {"task": "sft", "context": 2048, "framework": "hf-trainer", **recipe}
    return plan(catalogue_model("qwen2.5-0.5b"), Recipe(**values), machine)


def test_what_was_measured_is_what_is_reached():
    card, p = speed_of(replace(make_machine("a40"), measured=FOUND))
    found = rates(card, "bf16", p)
    assert found.products == pytest.approx(100e12 * parameters().product)
    assert found.attention == pytest.approx(40e12)
    assert found.bandwidth == pytest.approx(500e9)
    assert card.pcie * LINK_SHARE == pytest.approx(20e9)  # the slower direction
    assert p.launch_s == pytest.approx(20e-6)
    # what was not measured stays as it was published
    assert card.peaks == card_speed("a40").peaks
    assert speed_of(make_machine("a40")) == (card_speed("a40"), parameters())


def test_an_older_calibration_has_bandwidth_and_one_link():
    older = replace(
        FOUND,
        device_to_host_bytes_per_s=0,
        bf16_flops_per_s=0,
        fp32_flops_per_s=0,
        attention_flops_per_s=0,
        launch_nanoseconds=0,
    )
    card, p = speed_of(replace(make_machine("a40"), measured=older))
    assert card.measured == card_speed("a40").measured
    assert p == parameters()
    assert card.pcie * LINK_SHARE == pytest.approx(24e9)
    nameless = Machine(vram_bytes=44 * GiB, measured=older)
    assert speed_of(nameless) is None


def test_a_plan_of_a_measured_card_says_so_and_takes_as_long_as_it_computes():
    plain = planned(make_machine("a40"))
    slow = replace(FOUND, bf16_flops_per_s=FOUND.bf16_flops_per_s // 10)
    measured = planned(replace(make_machine("a40"), measured=slow))
    assert time_of(measured).step_seconds > 2.5 * time_of(plain).step_seconds
    said = "measured here on 2026-11-30 (vramwise profile calibrate)"
    assert said in time_of(measured).notes[-1]
    assert not any("measured here" in note for note in time_of(plain).notes)


def test_a_card_that_no_table_has_is_timed_once_it_is_measured():
    machine = Machine(vram_bytes=44 * GiB)
    assert time_of(planned(machine)) is None
    assert time_of(planned(replace(machine, measured=FOUND))).step_seconds > 0


def test_a_processor_computes_while_it_starts_operations():
    machine = Machine(vram_bytes=16 * GiB, context_bytes=0, cpu=True)
    assert time_of(planned(machine)) is None
    assert "profile calibrate --cpu" in why_not(planned(machine))
    measured = replace(machine, measured=PROCESSOR)
    assert time_of(planned(measured, dtype="fp32")).step_seconds > 10
    card, p = speed_of(measured)
    speed = rates(card, "fp32", p)
    work = Pass("x", flops=1e9, moved_bytes=1e9, launches=1000)
    each = 1e9 / (100e9 * p.product) + 1e9 / 10e9 + 1000 * 20e-6
    assert seconds(work, speed, p).seconds == pytest.approx(each)


def test_a_processor_has_what_was_measured_for_any_dtype():
    """A GRPO run's decode asks for bf16, which a processor without it computes as fp32."""
    machine = Machine(vram_bytes=16 * GiB, context_bytes=0, cpu=True, measured=PROCESSOR)
    lengths = {"context": 512, "prompt_length": 128, "completion_length": 384}
    made = planned(machine, task="grpo", framework="vramwise", dtype="fp32", **lengths)
    assert time_of(made).step_seconds > 0
    card, _ = speed_of(machine)
    assert card.ceiling("bf16") == (100e9, True)
