"""Reads a pickle that may be hostile: only dicts, lists, tuples, strings and numbers come out.

Two lines of defence. First the whole file is scanned opcode by opcode: an opcode that names,
calls or builds anything (GLOBAL, REDUCE, BUILD, EXT1, PERSID ...) or that would make the
unpickler reserve memory out of proportion ends it there, with its offset. Only then does the
interpreter's unpickler run, and its find_class refuses everything all the same.

The scan runs a regular expression over a memory map, about 100 MB/s, and holds nothing.
"""

import copyreg
import mmap
import pickle
import re
from pathlib import Path
from typing import Any

import psutil

from planner.errors import UsageError
from planner.units import format_bytes

MAX_FILE_BYTES = 4 * 1024**3
MAX_STRING_BYTES = 16 * 1024**2
"""No frame name or path is longer; a claimed length beyond it is an attack or damage."""
MEMORY_SHARE = 0.7
"""Of the host memory that is free now, this much may be used."""

# opcode -> bytes of its argument, for opcodes whose argument cannot do harm
_FIXED = {
    pickle.MARK: 0,
    pickle.POP: 0,
    pickle.POP_MARK: 0,
    pickle.NONE: 0,
    pickle.NEWTRUE: 0,
    pickle.NEWFALSE: 0,
    pickle.EMPTY_LIST: 0,
    pickle.EMPTY_DICT: 0,
    pickle.EMPTY_TUPLE: 0,
    pickle.APPEND: 0,
    pickle.APPENDS: 0,
    pickle.SETITEM: 0,
    pickle.SETITEMS: 0,
    pickle.LIST: 0,
    pickle.DICT: 0,
    pickle.TUPLE: 0,
    pickle.TUPLE1: 0,
    pickle.TUPLE2: 0,
    pickle.TUPLE3: 0,
    pickle.MEMOIZE: 0,
    pickle.BINGET: 1,
    pickle.BINPUT: 1,
    pickle.BININT1: 1,
    pickle.PROTO: 1,
    pickle.BININT2: 2,
    pickle.BININT: 4,
    pickle.LONG_BINGET: 4,
    pickle.BINFLOAT: 8,
}
# opcode -> bytes of the length before its argument
_COUNTED = {
    pickle.LONG1: 1,
    pickle.SHORT_BINUNICODE: 1,
    pickle.SHORT_BINBYTES: 1,
    pickle.SHORT_BINSTRING: 1,
    pickle.BINUNICODE: 4,
    pickle.BINBYTES: 4,
    pickle.LONG4: 4,
    pickle.BINUNICODE8: 8,
    pickle.BINBYTES8: 8,
}
_SHORT_LONGS = [pickle.LONG1 + bytes([size]) + b".{%d}" % size for size in range(3, 10)]
"""Addresses, sizes and times: too many to look at one by one."""
_RUN = re.compile(
    b"(?s:"
    + b"|".join(
        b"["
        + b"".join(re.escape(op) for op, n in _FIXED.items() if n == size)
        + b"]"
        # a run of argument-less opcodes in one go
        + (b"++" if size == 0 else b".{%d}" % size)
        for size in sorted(set(_FIXED.values()))
    )
    + b"|"
    + b"|".join(_SHORT_LONGS)
    + b")*+"
)
"""As many harmless opcodes in a row as there are; possessive, so that it never backtracks."""
_CONTAINERS = {pickle.EMPTY_DICT: 232, pickle.EMPTY_LIST: 88, pickle.TUPLE: 64, pickle.BININT: 32}
"""Bytes of memory that one such opcode becomes, roughly; counted to bound the whole."""
_NAMES = {
    value: name
    for name, value in vars(pickle).items()
    if isinstance(value, bytes) and len(value) == 1 and name.isupper()
}


