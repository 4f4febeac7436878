"""The forecast on replayed runs: leaks, long samples, fragmentation, and steady ones that must stay silent."""

import math
import random
from collections.abc import Iterator

import pytest

from planner.units import GiB, MiB
from profiler.forecast import (
    Ahead,
    Forecast,
    RunsOut,
    Step,
    figures,
    surprise,
    worth_saying,
)
from profiler.live import LiveSteps

NOISE_KINDS = (
    "even",
    "noise",
    "neighbours",
    "lengths",
    "hidden lengths",
    "spikes",
    "jump",
    "warm-up",
)


def followed(steps, *, total, capacity, ahead=None) -> tuple[Forecast, list[tuple[int, RunsOut]]]:
    forecast = Forecast(total_steps=total, capacity_bytes=int(capacity * GiB))
    forecast.ahead = ahead or forecast.ahead
    said = []
    for step in steps:
        forecast.add(step)
        if forecast.runs_out is not None:
            said.append((forecast.done, forecast.runs_out))
    return forecast, said


def held(gib: float, reserved: float | None = None, length: float = 0, seconds: float = 1) -> Step:
    pool = None if reserved is None else int(reserved * GiB)
    return Step(seconds, int(gib * GiB), pool, 0, length)


def steady(kind: str, draw: random.Random, count: int) -> Iterator[Step]:
    """A run of 80 GiB that never runs out: its pool grows ever less, as pools do."""
    pool = last = 0.0
    jump = draw.random() * count
    for number in range(count):
        noise = draw.gauss(0, 1)
        length = min(4096.0, draw.lognormvariate(6.5, 0.6))
        last = 0.7 * last + noise
        gib = {
            "even": 60,
            "noise": 60 + 0.5 * noise,
            "neighbours": 60 + 0.5 * last,
            "lengths": 40 + length * 25 / 4096,
            "hidden lengths": 40 + length * 25 / 4096,
            "spikes": 60 + 6 * (number % 10 == 9) + 0.2 * noise,
            "jump": 60 + 6 * (number > jump) + 0.3 * noise,
            "warm-up": 60 - 8 * (number == 0) + 0.1 * noise,
        }[kind]
        filling = 75 - 8 * math.exp(-20 * number / count) if kind == "warm-up" else 0
        pool = max(pool, gib + 1 + 0.5 * abs(draw.gauss(0, 1)), filling)
        if draw.random() < 1 / (1 + number / 5):
            pool += 0.3
        pool = min(pool, 79)
        yield held(gib, pool, length if kind == "lengths" else 0)


def test_steady_runs_are_left_alone() -> None:
    """At most one alarm in a hundred runs, looked at from their first step to their last."""
    draw = random.Random(0)
    runs = alarms = 0
    for kind in NOISE_KINDS:
        for _ in range(40):
            count = draw.choice((30, 60, 100))
            ahead = Ahead(longest=(4096.0, *[1000.0] * 50))
            _, said = followed(
                steady(kind, draw, count), total=10 * count, capacity=80, ahead=ahead
            )
            runs, alarms = runs + 1, alarms + bool(said)
    assert runs == 320
    assert alarms <= runs / 100


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
def test_a_leak_is_told_with_its_size_and_its_step(noise: float) -> None:
    draw = random.Random(1)
    steps = [held(42 + 0.2 * n + noise * draw.gauss(0, 1)) for n in range(150)]
    _, said = followed(steps, total=1000, capacity=80)
    first, told = said[0]
    assert first < 0.8 * (80 - 42) / 0.2
    assert told.growth.kind == "leak"
    assert told.growth.per_step_bytes == pytest.approx(0.2 * GiB, rel=0.25)
    assert told.step == pytest.approx((80 - 42) / 0.2, rel=0.2)
    assert said[-1][1].step == pytest.approx((80 - 42) / 0.2, rel=0.1)
    assert "growth of" in told.sentence()


def test_a_leak_that_the_run_does_not_live_to_see_is_none() -> None:
    _, said = followed([held(42 + 0.2 * n) for n in range(150)], total=180, capacity=80)
    assert not said


