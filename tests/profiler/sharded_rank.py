"""One real rank: runs the step of test_sharded.py on gloo and prints its peaks as JSON.

python -m tests.profiler.sharded_rank RANK FILE NAMES
"""

import json
import sys
from datetime import timedelta

import torch.distributed as dist

from profiler.attribute import assign_terms, rounded
from profiler.storages import BlockEvent
from profiler.trace import run_subject
from tests.profiler.sharded_cases import CASES, subject


def peaks(events: list[BlockEvent]) -> dict[str, int]:
    """Return the largest bytes alive in each phase and place, without what gloo itself copies."""
    alive, found = dict[str, int](), dict[str, int]()
    for event in events:
        # gloo's reduce-scatter splits its input by a copy that no NCCL kernel makes
        if event.block.op == "aten.split.Tensor" and event.block.term == "communication":
            continue
        place = event.block.place
        size = rounded(event.block.bytes) * (1 if event.alloc else -1)
        alive[place] = alive.get(place, 0) + size
        name = f"{event.phase}, {place}"
        found[name] = max(found.get(name, 0), alive[place])
    return found


def main(rank: int, file: str, names: list[str]) -> None:
    """Run every named case and print {case: peaks}."""
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=CASES[names[0]].ranks,
        init_method=f"file://{file}",
        timeout=timedelta(seconds=120),
    )
    result = {}
    for name in names:
        step = subject(CASES[name])
        tracker = run_subject(step, fake=False)
        assign_terms(tracker.events, vocab=step.vocab, embedding=step.trained_embedding)
        result[name] = peaks(tracker.events)
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