def load_plain(path: Path, *, what: str = "file") -> Any:
    """Return the plain data in `path`; raises UsageError, with the offset, for anything else."""
    size = _size(path, what)
    try:
        with path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                needed = scan(view, what=what)
            free = psutil.virtual_memory().available
            if needed > free * MEMORY_SHARE:
                raise UsageError(
                    f"{what}: {path.name} ({format_bytes(size)}) needs about {format_bytes(needed)} "
                    f"of memory, {format_bytes(free)} is free",
                    hint="record fewer events: _record_memory_history(max_entries=100000)",
                )
            # the registry's cache would hand out objects without asking find_class
            copyreg.clear_extension_cache()
            return _Plain(file, encoding="utf-8").load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        IndexError,
        TypeError,
        KeyError,
        MemoryError,
    ) as error:
        raise UsageError(
            f"{what}: {path.name} is damaged: {str(error)[:120] or type(error).__name__}",
            hint="the file may be cut short; dump it again",
        ) from None
    except OSError as error:
        raise UsageError(f"{what}: cannot read {path}: {error.strerror}") from None


def scan(view: Any, *, what: str = "file") -> int:
    """Check every opcode of `view` (bytes or a memory map) and return the memory it will take."""
    position, needed, opcodes = 0, 0, 0
    end = len(view)
    while position < end:
        run = _RUN.match(view, position)
        assert run is not None  # it matches the empty string too
        if run.end() > position:
            span = run.group()
            needed += sum(span.count(op) * cost for op, cost in _CONTAINERS.items())
            opcodes += len(span)
            position = run.end()
            if position >= end:
                break
        opcode = view[position : position + 1]
        opcodes += 1
        if opcode == pickle.STOP:
            return needed
        position, cost = _step(view, position, opcode, opcodes, what)
        needed += cost
    raise UsageError(
        f"{what}: damaged: it ends at byte {end} without an end mark", hint="the file is cut short"
    )


def _step(view: Any, position: int, opcode: bytes, opcodes: int, what: str) -> tuple[int, int]:
    """Return (position after one opcode that has to be looked at, its memory)."""
    if opcode == pickle.LONG_BINPUT:
        slot = int.from_bytes(view[position + 1 : position + 5], "little")
        if slot > opcodes:  # the unpickler would make its table as long as the number says
            raise _refused(what, position, f"LONG_BINPUT to slot {slot}", "a memory bomb")
        return position + 5, 8
    if opcode == pickle.FRAME:
        length = int.from_bytes(view[position + 1 : position + 9], "little")
        if length > len(view) - position:  # the unpickler would ask for that much at once
            raise _refused(what, position, f"FRAME of {length} bytes", "longer than the file")
        return position + 9, 0
    width = _COUNTED.get(opcode)
    if width is None:
        if opcode not in _NAMES:
            raise _refused(what, position, f"byte {opcode!r}", "not a pickle")
        why = "only plain data is read, nothing is called"
        raise _refused(what, position, _NAMES[opcode], why)
    length = int.from_bytes(view[position + 1 : position + 1 + width], "little")
    if length > MAX_STRING_BYTES:
        raise _refused(what, position, f"{_NAMES[opcode]} of {length} bytes", "longer than allowed")
    return position + 1 + width + length, 64 + length


def _refused(what: str, position: int, opcode: str, why: str) -> UsageError:
    return UsageError(
        f"{what}: refused at byte {position}: {opcode}: {why}",
        hint="a snapshot from torch.cuda.memory._dump_snapshot() holds plain data only",
    )


def _size(path: Path, what: str) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{what}: cannot read {path}: {error.strerror}") from None
    if not path.is_file():
        raise UsageError(f"{what}: {path} is not a file")
    if size == 0:
        raise UsageError(f"{what}: {path.name} is empty")
    if size > MAX_FILE_BYTES:
        raise UsageError(
            f"{what}: {path.name} has {format_bytes(size)}, more than {format_bytes(MAX_FILE_BYTES)}"
        )
    return size


class _Plain(pickle.Unpickler):
    """The second line: even an opcode that slipped through finds nothing to call."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")

    def persistent_load(self, identifier: Any) -> Any:
        raise pickle.UnpicklingError("a persistent id is not plain data")
