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
    loads: str | None = None
    """recipe.loads."""
    reshard: bool = True
    """False: units stay whole between forward and backward (SHARD_GRAD_OP)."""
    mixed_precision: str | None = None
    checkpointing: bool = False
    hybrid: bool = False
    """Sharded inside a node, replicated over nodes."""
    origin: str = ""
