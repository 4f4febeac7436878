"""NVML sessions on file: record every answer of the driver, and replay it anywhere.

A session file is JSON lines, one per call: {"t_s", "call", "arguments", "answer"} or "error" with
NVML's error code. A replayed session has nvidia-ml-py's function table, so that a bug seen on
somebody's MIG or WSL machine can be looked at without one.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

from planner.errors import UsageError
from profiler.nvml import NVML_FUNCTIONS


class RecordedNvml:
    """nvidia-ml-py with every call and answer written to a file."""

    def __init__(self, library: Any, path: Path) -> None:
        self._library = library
        self.NVMLError = library.NVMLError
        self._path = path
        self._file: IO[str] | None = None
        self._handles: dict[int, str] = {}
        self._kept: list[Any] = []

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--record: cannot write {self._path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)  # AttributeError as the library itself would

        def call(*arguments: Any, **options: Any) -> Any:
            line: dict[str, Any] = {"t_s": time.time(), "call": name}
            line["arguments"] = [self._handles.get(id(a), a) for a in arguments] + [
                *options.values()
            ]
            try:
                answer = function(*arguments, **options)
            except self.NVMLError as error:
                self._write({**line, "error": error.value})
                raise
            self._write({**line, "answer": self._plain(name, line["arguments"], answer)})
            return answer

        return call

    def _plain(self, name: str, arguments: list[Any], answer: Any) -> Any:
        """Return `answer` as JSON; a handle becomes a name that later calls use."""
        if "Handle" in name:
            label = "/".join([*map(str, arguments)])
            self._handles[id(answer)] = label
            self._kept.append(answer)  # its id must stay its own
            return {"handle": label}
        if isinstance(answer, list):
            return [self._plain(name, arguments, item) for item in answer]
        if isinstance(answer, bytes):
            return answer.decode(errors="replace")
        if hasattr(answer, "_fields_"):
            return {field[0]: getattr(answer, field[0]) for field in answer._fields_}
        return vars(answer) if hasattr(answer, "__dict__") else answer

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class ReplayedNvml:
    """A recorded session behind nvidia-ml-py's function table.

    Equal calls get the recorded answers in order; the last one stays for all calls after it. A
    call that was never recorded raises FunctionNotFound, as an old driver does.
    """

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        import pynvml

        self._pynvml = pynvml
        self.NVMLError = pynvml.NVMLError
        self._answers: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            key = _key(line["call"], line.get("arguments", []))
            self._answers.setdefault(key, []).append(line)

    @classmethod
    def load(cls, path: Path) -> "ReplayedNvml":
        """Read a session file; raises UsageError naming the line that is wrong."""
        lines = []
        try:
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                line = json.loads(text)
                if not isinstance(line, dict) or line.get("call") not in NVML_FUNCTIONS:
                    raise UsageError(
                        f"--replay: line {number} of {path} is not a recorded NVML call"
                    )
                lines.append(line)
        except OSError as error:
            raise UsageError(f"--replay: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"--replay: {path} is not a recorded session: {error}") from None
        return cls(lines)

    def __getattr__(self, name: str) -> Any:
        if name not in NVML_FUNCTIONS:
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            recorded = self._answers.get(_key(name, [*arguments, *options.values()]))
            if not recorded:
                if name in ("nvmlInit", "nvmlShutdown"):
                    return None
                raise self.NVMLError(self._pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            line = recorded.pop(0) if len(recorded) > 1 else recorded[0]
            if "error" in line:
                raise self.NVMLError(line["error"])
            return _answer(name, line["answer"])

        return call


def _key(name: str, arguments: list[Any]) -> str:
    return json.dumps([name, arguments])


def _answer(name: str, value: Any) -> Any:
    """Rebuild what nvidia-ml-py returns: structures, handles (their name), lists, numbers."""
    if isinstance(value, dict):
        return value["handle"] if "handle" in value else SimpleNamespace(**value)
    if isinstance(value, list) and name.endswith(("Processes", "_v2")):
        return [_answer(name, item) for item in value]
    return value
