"""What a run of `train --fit` does when memory runs out: one rung at a time, the samples of a step never change.

First the same again, once what nobody needs is given back. Then layers are computed again instead of kept, then
what they keep goes to the host: both leave every bit of the result as it is. Only then come smaller micro-batches,
whose sums are added in another order.
"""

from dataclasses import dataclass, field

from planner.run.recipe import Checkpointing
from trainer.checkpointing import CheckpointedLayers, checkpoint_layers, decoder_layers
from trainer.model import Policy
from trainer.say import Say, silent
from trainer.stepping import TokenBudget

RUNGS = (Checkpointing.FULL, Checkpointing.OFFLOAD)
ORDER = {
    Checkpointing.NONE: 0,
    Checkpointing.SELECTIVE_OP: 0,
    Checkpointing.SELECTIVE_LAYER: 0,
    Checkpointing.EVERY_K: 2,
    Checkpointing.FULL: 1,
    Checkpointing.OFFLOAD: 2,
}
"""How far down a run is to begin with."""


@dataclass
class Ladder(TokenBudget):
    """A budget of tokens that steps down through settings before it is halved."""

    policy: Policy | None = None
    layers: CheckpointedLayers | None = None
    """As they are checkpointed now."""
    mode: Checkpointing = Checkpointing.NONE
    say: Say = silent
    offload_keeps: int = 1
    went: list[str] = field(default_factory=list)
    """Rungs taken, in words."""
    _again: bool = False

    def halve(self, longest: int) -> None:
        """Go one rung down; raises VramwiseError at the bottom."""
        if not self._again:
            self._again = True
            self._tell("the same again, with what nobody needs given back")
            return
        self._again = False
        wanted = next((each for each in RUNGS if ORDER[each] > ORDER[self.mode]), None)
        if wanted is not None and self.policy is not None:
            self._checkpoint(wanted, self.policy)
            self._tell(f"checkpointing={wanted.value}")
            return
        super().halve(longest)
        self._tell(
            f"micro-batches of {self.tokens:,} tokens; the samples of a step stay as they are"
        )

    def _checkpoint(self, mode: Checkpointing, policy: Policy) -> None:
        if self.layers is not None:
            self.layers.remove()
        self.layers = checkpoint_layers(
            decoder_layers(policy.base), mode=mode, keep_last=self.offload_keeps, say=self.say
        )
        self.mode = mode

    def _tell(self, rung: str) -> None:
        self.went.append(rung)
        self.say(f"fit: out of memory; {rung}")
