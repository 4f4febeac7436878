"""The process that reward functions run in: it can be killed, and what it prints goes into a pipe.

Messages, pickled, over one socket: the parent sends the functions (a list of Spec), the worker answers
Loaded or Refused; then any number of Call, each answered once by Done or Failed, in any order. Async functions
share one event loop for the worker's life, in a thread; the others run one after the other in the main
thread, where signal handlers may be set.
"""

import asyncio
import importlib.util
import inspect
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from planner.errors import UnknownNameError, UsageError, VramwiseError
from trainer.reward_functions import BUILT_IN, RewardFunction

Values = list[float | None]
MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A reward function by name: built in, or of a file."""

    name: str
    path: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The functions are there; which of them are async."""

    is_async: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A function cannot be had: an error of planner.errors, by its parts."""

    kind: str
    message: str
    hint: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of function number `function` on `count` completions."""

    number: int
    function: int
    count: int
    arguments: dict[str, list[Any]]
    state: dict[str, Any]
    """What the function sees as trainer_state."""
    limit_s: float
    """After this long an async function is cancelled; any other is killed with its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a call returned, and what it logged."""

    number: int
    values: Values
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A call that raised, or that returned no list of numbers."""

    number: int
    error: str
    is_shape: bool = False
    """The function will never do: it returns the wrong number of values, or no numbers."""


class ShapeError(ValueError):
    """A reward function returned something else than one number a completion."""


def main(descriptor: int) -> None:
    """Serve the calls that come over the socket `descriptor` until it closes."""
    _die_with_the_parent()
    # Ctrl-C is for the trainer, which ends this process when it is done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = Connection(descriptor)
    specs: list[Spec] = channel.recv()
    try:
        functions = [load(spec) for spec in specs]
    except VramwiseError as error:
        channel.send(Refused(kind=type(error).__name__, message=error.message, hint=error.hint))
        return
    channel.send(Loaded(is_async=tuple(inspect.iscoroutinefunction(each) for each in functions)))
    _serve(channel, specs, functions)


def load(spec: Spec) -> RewardFunction:
    """Return the function; running a file's code if it is of one. Raises UsageError."""
    if spec.path is None:
        make = BUILT_IN[spec.name]
        try:
            return make(**spec.options)
        except TypeError as error:
            raise _bad_options(spec, error, inspect.signature(make)) from None
    function = _from_file(spec.path, spec.name)
    if not spec.options:
        return function
    try:
        inspect.signature(function).bind_partial(**spec.options)
    except TypeError as error:
        raise _bad_options(spec, error, inspect.signature(function)) from None
    if inspect.iscoroutinefunction(function):

        async def awaited(**arguments: Any) -> Any:
            return await function(**_accepted(function, arguments), **spec.options)

        return awaited
    return lambda **arguments: function(**_accepted(function, arguments), **spec.options)


def _bad_options(spec: Spec, error: TypeError, signature: inspect.Signature) -> UsageError:
    return UsageError(
        f"train.rewards.{spec.name}.options: {error.args[0]}",
        hint=f"allowed: {', '.join(signature.parameters) or 'none'}",
    )


def _from_file(path: Path, name: str) -> RewardFunction:
    module_name = f"reward_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None
    assert found.loader is not None
    if (module := sys.modules.get(module_name)) is None:
        module = sys.modules[module_name] = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(module)
        except BaseException as error:  # whatever the user's file raises on import, SystemExit too
            raise UsageError(
                f"train.rewards: {path.name} does not import: {_said(error, path)}"
            ) from None
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function in {path.name}", name, defined)
    return function