def test_a_leak_under_samples_of_all_lengths_is_a_leak() -> None:
    draw = random.Random(2)
    lengths = [min(4096.0, draw.lognormvariate(6.5, 0.6)) for _ in range(200)]
    steps = [held(30 + 0.1 * n + 0.004 * at, None, at) for n, at in enumerate(lengths)]
    _, said = followed(steps, total=1000, capacity=80)
    assert {told.growth.kind for _, told in said} == {"leak"}
    assert said[-1][1].growth.per_step_bytes == pytest.approx(0.1 * GiB, rel=0.05)


def test_long_samples_to_come_are_told_with_their_step() -> None:
    draw = random.Random(3)
    lengths = [min(3000.0, draw.lognormvariate(6.5, 0.5)) for _ in range(400)]
    lengths[250] = 4000.0
    steps = [held(40 + 0.01 * at, None, at) for at in lengths]
    forecast = Forecast(total_steps=400, capacity_bytes=int(75 * GiB))
    for number, step in enumerate(steps[:100]):
        forecast.ahead = Ahead(longest=tuple(lengths[number + 1 :]), in_order=True)
        forecast.add(step)
    told = forecast.runs_out
    assert told is not None
    assert told.step == 251
    assert told.growth.kind == "length"
    assert told.growth.last_bytes == pytest.approx(80 * GiB, rel=0.01)
    assert "long samples" in told.sentence()
    # of a card that holds the longest one nothing is said
    assert not followed(steps, total=400, capacity=85, ahead=Ahead(longest=(4000.0,)))[1]


def test_of_lengths_in_no_order_the_expected_step_is_told() -> None:
    steps = [held(40 + 0.01 * at, None, at) for at in (500.0, 900.0, 700.0, 1200.0) * 5]
    ahead = Ahead(longest=(4000.0, *[600.0] * 49))
    forecast, _ = followed(steps, total=400, capacity=75, ahead=ahead)
    assert forecast.runs_out is not None
    assert forecast.runs_out.step == 20 + 50


def test_a_reserve_that_no_tensor_needs_is_fragmentation() -> None:
    draw = random.Random(4)
    steps = [
        held(30 + 0.3 * draw.gauss(0, 1), 40 + 0.2 * n + 0.1 * draw.random()) for n in range(120)
    ]
    _, said = followed(steps, total=1000, capacity=80)
    assert {told.growth.kind for _, told in said} == {"reserve"}
    assert said[-1][1].step == pytest.approx((80 - 40) / 0.2, rel=0.1)
    assert "fragmentation" in said[-1][1].sentence()


# figures that people printed; between them, where only the ends are known, a straight line with noise
PUBLIC_LEAKS = {
    # GiB at the start, at the end, steps between, noise
    "axolotl-ai-cloud/axolotl#3638, qlora-control": (24, 260, 293, 0.3),
    "axolotl-ai-cloud/axolotl#3610, 0.47 GiB a step": (42, 42 + 0.47 * 73, 73, 1.0),
    "unslothai/unsloth#2470": (36, 39.9, 650, 0.2),
    "NVIDIA-NeMo/RL#2619, left after sleep": (4, 25, 100, 0.3),
}
PUBLIC_STEADY = {
    "axolotl-ai-cloud/axolotl#3638, qlora-no-actoffload": [24 * 1024] * 300,
    "pytorch/pytorch#1509, without cuDNN": [2934, 4413, 4433, 4537, 4537, 4537],
    "pytorch/pytorch#1509, with cuDNN": [1686, 1791, 1791, 1791, 1791, 1791],
    "open-mmlab/mmdetection#1956": [6814] * 60,
}


@pytest.mark.parametrize("name", PUBLIC_LEAKS)
def test_public_leaks_are_told_before_they_end_the_run(name: str) -> None:
    start, end, count, noise = PUBLIC_LEAKS[name]
    draw = random.Random(name)
    steps = [
        held(start + (end - start) * n / count + noise * draw.gauss(0, 1)) for n in range(count)
    ]
    _, said = followed(steps, total=10 * count, capacity=end)
    assert said
    first, told = said[0]
    assert first < 0.9 * count
    assert told.growth.kind == "leak"
    assert said[-1][1].step == pytest.approx(count, rel=0.1)


