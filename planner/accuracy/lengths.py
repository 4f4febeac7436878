"""Runs on samples of many lengths: what the allocator keeps of the shorter ones."""

import re
from math import exp, log, sqrt
from statistics import NormalDist

from planner.accuracy.rows import Row


def typical_tokens(row: Row, rows: int, cap: int) -> int | None:
    """Return the median length of a micro-batch of `rows` samples, from the notes' mean and deviation.

    Lengths are taken as log-normal. The runs whose notes state them dropped what is longer than
    `cap` (ms-swift 1.5 and 2: truncation_strategy "delete"). None when the notes state none.

    Every length makes logits of its own size; a freed block of a short sample cannot hold a long
    sample's, so the allocator keeps a second set of blocks.
    """
    found = re.search(r"(\d+) ?\+-(\d+) tokens", row["notes"])
    if not found:
        return None
    mean, deviation = float(found[1]), float(found[2])
    spread = log(1 + (deviation / mean) ** 2)
    logs = NormalDist(log(mean) - spread / 2, sqrt(spread))
    kept = logs.cdf(log(cap))
    # the longest of `rows` samples is under its median in half of the micro-batches
    return min(cap, int(exp(logs.inv_cdf(kept * 0.5 ** (1 / rows)))))
