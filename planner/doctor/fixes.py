"""What to change, in order, with the bytes each saves, and the advice that would not help."""

from dataclasses import dataclass

from planner.doctor.cause import Cause, Signals
from planner.doctor.fix_makers import EXPANDABLE, Fix
from planner.doctor.fix_table import MAKERS, WRONG, unknown
from planner.units import GiB


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Fixes in order, and warnings against advice in circulation for this case."""

    fixes: tuple[Fix, ...]
    warnings: tuple[str, ...]


def advise(cause: Cause, signals: Signals) -> Advice:
    """Return fixes and warnings for the leading cause."""
    maker = MAKERS.get(cause.category)
    fixes = maker(signals) if maker else unknown(signals)
    warnings = list(WRONG.get(cause.category, ()))
    util = signals.context.utilization
    if cause.category == "vllm_no_cache_blocks" and util and util >= 0.93:
        fixes = [fix for fix in fixes if "HIGHER" not in fix.change]
        warnings.append(f"raising gpu_memory_utilization is no way out at {util:g}")
    budget = signals.budget
    if (
        budget
        and budget.unallocated_bytes is not None
        and not budget.fragmentation_decides
        and cause.category != "fragmentation"
    ):
        warnings.append(
            "the hint about expandable_segments is printed always; here it would not have made room"
        )
        fixes = [fix for fix in fixes if fix.change != EXPANDABLE]
    elif budget and budget.fragmentation_decides and cause.category != "fragmentation":
        fixes.append(Fix(change=EXPANDABLE, saved_bytes=budget.unallocated_bytes))
    if signals.context.colocated and any(fix.change == EXPANDABLE for fix in fixes):
        warnings.append(
            "expandable_segments conflicts with CUDA-IPC weight sync and with vLLM's older sleep mode"
        )
    if cause.category == "logits_vocab" and (signals.tried_bytes or 0) < GiB // 8:
        warnings = [warning for warning in warnings if "empty_cache" not in warning]
    return Advice(fixes=tuple(fixes), warnings=tuple(warnings))