def _serve(channel: Connection, specs: list[Spec], functions: list[RewardFunction]) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    sending = threading.Lock()

    def answer(message: Done | Failed) -> None:
        sys.stdout.flush()
        with sending:
            try:
                channel.send(message)
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # of log_extra
                channel.send(Failed(number=message.number, error=f"log_extra: {error!r}"))

    while True:
        try:
            call: Call = channel.recv()
        except EOFError:
            return
        spec, function = specs[call.function], functions[call.function]
        if inspect.iscoroutinefunction(function):
            asyncio.run_coroutine_threadsafe(_call_async(call, spec, function, answer), loop)
            continue
        notes = Notes()
        message: Done | Failed
        try:
            result = function(**_accepted(function, notes.arguments(call)))
            if inspect.isawaitable(result):
                waiting = asyncio.run_coroutine_threadsafe(_awaited(result), loop)
                result = waiting.result()
            message = notes.done(call, checked(result, call.count, name=spec.name))
        except BaseException as error:  # a user's code may raise anything
            message = _failure(call, spec, error)
        answer(message)


async def _call_async(
    call: Call, spec: Spec, function: RewardFunction, answer: Callable[[Any], None]
) -> None:
    notes = Notes()
    message: Done | Failed
    try:
        working = function(**_accepted(function, notes.arguments(call)))
        result = await asyncio.wait_for(working, timeout=call.limit_s)
        message = notes.done(call, checked(result, call.count, name=spec.name))
    except TimeoutError:
        message = Failed(number=call.number, error=f"no answer within {call.limit_s:g} s")
    except BaseException as error:  # as above
        message = _failure(call, spec, error)
    answer(message)


async def _awaited(result: Any) -> Any:
    return await result


class Notes:
    """What a function logs while it works, through TRL's log_extra and log_metric."""

    def __init__(self) -> None:
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the keyword arguments of `call`, with the three that are not columns."""
        return {
            **call.arguments,
            "trainer_state": SimpleNamespace(**call.state),
            "log_extra": lambda column, values: self._extra.setdefault(column, []).extend(values),
            "log_metric": lambda name, value: self._metrics.setdefault(name, []).append(
                float(value)
            ),
        }

    def done(self, call: Call, values: Values) -> Done:
        """Return the answer; a column of another length than the completions is left out."""
        extra = {key: value for key, value in self._extra.items() if len(value) == call.count}
        return Done(number=call.number, values=values, extra=extra, metrics=self._metrics)


def checked(result: Any, count: int, *, name: str) -> Values:
    """Return `result` as one number or None a completion; raises ShapeError."""
    if isinstance(result, str | bytes | Mapping | set) or not isinstance(result, Iterable):
        raise ShapeError(
            f"{name} returned {_short(result)} for {count} completions, not a list of {count} numbers"
        )
    values = list(result)
    if len(values) != count:
        raise ShapeError(
            f"{name} returned {len(values)} value{'s' * (len(values) != 1)} for {count} "
            f"completion{'s' * (count != 1)}"
        )
    for value in values:
        is_number = hasattr(value, "__float__") and not getattr(value, "shape", ())
        if value is not None and not is_number:
            raise ShapeError(f"{name} returned {_short(value)} among its values, not a number")
    return [None if value is None else float(value) for value in values]


def _accepted(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that `function` takes: all of them unless it names each."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return arguments
    return {key: value for key, value in arguments.items() if key in parameters}


def _failure(call: Call, spec: Spec, error: BaseException) -> Failed:
    traceback.print_exc()
    is_shape = isinstance(error, ShapeError)
    said = str(error) if is_shape else _said(error, spec.path)
    return Failed(number=call.number, error=said, is_shape=is_shape)


def _said(error: BaseException, path: Path | None) -> str:
    """Return the error in one line, with the line of the user's file that raised it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and Path(frame.filename) == path
    ]
    where = f" ({path.name} line {lines[-1]})" if lines and path is not None else ""
    return " ".join(repr(error).split())[:MAX_ERROR_CHARACTERS] + where


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return " ".join(text.split())[:80]


def _die_with_the_parent() -> None:
    """Be killed when the trainer is, even in the middle of a long computation (Linux)."""
    if sys.platform == "linux":
        import ctypes

        parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
