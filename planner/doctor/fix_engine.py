"""Changes to a vLLM engine, with its adapter slots' bytes from the plan."""

from planner.doctor.cause import Signals
from planner.doctor.fix_makers import Fix
from planner.doctor.slots import adapter_slots


def no_blocks(signals: Signals) -> list[Fix]:
    """More budget or less that comes before the KV cache."""
    return [
        *slots(signals)[:1],
        Fix(change="a HIGHER --gpu-memory-utilization if it is below 0.95"),
        Fix(
            change="a lower --max-model-len and --max-num-batched-tokens: the profile peak shrinks"
        ),
        Fix(change="a quantised checkpoint, or --tensor-parallel-size 2"),
        Fix(change="--limit-mm-per-prompt or --skip-mm-profiling for vision models"),
    ]


def slots(signals: Signals) -> list[Fix]:
    """Fewer or narrower adapter slots."""
    found = adapter_slots(signals)
    if found is None:
        return []
    least = found.size_bytes - found.size_bytes // max(1, found.count)
    return [
        Fix(
            change=f"fewer or narrower adapter slots: --max-loras 1 and the adapters' own rank as --max-lora-rank (now {found.count} of rank {found.rank})",
            saved_bytes=least if found.count > 1 else found.size_bytes // 2,
            formula=f"{found.count} slots are {found.size_bytes:,} B by the plan",
        ),
        Fix(change="merge the adapter into the weights and serve it without --enable-lora"),
        Fix(change="a LOWER --gpu-memory-utilization where adapters are loaded after the start"),
    ]
