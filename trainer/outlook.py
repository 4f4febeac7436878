"""The forecast of a run under way (profiler/forecast.py), fed from its own steps and its data still to come."""

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from profiler.forecast import Ahead, Forecast, RunsOut, Step, figures, worth_saying
from trainer.batching import Layout, micro_batches
from trainer.data import Order
from trainer.fake_device import FakeDevice
from trainer.packing import PackedOrder
from trainer.preflight import Preflight
from trainer.say import Say

MOST_STEPS = 20_000
"""Steps whose samples are looked up before they come."""
KINDS = ("allocated", "resident")


class Load(NamedTuple):
    """What a step will run."""

    tokens: float
    """Of all its samples."""
    widest: float
    """Of its largest micro-batch, padding included: what memory follows."""


class Outlook:
    """Says how long a run has still to go, and when and why its memory will run out."""

    def __init__(self, ready: Preflight, *, done: int, loads: Sequence[Load] = ()) -> None:
        self._device = ready.device if isinstance(ready.device, FakeDevice) else None
        self.forecast = Forecast(
            total_steps=ready.train.steps,
            capacity_bytes=_capacity(ready),
            done=done,
        )
        self._fit = ready.fit
        self._first = done
        self._loads = loads
        self._last = time.monotonic()
        self._said: RunsOut | None = None

    def step(self, step: int, metrics: Mapping[str, Any], *, say: Say) -> dict[str, Any]:
        """Take a step's metrics; return what they say of the future, and say what is new."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now  # evaluations and checkpoints included
        place = step - self._first
        load = self._loads[place] if place < len(self._loads) else Load(0, 0)
        rest = self._loads[place + 1 :]
        if rest:
            tokens = sum(each.tokens for each in rest) / len(rest)
            self.forecast.ahead = Ahead(tokens, tuple(each.widest for each in rest), in_order=True)
        self.forecast.add(
            Step(seconds, self._held(metrics), _most(metrics, "reserved"), load.tokens, load.widest)
        )
        if self._fit is not None:
            self._fit.look(self.forecast, say=say)
        left, out = self.forecast.time_left(), self.forecast.runs_out
        if left is not None and left.seconds and worth_saying(self.forecast.seen):
            say(f"forecast: {left.sentence()}")
        if out is not None and (self._said is None or out.growth.kind != self._said.growth.kind):
            say(f"forecast: {out.sentence()}")
            self._said = out
        return figures(self.forecast)

    def _held(self, metrics: Mapping[str, Any]) -> int | None:
        """Return the most that tensors held in a step; on a CPU what the process holds."""
        if self._device is not None:
            return self._device.take_peak()
        return next(filter(None, (_most(metrics, kind) for kind in KINDS)), None)


def _most(metrics: Mapping[str, Any], kind: str) -> int | None:
    found = [
        value
        for name, value in metrics.items()
        if name.startswith("memory/") and name.endswith(f"/{kind}_bytes") and value
    ]
    return max(found, default=None)


def _capacity(ready: Preflight) -> int:
    """Return what the figures of `_held` may reach: of a CPU this process's memory and what is free."""
    if isinstance(ready.device, FakeDevice):
        return ready.device.limit_bytes
    if ready.policy.device.type == "cpu":
        return psutil.Process().memory_info().rss + psutil.virtual_memory().available
    return ready.plan.capacity_bytes


def loads(lengths: Sequence[int], order: Order, ready: Preflight, *, steps: int) -> list[Load]:
    """Return what the next `steps` steps will run; `order` stays where it is. Packed rows: nothing."""
    if isinstance(order, PackedOrder):
        return []
    ahead = copy.deepcopy(order)
    found = []
    for _ in range(min(steps, MOST_STEPS)):
        own = [lengths[index] for index in ahead.take(ready.prompts_per_step)]
        found.append(Load(sum(own), widest(own, ready)))
    return found


def widest(lengths: Sequence[int], ready: Preflight) -> float:
    """Return the tokens of the largest micro-batch of a step over samples of these lengths."""
    picks = micro_batches(
        lengths,
        budget_tokens=max(ready.stepper.budget.tokens, *lengths),
        layout=ready.layout,
        row_tokens=ready.prompt_tokens + ready.completion_tokens,
    )
    own = ([lengths[index] for index in pick] for pick in picks)
    if ready.layout is Layout.SORTED:
        return max(max(each) * len(each) for each in own)
    return max(sum(each) for each in own)
