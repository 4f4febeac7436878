"""Name patterns of quantisation configs, matched in time linear in the name.

The lists come from files that anyone may have written, so Python's backtracking engine sees only
those with at most two repeats of single characters, which cost it the square of a name at most; any
other pattern is parsed by `re`'s own parser and run as a set of states.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from planner.errors import UsageError

MAX_LENGTH = 400
MAX_STATES = 4000
MAX_PATTERNS = 8192
BACKTRACKED = 2
"""Repeats of a pattern that Python's own engine may run."""
_PLAIN = re.compile(r"[\w./-]*")
Test = Callable[[str], bool]
_UNLIMITED = _parser.MAXREPEAT


def pattern_error(text: str) -> UsageError:
    """Return the error for a pattern that cannot be read."""
    return UsageError(
        f"quantization_config: cannot read the pattern {text[:60]!r}",
        hint="names, or regular expressions without back references",
    )


class _Program:
    """A pattern as states: ("char", test), ("split", a, b), ("at", end), ("look", program, wanted)."""

    def __init__(self, text: str) -> None:
        self.text, self.states = text, list[tuple[Any, ...]]()
        self.repeats, self.plain = 0, True
        """Repeats so far; each of one character, and nothing looks ahead."""
        try:
            tree = _parser.parse(text)
        except (re.error, RecursionError, OverflowError):
            raise pattern_error(text) from None
        if tree.state.flags & ~re.UNICODE:
            raise pattern_error(text)
        self._sequence(tree)
        self.states.append(("done",))

    def _add(self, *state: Any) -> int:
        if len(self.states) >= MAX_STATES:
            raise pattern_error(self.text)
        self.states.append(state)
        return len(self.states) - 1

    def _sequence(self, items: Any) -> None:
        for kind, value in items:
            self._item(str(kind), value)

    def _item(self, kind: str, value: Any) -> None:
        if kind == "LITERAL":
            self._add("char", chr(value).__eq__)
        elif kind == "NOT_LITERAL":
            self._add("char", chr(value).__ne__)
        elif kind == "ANY":
            self._add("char", lambda char: char != "\n")
        elif kind == "IN":
            self._add("char", _one_of(self.text, value))
        elif kind == "SUBPATTERN" and not value[1] and not value[2]:
            self._sequence(value[3])
        elif kind == "BRANCH":
            self._branch(value[1])
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            self._repeat(*value)
        elif kind == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            self._add("at", False)
        elif kind == "AT" and str(value) in ("AT_END", "AT_END_STRING"):
            self._add("at", True)
        elif kind in ("ASSERT", "ASSERT_NOT") and value[0] == 1:
            inner = _Program.__new__(_Program)
            inner.text, inner.states = self.text, []
            inner.repeats, inner.plain = 0, True
            self.plain = False
            inner._sequence(value[1])
            inner.states.append(("done",))
            self._add("look", inner, kind == "ASSERT")
        else:
            raise pattern_error(self.text)

    def _branch(self, choices: Any) -> None:
        ends = []
        for choice in choices[:-1]:
            split = self._add("split", 0, 0)
            self._sequence(choice)
            ends.append(self._add("jump", 0))
            self.states[split] = ("split", split + 1, len(self.states))
        self._sequence(choices[-1])
        for end in ends:
            self.states[end] = ("jump", len(self.states))

    @property
    def safe(self) -> bool:
        """Backtracking over it is at worst quadratic."""
        return self.plain and self.repeats <= BACKTRACKED

    def _repeat(self, least: int, most: int, items: Any) -> None:
        self.repeats += 1
        single = len(items) == 1 and str(items[0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN")
        self.plain = self.plain and single
        for _ in range(least):
            self._sequence(items)
        if most == _UNLIMITED:
            split = self._add("split", 0, 0)
            self._sequence(items)
            self._add("jump", split)
            self.states[split] = ("split", split + 1, len(self.states))
            return
        splits = []
        for _ in range(most - least):
            splits.append(self._add("split", 0, 0))
            self._sequence(items)
        for split in splits:
            self.states[split] = ("split", split + 1, len(self.states))

    def match(self, name: str, start: int = 0) -> bool:
        """Say what `re.match` says of the name from `start` on: does the pattern fit a beginning?"""
        todo, seen = [(0, start)], {(0, start)}
        while todo:
            state, position = todo.pop()
            kind, *rest = self.states[state]
            if kind == "done":
                return True
            following: tuple[tuple[int, int], ...] = ()
            if kind == "char":
                if position < len(name) and rest[0](name[position]):
                    following = ((state + 1, position + 1),)
            elif kind == "split":
                following = ((rest[0], position), (rest[1], position))
            elif kind == "jump":
                following = ((rest[0], position),)
            elif kind == "at":
                if position == (len(name) if rest[0] else 0):
                    following = ((state + 1, position),)
            elif rest[0].match(name, position) is rest[1]:
                following = ((state + 1, position),)
            for step in following:
                if step not in seen:
                    seen.add(step)
                    todo.append(step)
        return False


def _one_of(text: str, items: Any) -> Test:
    negate, tests = False, list[Test]()
    for kind, value in items:
        word = str(kind)
        if word == "NEGATE":
            negate = True
        elif word == "LITERAL":
            tests.append(chr(value).__eq__)
        elif word == "RANGE":
            tests.append(_range(*value))
        elif word == "CATEGORY":
            tests.append(_category(text, str(value)))
        else:
            raise pattern_error(text)
    return lambda char: any(test(char) for test in tests) is not negate


def _range(low: int, high: int) -> Test:
    return lambda char: low <= ord(char) <= high


def _category(text: str, name: str) -> Test:
    known: dict[str, Test] = {
        "CATEGORY_DIGIT": str.isdigit,
        "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
        "CATEGORY_SPACE": str.isspace,
    }
    if name in known:
        return known[name]
    positive = name.replace("_NOT_", "_")
    if positive not in known:
        raise pattern_error(text)
    return lambda char: not known[positive](char)


@lru_cache(maxsize=4096)
def regex(text: str) -> Test:
    """Return re.match's answer for a pattern."""
    if len(text) > MAX_LENGTH:
        raise pattern_error(text)
    program = _Program(text)
    if program.safe:
        found = re.compile(text).match
        return lambda name: found(name) is not None
    return program.match


@lru_cache(maxsize=8192)
def prefix_or_suffix(text: str) -> Test:
    """transformers' should_convert_module: re.match of the pattern, or the name ends with it.

    "model.layers.1" also catches layers 10 to 19; "mlp" catches nothing inside an mlp.
    """
    if _PLAIN.fullmatch(text):
        # the dots of a plain name are wildcards too, but no module's name differs from it there only
        return lambda name: name.startswith(text) or name.endswith(text)
    test = regex(text)
    return lambda name: test(name) or name.endswith(text)


@lru_cache(maxsize=8192)
def exact_or_regex(text: str) -> Test:
    """compressed_tensors.utils.match.match_name: "re:" and a pattern, or the whole name."""
    if text.startswith("re:"):
        return regex(text.removeprefix("re:"))
    return lambda name: name == text


@lru_cache(maxsize=8192)
def wildcard(text: str) -> Test:
    """modelopt and quark: fnmatch over the whole name, "*" crosses dots; quark takes "re:" too."""
    if text.startswith("re:"):
        return regex(text.removeprefix("re:"))
    if len(text) > MAX_LENGTH:
        raise pattern_error(text)
    if not any(char in text for char in "*?["):
        return lambda name: name == text
    return regex(_from_wildcard(text))


def _from_wildcard(text: str) -> str:
    """Return the pattern of a shell wildcard: "*" is anything, "?" one character, "[...]" a set."""
    parts = re.split(r"(\*+|\?|\[!?[^\]]+\])", text)
    made = []
    for part in parts:
        if part.startswith("*"):
            made.append(".*")
        elif part == "?":
            made.append(".")
        elif part.startswith("[") and part.endswith("]") and len(part) > 2:
            made.append("[^" + part[2:] if part[1] == "!" else part)
        else:
            made.append(re.escape(part))
    return "".join(made) + "$"


@lru_cache(maxsize=8192)
def below(text: str) -> Test:
    """modelopt as vLLM reads it: a wildcard, or a name with everything below it."""
    whole = wildcard(text)
    return lambda name: whole(name) or name.startswith(text + ".")


@lru_cache(maxsize=8192)
def substring(text: str) -> Test:
    """AutoAWQ's exclude_layers_to_not_quantize: the text is anywhere in the name."""
    return lambda name: text in name
