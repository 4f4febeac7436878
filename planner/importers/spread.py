"""Launch: how a run is spread out over GPUs, as launchers and their files say it."""

from dataclasses import dataclass, field
from typing import Any

from planner.run.recipe import Sharding


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a run is spread out. None = the source does not say."""

    sharding: Sharding | None = None
    gpus: int | None = None
    optimizer_offload: bool = False
    parameter_offload: bool = False
    offload_device: str = "cpu"
    pinned: bool | None = None
    buckets: dict[str, Any] = field(default_factory=dict)
    """recipe.buckets."""
    gathers_at_save: bool | None = None
    """Stage 3 gathers 16-bit weights on rank 0 when it saves."""
    mixed_precision: str | None = None
    checkpointing: bool = False
    hybrid: bool = False
    """Sharded inside a node, replicated over nodes."""
    origin: str = ""
