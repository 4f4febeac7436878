"""A TrainerCallback that plans the run it watches: for the HF Trainer and everything in TRL.

    trainer = GRPOTrainer(..., callbacks=[VramwiseCallback()])
    trainer.train()

At the start it derives the Recipe from the live model, arguments and optimizer and prints the
plan; meanwhile it records phases; at the end it prints planned beside measured, for the shapes
that really ran, and what would save most.
"""

import sys
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
from profiler.live_recipe import Shapes, longest_in_data, model_spec, recipe_of
from profiler.recording import Recording
from profiler.torch_recorder import LiveRecording


class VramwiseCallback(TrainerCallback):
    """Plans, records and compares; `plan`, `recipe`, `recording` and `comparison` hold the result.

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
        self._live: LiveRecording | None = None
        self._shapes = Shapes()
        self._hooks: list[Any] = []

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
