"""The column `parallelism` -> a layout: degrees as torchtitan's and Megatron's tables write them."""

import re
from typing import Any

from planner.accuracy.rows import Row

STAGES_PER_RANK = 2
"""torchtitan pipelining_utils.generate_split_points: what a looped schedule takes where none is said."""


def degree(row: Row, name: str) -> int:
    """Return a degree of parallelism as the row states it."""
    found = re.search(rf"\b{name} (\d+)", row["parallelism"])
    return int(found[1]) if found else 1


def titan_layout(row: Row) -> dict[str, Any]:
    """Return recipe fields of a torchtitan row whose ranks share samples; nothing of any other row.

    Of a pipeline the local batch is cut into as many micro-batches as there are stages
    (pipelining_utils.build_pipeline_schedule).
    """
    tensor, pipeline, context = (degree(row, name) for name in ("TP", "PP", "CP"))
    if "torchtitan" not in row["framework"].lower() or tensor * pipeline * context == 1:
        return {}
    looped = pipeline > 1 and "interleaved" in row["parallelism"].lower()
    found: dict[str, Any] = {
        "sharding": "fsdp2",
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context,
            "virtual_stages": STAGES_PER_RANK if looped else 1,
        },
    }
    if pipeline > 1:
        batch = row.integer("micro_batch") or pipeline
        found |= {
            "micro_batch_size": -(-batch // pipeline),
            "gradient_accumulation": pipeline,
        }
    return found
