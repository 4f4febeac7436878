"""What an engine's adapter slots hold, by the plan with and without them."""

import re
from dataclasses import dataclass, replace

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.serving import planned_engine
from planner.doctor.vllm_log import VllmLog
from planner.units import format_bytes

_ENABLED = re.compile(r"enable[-_]lora['\"]?\s*[:=]?\s*(?:True|true)|--enable-lora\b")
_FLAG = re.compile(r"max[-_](loras|lora[-_]rank)['\"]?[ :=]{1,3}['\"]?(\d{1,4})")
_FRAMES = re.compile(
    r"vllm/lora/|create_lora_weights|LoRAModel|add_lora|set_active_loras|activate_adapter"
)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Adapter slots of one rank."""

    count: int
    rank: int
    size_bytes: int


def adapter_slots(signals: Signals) -> Slots | None:
    """Return the slots of an engine with adapters, or None without; 0 bytes where no plan can be made."""
    settings = dict(signals.vllm.settings)
    text = signals.context.text
    if settings.get("enable_lora") != "True" and not _ENABLED.search(text):
        return None
    said = {name.replace("-", "_"): value for name, value in _FLAG.findall(text)}
    count = int(settings.get("max_loras") or said.get("loras") or 1)
    rank = int(settings.get("max_lora_rank") or said.get("lora_rank") or 16)
    log = replace(
        signals.vllm,
        settings={
            **settings,
            "enable_lora": "True",
            "max_loras": str(count),
            "max_lora_rank": str(rank),
        },
    )
    without = {key: value for key, value in settings.items() if "lora" not in key}
    sizes = [
        _weights(version, signals) for version in (log, replace(signals.vllm, settings=without))
    ]
    size = sizes[0] - sizes[1] if sizes[0] is not None and sizes[1] is not None else 0
    return Slots(count=count, rank=rank, size_bytes=max(0, size))


def _weights(log: VllmLog, signals: Signals) -> int | None:
    made = planned_engine(log, signals.context)
    return made.serving.weights_bytes if made and made.serving else None


def lora_slots(signals: Signals) -> Cause | None:
    """Slots for max_loras adapters of the largest rank are allocated at the start."""
    event = signals.event
    found = adapter_slots(signals)
    if found is None or event is None:
        return None
    framed = any(_FRAMES.search(line) for line in event.stack[-40:])
    if not framed and event.kind not in ("vllm_no_blocks", "vllm_kv_len"):
        return None
    formula = f"max_loras {found.count} x rank {found.rank}"
    if found.size_bytes:
        each = format_bytes(found.size_bytes // found.count)
        formula += (
            f" = {found.count} x {each} = {format_bytes(found.size_bytes)} beside the weights"
        )
    return Cause(
        category="vllm_lora_slots",
        certainty=Certainty.CONSISTENT,
        explanation="with --enable-lora the engine allocates slots for max_loras adapters of max_lora_rank at its start, used or not: they are part of what the log calls weights.",
        formula=formula,
    )
