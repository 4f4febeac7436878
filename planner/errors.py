"""The exception tree and its exit codes.

VramwiseError                exit 1   something failed
  UsageError                 exit 2   the input is wrong: names field, value and what is allowed
    UnknownNameError         exit 2   no such model, GPU or framework; lists near matches
    UnsupportedError         exit 2   understood, but the model cannot express it; says why
  DoesNotFitError            exit 3   only with --check
  NoGpuError                 exit 4   needs a GPU and there is none
  MissingExtraError          exit 5   needs packages of an extra that is not installed
"""

import difflib
import re
from collections.abc import Iterable

LIKE = 0.5
"""Share of letters in common from which a name is near another."""


class VramwiseError(Exception):
    """Anything vramwise reports in one line, with an optional hint line."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(VramwiseError):
    """The input is wrong."""

    exit_code = 2


def near_names(name: str, known: Iterable[str], *, most: int = 4) -> list[str]:
    """Return the known names that are most like one, the likest first: by letters and by whole words."""
    asked, text = set(words_of(name)), name.lower()
    scored = []
    for each in dict.fromkeys(known):
        shared = len(asked & set(words_of(each)))
        ratio = difflib.SequenceMatcher(None, text, each.lower()).ratio()
        if ratio >= LIKE or (shared and ratio >= LIKE / 2):
            scored.append((-ratio - shared / 4, len(each), each))
    return [each for *_, each in sorted(scored)[:most]]


def words_of(name: str) -> list[str]:
    """Return the words of a name: letters, or a number with its unit: "Llama 3.1 8B" -> llama, 3.1, 8b."""
    return re.findall(r"\d+(?:\.\d+)?[a-z]*|[a-z]+", name.lower())


class UnknownNameError(UsageError):
    """A name that is in no catalogue."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        near = near_names(name, known)
        suggestion = f"did you mean {', '.join(near)}?" if near else ""
        super().__init__(
            f"unknown {kind} {name[:80]!r}",
            hint="; ".join(filter(None, (suggestion, hint))) or None,
        )
        self.near = near


class UnsupportedError(UsageError):
    """Understood, but not expressible; the message says why."""


class DoesNotFitError(VramwiseError):
    """The run does not fit (raised only with --check)."""

    exit_code = 3


class NoGpuError(VramwiseError):
    """A GPU is needed and none is there."""

    exit_code = 4


class MissingExtraError(VramwiseError):
    """Packages of an extra are not installed."""

    exit_code = 5

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs packages that are not installed", hint=f'pip install "vramwise[{extra}]"'
        )