def test_three_steps_are_enough_for_twenty_gigabytes_a_step() -> None:
    """unslothai/unsloth#3512: 47 -> 67 -> 87 GB."""
    _, said = followed([held(gib) for gib in (47, 67, 87)], total=100, capacity=95)
    ((done, told),) = said
    assert (done, told.step, told.growth.per_step_bytes) == (3, 4, 20 * GiB)


@pytest.mark.parametrize("name", PUBLIC_STEADY)
def test_public_runs_that_only_warm_up_are_left_alone(name: str) -> None:
    steps = [Step(1.0, size * MiB, size * MiB) for size in PUBLIC_STEADY[name]]
    top = max(PUBLIC_STEADY[name])
    assert not followed(steps, total=10_000, capacity=1.05 * top / 1024)[1]


def test_the_time_left_holds_what_the_run_then_takes() -> None:
    draw = random.Random(5)
    inside = 0
    for _ in range(60):
        seconds = [5.0] + [draw.lognormvariate(0, 0.2) for _ in range(199)]
        forecast = Forecast(total_steps=200)
        for each in seconds[:40]:
            forecast.add(Step(each))
        left = forecast.time_left()
        assert left is not None
        assert left.low <= left.seconds <= left.high
        inside += left.low <= sum(seconds[40:]) <= left.high
    assert 50 <= inside <= 60  # of the 90% that it says, within chance


def test_longer_samples_to_come_take_longer() -> None:
    draw = random.Random(6)
    tokens = [draw.uniform(1000, 2000) for _ in range(40)]
    forecast = Forecast(total_steps=140)
    for each in tokens:
        forecast.add(Step(0.2 + each / 1000, tokens=each))
    alike = forecast.time_left()
    forecast.ahead = Ahead(tokens=3000)
    longer = forecast.time_left()
    assert alike is not None
    assert longer is not None
    assert alike.seconds == pytest.approx(100 * 1.7, rel=0.05)
    assert longer.seconds == pytest.approx(100 * 3.2, rel=0.01)


def test_the_first_step_is_no_measure_of_the_others() -> None:
    forecast = Forecast(total_steps=12)
    for seconds in (60.0, 1.0, 1.0):
        forecast.add(Step(seconds))
    assert figures(forecast) == {
        "forecast/seconds_left": 9.0,
        "forecast/seconds_left/low": 9.0,
        "forecast/seconds_left/high": 9.0,
    }


def test_a_resumed_run_has_only_the_rest_before_it() -> None:
    forecast = Forecast(total_steps=100, done=90)
    forecast.add(Step(2.0))
    left = forecast.time_left()
    assert left is not None
    assert left.seconds == 18.0


def test_a_long_run_is_kept_in_bounded_memory_with_its_steps_right() -> None:
    steps = [held(20 + 0.002 * n) for n in range(5000)]
    forecast, said = followed(steps, total=100_000, capacity=80)
    assert len(forecast.points) <= 513
    assert said[-1][1].step == pytest.approx(60 / 0.002, rel=0.01)


def test_when_it_is_told_and_how_sure_it_is() -> None:
    assert [n for n in range(1, 400) if worth_saying(n)] == [3, 10, 30, 100, 300]
    # t of 2.228 at 10 degrees of freedom is 1.96 of a normal deviate: 5% of both sides
    share = 2.228**2 / (2.228**2 + 10)
    assert surprise(share, 12) == pytest.approx(1.96, abs=0.02)


def test_the_live_line_of_a_recorded_run_tells_a_leak() -> None:
    """Ten samples a second of a run whose steps take half of one and leave 0.5 GiB each."""
    live = LiveSteps(80 * GiB)
    said = []
    for tick in range(300):
        step = tick // 5
        held_now = int((30 + 0.5 * step + 5 * (tick % 5 == 2)) * GiB)
        said.append(live.feed({"e": "s", "step": step, "a": held_now, "r": held_now}, tick / 10))
    assert said[0] == ""
    assert live.forecast.done == 59
    assert said[-1].startswith("will run out of 80.00 GiB at about step 9")
    assert live.forecast.runs_out.growth.per_step_bytes == pytest.approx(GiB / 2, rel=0.01)
    assert live.forecast.step_seconds().seconds == pytest.approx(0.5)
    assert LiveSteps(None).feed({}, 0.0) == ""
