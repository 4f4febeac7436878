"""Runs on samples of many lengths: what the allocator keeps of the shorter ones."""

import re
from math import sqrt

from planner.accuracy.rows import Row


def typical_tokens(row: Row) -> int | None:
    """Return the median length that a row's notes imply (mean +- deviation, log-normal), or None.

    Every length makes logits of its own size; a freed block of a short sample cannot hold a long
    sample's, so the allocator keeps a second set of blocks as large as the typical sample's.
    """
    found = re.search(r"(\d+) ?\+-(\d+) tokens", row["notes"])
    if not found:
        return None
    mean, deviation = float(found[1]), float(found[2])
    return int(mean / sqrt(1 + (deviation / mean) ** 2))
