"""Your own code at the run's joints: after a step, an evaluation, a checkpoint; it may ask for any of them.

`train.callbacks: [watch.py:Watch]` imports that file (which runs its code) in the trainer's own process. A callback is
an object, or a class that is made without arguments, with any of the methods of Callback. One that raises ends
the run, with its file and line; the steps done before are saved.
"""

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from planner.errors import UnknownNameError, UsageError, VramwiseError

MAX_ERROR_CHARACTERS = 300


@dataclass(kw_only=True, slots=True)
class Run:
    """What a callback is given: the run as it is, and what it may ask for."""

    output: Path
    train: Any
    """The train section."""
    recipe: Any
    """The recipe, every default filled in."""
    model: Any
    """As PyTorch and PEFT have it."""
    tokenizer: Any
    optimizer: Any
    max_steps: int
    step: int = 0
    """Steps done."""
    can_evaluate: bool = False
    stop_reason: str | None = field(default=None, repr=False)
    wants_save: bool = field(default=False, repr=False)
    wants_evaluation: bool = field(default=False, repr=False)

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this step, saved."""
        self.stop_reason = reason

    def save(self) -> None:
        """Write a checkpoint after this step."""
        self.wants_save = True

    def evaluate(self) -> None:
        """Evaluate after this step."""
        if not self.can_evaluate:
            raise UsageError("there is nothing to evaluate on: name train.validation")
        self.wants_evaluation = True


class Callback(Protocol):
    """Every method may be left out."""

    def on_train_begin(self, run: Run) -> None:
        """Before the first step of this process."""
        ...

    def on_step_end(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """After step number `step` (from 0), with its line of metrics.jsonl."""
        ...

    def on_evaluate(self, run: Run, step: int, figures: dict[str, float]) -> None:
        """After an evaluation, with its line of evaluations.jsonl."""
        ...

    def on_save(self, run: Run, step: int, path: Path) -> None:
        """After a checkpoint was written to `path`."""
        ...

    def on_train_end(self, run: Run) -> None:
        """After the last step, everything saved; not after an error."""
        ...


EVENTS: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("run",),
    "on_step_end": ("run", "step", "metrics"),
    "on_evaluate": ("run", "step", "figures"),
    "on_save": ("run", "step", "path"),
    "on_train_end": ("run",),
}
"""Event -> its arguments, in order."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A callback and the file it is of."""

    callback: Any
    path: Path


class Callbacks:
    """The callbacks of a run, called in their order."""

    def __init__(self, loaded: Sequence[Loaded] = ()) -> None:
        self._loaded = tuple(loaded)
        self.run: Run | None = None
        """Set when the run is ready; nothing is called before."""

    def add(self, callback: Any) -> None:
        """Add one of the trainer's own."""
        self._loaded = (*self._loaded, Loaded(callback, Path(__file__)))

    def __call__(self, event: str, *arguments: Any) -> None:
        """Call the event's method of every callback that has it. Raises VramwiseError for what one raises."""
        for loaded in self._loaded:
            method = getattr(loaded.callback, event, None)
            if method is None or self.run is None:
                continue
            try:
                with contextlib.redirect_stdout(sys.stderr):  # stdout is the verb's answer
                    method(self.run, *arguments)
            except (Exception, SystemExit) as error:
                raise VramwiseError(
                    f"train.callbacks: {said(error, loaded.path)} in {event}",
                    hint="the steps before it are saved: mend it, then vramwise train RUN.yaml --resume"
                    if self.run.step
                    else None,
                ) from None

    @property
    def evaluation_asked(self) -> bool:
        """Whether a callback has asked for an evaluation."""
        return self.run is not None and self.run.wants_evaluation

    def take(self) -> tuple[bool, str | None]:
        """Return what was asked for since the last call: (whether to save, why to stop or None)."""
        if self.run is None:
            return False, None
        asked = (self.run.wants_save, self.run.stop_reason)
        self.run.wants_save = self.run.wants_evaluation = False
        return asked


def load_callbacks(names: Sequence[str], *, root: Path) -> Callbacks:
    """Return the callbacks of a run; files count from `root`. Raises UsageError."""
    modules: dict[Path, Any] = {}
    return Callbacks([_load(name, modules, root=root) for name in names])


def _load(name: str, modules: dict[Path, Any], *, root: Path) -> Loaded:
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute:
        raise UsageError(f"train.callbacks: {name!r} is not allowed", hint="FILE.py:NAME")
    path = (root / Path(file).expanduser()).resolve()
    if not path.is_file():
        raise UsageError(f"train.callbacks: no such file: {path}")
    if path not in modules:
        modules[path] = _module(path)
    found = getattr(modules[path], attribute, None)
    if found is None:
        raise UsageError(f"train.callbacks: {path.name} has no {attribute}")
    if inspect.isclass(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"train.callbacks: {said(error, path)} when {attribute} is made",
                hint="a class is called without arguments",
            ) from None
    _check(found, f"{path.name}:{attribute}")
    return Loaded(found, path)


def _module(path: Path) -> Any:
    name = f"callbacks_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"train.callbacks: {path.name} does not import: {said(error, path)}"
        ) from None
    return module


def _check(callback: Any, name: str) -> None:
    """Raise UsageError for a method that would never be called, or not with what it takes."""
    methods = [each for each in dir(callback) if each.startswith("on_")]
    for method in methods:
        if method not in EVENTS:
            raise UnknownNameError(
                f"event of {name}:", method, EVENTS, hint=f"there are {', '.join(EVENTS)}"
            )
        try:
            inspect.signature(getattr(callback, method)).bind(*EVENTS[method])
        except TypeError as error:
            raise UsageError(
                f"train.callbacks: {name}: {method}: {error}",
                hint=f"it is called as {method}({', '.join(EVENTS[method])})",
            ) from None
    if not methods:
        raise UsageError(
            f"train.callbacks: {name} has none of {', '.join(EVENTS)}", hint="define one"
        )


def said(error: BaseException, path: Path) -> str:
    """Return the error in one line, with the line of `path` that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    where = f" line {lines[-1]}" if lines else ""
    text = error.message if isinstance(error, VramwiseError) else repr(error)
    return f"{path.name}{where}: {' '.join(text.split())[:MAX_ERROR_CHARACTERS]}"
