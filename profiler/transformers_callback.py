"""A TrainerCallback that plans the run it watches: for the HF Trainer and everything in TRL.

    trainer = GRPOTrainer(..., callbacks=[VramwiseCallback()])
    trainer.train()

At the start it derives the Recipe from the live model, arguments and optimizer and prints the
plan; meanwhile it records phases, and says how long the run has still to go and when and why its memory
will run out; at the end it prints planned beside measured, for the shapes that really ran, and what
would save most.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from planner.answers.advise import levers
from planner.errors import VramwiseError
from planner.machines.machine import Machine, make_machine
from planner.plan import Plan, plan
from planner.report import text as plan_text
from planner.run.recipe import Recipe
from planner.units import GiB, format_bytes
from profiler.calibration import this_machine
from profiler.compare import Comparison, compare, to_text
from profiler.explain import as_measured, as_planned, explain
from profiler.forecast import Ahead, Forecast, RunsOut, Step, worth_saying
from profiler.live_recipe import Shapes, longest_in_data, model_spec, recipe_of
from profiler.recording import Recording
from profiler.torch_recorder import LiveRecording


class VramwiseCallback(TrainerCallback):
    """Plans, records, forecasts and compares; `plan`, `recipe`, `forecast`, `recording` and `comparison` hold the result.

    `out` is a folder for recording.json and report.html; `machine` overrides the GPU found here;
    `follow` is as for `profiler.torch_recorder.record`. Nothing that goes wrong in here stops the
    training: it is printed, once.
    """

    def __init__(
        self,
        out: Path | str | None = None,
        *,
        machine: Machine | None = None,
        follow: bool | None = None,
        quiet: bool = False,
    ) -> None:
        self.out = None if out is None else Path(out)
        self.machine = machine
        self.follow = follow
        self.quiet = quiet
        self.plan: Plan | None = None
        self.recipe: Recipe | None = None
        self.recording: Recording | None = None
        self.comparison: Comparison | None = None
        self.forecast: Forecast | None = None
        self._live: LiveRecording | None = None
        self._shapes = Shapes()
        self._hooks: list[Any] = []
        self._told: RunsOut | None = None
        self._step_started_s = 0.0
        self._tokens = self._widest = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the plan and start recording."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        self._subject = (
            f"{'trl-' if 'trl' in type(args).__module__ else 'hf-'}{type(args).__name__}"
        )
        expected = longest_in_data(
            args, kwargs.get("train_dataloader"), kwargs.get("processing_class")
        )
        self._make_plan(model, args, optimizer, expected)
        if self.plan is not None:
            self._say(plan_text(self.plan))
        follow = not torch.cuda.is_available() if self.follow is None else self.follow
        self._live = LiveRecording(model, _inner(optimizer), subject=self._subject, follow=follow)
        self._watch_shapes(model)
        self._live.start()
        self._start_forecast(args, state, expected)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what the steps so far say of those to come."""
        if self._live is None or self.forecast is None:
            return
        now = time.monotonic()
        seconds, self._step_started_s = now - self._step_started_s, now
        tokens, widest, self._tokens, self._widest = self._tokens, self._widest, 0, 0
        forecast, before = self.forecast, self._told
        forecast.add(Step(seconds, *self._live.take_peak(), tokens, widest))
        left, out = forecast.time_left(), forecast.runs_out
        if left is not None and left.seconds and worth_saying(forecast.seen):
            self._say(f"forecast: {left.sentence()}")
        if out is not None and (before is None or out.growth.kind != before.growth.kind):
            self._say(f"forecast: {out.sentence()}")
            self._told = out

    def _start_forecast(self, args: Any, state: Any, expected: Shapes) -> None:
        """Follow the run from here; of the data to come what its first rows say, where they can be looked up."""
        total = int(getattr(state, "max_steps", 0) or 0)
        self.forecast = Forecast(
            total_steps=total if total > 0 else None,
            capacity_bytes=self.plan.capacity_bytes if self.plan is not None else None,
            done=int(getattr(state, "global_step", 0) or 0),
        )
        rows = int(getattr(args, "per_device_train_batch_size", 1))
        lengths = expected.lengths
        batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
        self.forecast.ahead = Ahead(longest=tuple(float(rows * max(each)) for each in batches))
        self._step_started_s = time.monotonic()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print planned | measured and the settings that would save most."""
        if self._live is None:
            return
        live, self._live = self._live, None
        live.stop()
        for hook in self._hooks:
            hook.remove()
        self.recording = live.recording
        if self._shapes.seen:  # what was planned is what ran, not what could have come
            self._make_plan(kwargs["model"], args, kwargs.get("optimizer"), self._shapes)
        self._report(kwargs["model"])
        self._save()

    def _make_plan(self, model: Any, args: Any, optimizer: Any, shapes: Shapes) -> None:
        try:
            spec = model_spec(model)
            self.recipe = recipe_of(model, args, optimizer, shapes)
            self.machine = self.machine or _machine_here(args)
            self.plan = plan(spec, self.recipe, self.machine)
        except VramwiseError as error:
            self.plan = None
            self._say(f"no plan: {error.message}")

    def _report(self, model: Any) -> None:
        assert self.recording is not None
        if self.plan is None or self.recipe is None or self.machine is None:
            self._say(f"measured peak {format_bytes(self.recording.peak_bytes)}")
            return
        planned = as_measured(self.plan, self.recording)
        measured = as_planned(self.recording)
        self.comparison = compare(planned, measured)
        self._say(to_text(self.comparison))
        self._say("\n".join(explain(self.comparison, planned, measured)))
        found = levers(model_spec(model), self.recipe, self.machine, self.plan)
        for advice in [each for each in found if not each.change.changes_objective][:3]:
            saved = format_bytes(advice.saved_bytes)
            self._say(f"suggestion: {advice.change.name} saves {saved} ({advice.change.price})")

    def _save(self) -> None:
        if self.out is None or self.recording is None:
            return
        from profiler.report import page

        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.recording.save(self.out / "recording.json")
            (self.out / "report.html").write_text(page(self.recording), encoding="utf-8")
        except (OSError, ImportError) as error:
            self._say(f"recording not saved to {self.out}: {error}")

    def _watch_shapes(self, model: Any) -> None:
        """Note rows and tokens of every pass at the embedding, which every pass goes through."""

        def note(module: Any, inputs: tuple[Any, ...]) -> None:
            live = self._live
            if live is None or not inputs or getattr(inputs[0], "dim", int)() != 2:
                return
            rows, tokens = inputs[0].shape
            shapes, phase = self._shapes, live.phases.phase
            if phase == "rollout":
                shapes.prompt = max(shapes.prompt or 0, tokens)
            elif phase in ("forward", "loss"):
                shapes.seen = True
                self._tokens += rows * tokens
                self._widest = max(self._widest, rows * tokens)
                # rows x tokens decides, not the longest row alone
                if rows * tokens > (shapes.rows or 0) * (shapes.context or 0):
                    shapes.rows, shapes.context = rows, tokens

        self._hooks.append(model.get_input_embeddings().register_forward_pre_hook(note))

    def _say(self, message: str) -> None:
        if not self.quiet:
            print("\n".join(f"vramwise | {line}" for line in message.splitlines()), file=sys.stderr)


def _inner(optimizer: Any) -> Any:
    """Return the optimizer under Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _machine_here(args: Any) -> Machine:
    """Return this machine; without a GPU one of 24 GiB, so that there is something to plan for."""
    found = this_machine(num_gpus=max(1, int(getattr(args, "world_size", 1))))
    return found or make_machine(vram=24 * GiB)
