"""Where prose goes: stderr for a command, nowhere by default."""

from collections.abc import Callable

Say = Callable[[str], None]


def silent(_text: str) -> None:
    """Say nothing."""
