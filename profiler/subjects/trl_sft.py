"""The SFT step of TRL 1.x: the HF Trainer's, with the fused head instead of logits."""

from typing import Any

import torch

from profiler.storages import StorageTracker
from profiler.subjects.autocast import FakeScaler
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import TrlGrpo


class TrlSft(TrlGrpo):
    """Supervised fine-tuning as TRL's SFTTrainer runs it."""

    def __init__(self, options: StepOptions) -> None:
        super().__init__(options, fused=True)
        self.name = "trl-sft"
        self.notes = ()
        self.completion = options.length - 1

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch."""
        options = self.options
        tracker.phase = "forward"
        tokens = torch.zeros((options.micro_batch, options.length), dtype=torch.long)
        logp = self.log_probs(model, tokens)
        loss = -logp.sum() / logp.numel() / options.gradient_accumulation
        del tokens, logp
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()
