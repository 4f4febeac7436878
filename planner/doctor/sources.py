"""Where a log comes from: a file, one that is compressed, or a directory of one file a rank, all streamed."""

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO, cast

from planner.doctor.reading import BLOCK_BYTES
from planner.errors import UsageError

MAX_FILES = 4096
LOGS = frozenset({".log", ".out", ".err", ".txt", ".stdout", ".stderr"})
PACKED: tuple[tuple[bytes, Callable[[BinaryIO], io.IOBase]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
"""How a compressed file begins, and what unpacks it."""
_RANK = re.compile(r"(?:rank|worker|local_rank|proc|gpu)[._-]?(\d{1,4})(?!\d)", re.IGNORECASE)
_MARKED = re.compile(rb"^\[(?:default|rank)\d{1,4}\]:|^\(\w+ pid=\d+", re.MULTILINE)


def open_log(path: Path) -> BinaryIO:
    """Return a log opened for reading; a directory's files one after the other. Raises UsageError, OSError."""
    if path.is_dir():
        files = _files(path)
        if not files:
            raise UsageError(
                f"file: {str(path)[:200]!r} is a directory without logs",
                hint=f"a log file, or a directory with {', '.join(sorted(LOGS))} (torchrun's log_dir, one file a rank)",
            )
        return cast(BinaryIO, _Joined(path, files))
    return unpacked(path.open("rb"))


def _files(path: Path) -> list[Path]:
    """Return the logs below a directory, those of lower ranks first."""
    found = [
        file
        for file in path.rglob("*")
        if file.is_file()
        and (
            file.suffix in LOGS
            or (file.suffix in (".gz", ".bz2", ".xz") and Path(file.stem).suffix in LOGS)
        )
    ]
    return sorted(found, key=lambda file: (_rank(path, file) or 0, str(file)))[:MAX_FILES]


def _rank(top: Path, file: Path) -> int | None:
    """Return the rank a file is of: by its name, or torchrun's attempt_0/3/stderr.log; None if it tells none."""
    parts = file.relative_to(top).parts
    if match := _RANK.search(parts[-1]):
        return int(match.group(1))
    inner = parts[-2] if len(parts) > 1 else ""
    return int(inner) if inner.isdigit() and len(inner) < 5 else None


def unpacked(file: BinaryIO) -> BinaryIO:
    """Return what a compressed file holds, any other file as it is; closing it closes the file."""
    peek = getattr(file, "peek", None)
    head = peek(6) if peek is not None else b""
    for magic, unpack in PACKED:
        if head.startswith(magic):
            return cast(BinaryIO, unpack(file))
    return file


class _Joined:
    """The files of a directory as one stream, every line with its rank before it."""

    def __init__(self, top: Path, files: list[Path]) -> None:
        self._blocks = self._all(top, files)

    def __enter__(self) -> "_Joined":
        return self

    def __exit__(self, *_details: object) -> None:
        self._blocks.close()

    def read(self, _size: int = -1) -> bytes:
        """Return the next block, b"" at the end."""
        return next(self._blocks, b"")

    def _all(self, top: Path, files: list[Path]) -> Generator[bytes, None, None]:
        for file in files:
            rank = _rank(top, file)
            with unpacked(file.open("rb")) as source:
                yield f"==> {file.relative_to(top)} <==\n".encode()
                last = b"\n"
                prefix = b""
                while block := source.read(BLOCK_BYTES):
                    if (
                        last == b"\n"
                        and rank is not None
                        and not prefix
                        and not _MARKED.search(block)
                    ):
                        prefix = b"[rank%d]: " % rank
                    if prefix:
                        start = prefix if last == b"\n" else b""
                        ends = block.endswith(b"\n")
                        block = start + block[: len(block) - ends].replace(b"\n", b"\n" + prefix)
                        block += b"\n" * ends
                    last = block[-1:]
                    yield block
                if last != b"\n":
                    yield b"\n"
