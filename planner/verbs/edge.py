"""The edge of a command line: whatever a command raises becomes one line, a hint and an exit code."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from planner.errors import VramwiseError

SCHEMA_VERSION = 1


def at_the_edge(work: Callable[[], Any], *, as_json: bool, help_line: str) -> int:
    """Return the exit code of `work()`; every failure is one line and a hint.

    `help_line` is the hint of a command line that cannot be read. VRAMWISE_DEBUG shows tracebacks.
    """
    try:
        code = work()
        return code if isinstance(code, int) else 0
    except VramwiseError as error:
        return fail(error.message, error.hint, error.exit_code, as_json=as_json)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split()) or "no command given"
        return fail(message, help_line, error.exit_code, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted", None, 130, as_json=as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the edge of the program: a user never sees a traceback
        if os.environ.get("VRAMWISE_DEBUG"):
            raise
        return fail(
            in_one_line(error),
            "this is a bug or a broken installation; VRAMWISE_DEBUG=1 shows where",
            1,
            as_json=as_json,
        )


def in_one_line(error: BaseException) -> str:
    """Return an unexpected error's kind and words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def fail(message: str, hint: str | None, code: int, *, as_json: bool) -> int:
    """Print one failure: JSON to stdout when asked for, always a line to stderr."""
    if as_json:
        document = {"code": code, "message": message, "hint": hint}
        print(json.dumps({"schema_version": SCHEMA_VERSION, "error": document}))
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return code
