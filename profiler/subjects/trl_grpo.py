"""The GRPO step of TRL's GRPOTrainer, full logits (until 1.12) or fused head (later 1.x).

One micro-batch of completions: an optional score pass without gradients (reference or old
log-probabilities), then forward, loss, backward and, at the end, the optimizer step. Generation is
not traced. Rows are as long as the longest of the batch, as TRL pads them; here all are.
"""

from enum import StrEnum
from typing import Any

import torch

from planner.errors import UnsupportedError
from profiler.storages import StorageTracker
from profiler.subjects.autocast import FakeScaler, autocast
from profiler.subjects.hf_sft import HfSft, decoder_of
from profiler.subjects.loss_heads import FusedHead, selective_log_softmax
from profiler.subjects.options import StepOptions

CLIP = 0.2


class Temperature(StrEnum):
    """How full logits are divided by the sampling temperature."""

    NONE = "none"
    """TRL 0.14 and 0.15 did not."""
    IN_PLACE = "in-place"
    """1.0 to 1.9: `div_` on a slice, whose CopySlices node copies the gradient of all logits."""
    COPY = "copy"
    """0.16 to 0.29, and again from 1.10 on (pull 6554): out of place."""


class TrlGrpo(HfSft):
    """GRPO as TRL runs it; `fused` picks the fused head."""

    def __init__(
        self,
        options: StepOptions,
        *,
        fused: bool,
        score: bool = False,
        temperature: Temperature = Temperature.NONE,
    ) -> None:
        super().__init__(options)
        self.name = "trl-grpo" if fused else "trl-full-logits-grpo"
        self.temperature = temperature
        self.notes = ("generation and its engine are not traced",)
        self.fused = fused
        self.score = score
        self.completion = options.completion or options.length - 1
        if self.completion >= options.length:
            self.completion = options.length - 1

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch: score, forward, loss, backward."""
        options = self.options
        rows = options.micro_batch
        tokens = torch.zeros((rows, options.length), dtype=torch.long)
        mask = torch.ones((rows, options.length), dtype=torch.long)
        advantages = torch.zeros(rows)
        reference = None
        if self.score:
            with tracker.in_phase("score"), torch.no_grad():
                reference = self.log_probs(model, tokens)
        tracker.phase = "forward"
        logp = self.log_probs(model, tokens)
        loss = policy_loss(logp, reference, advantages, mask[:, -self.completion :])
        del tokens, mask, logp, reference
        loss = loss / options.gradient_accumulation
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()

    def evaluate(self, model: Any) -> None:
        """Run an evaluation's batches through the head as training does: there are no logits to keep."""
        options = self.options
        for _ in range(options.eval_batches):
            self.log_probs(
                model, torch.zeros((options.eval_rows, options.length), dtype=torch.long)
            )

    def log_probs(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, S] -> log-probabilities of the completions [B, R]."""
        targets = tokens[:, -self.completion :]
        if self.fused:
            return self._fused(model, tokens, targets)
        with autocast(self.options):
            outputs = model(**self.masked(tokens), logits_to_keep=self.completion + 1)
            logits = outputs.logits
        if self.options.converts_outputs:
            logits = logits.float()
        del outputs
        logits = logits[:, :-1, :][:, -self.completion :]
        if self.temperature is Temperature.IN_PLACE:
            logits.div_(0.9)
        elif self.temperature is Temperature.COPY:
            logits = logits / 0.9
        return selective_log_softmax(logits, targets)

    def masked(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model is called with: a mask too where rows are padded."""
        if not self.options.padded:
            return {"input_ids": tokens}
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def _fused(self, model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = inner.get_output_embeddings()
        if head is None:
            raise UnsupportedError(f"{self.name}: the model has no output head")
        with autocast(self.options):
            hidden = decoder_of(model)(**self.masked(tokens))[0]
            # TRL selects the scored rows with a boolean mask: a copy, and its indices.
            flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
            where = torch.zeros(targets.numel(), dtype=torch.long)
            scored = flat[where]
            del flat, hidden
            logp: torch.Tensor
            logp, _ = FusedHead.apply(scored, head.weight, targets.reshape(-1))  # type: ignore[no-untyped-call]
        return logp.view(targets.shape)


def policy_loss(
    logp: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return the clipped loss on [B, R] log-probabilities; on policy, with KL where scored."""
    ratio = torch.exp(logp - logp.detach())
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    gain = advantages.unsqueeze(1)
    per_token = -torch.min(ratio * gain, clipped * gain)
    if reference is not None:
        gap = reference - logp
        per_token = per_token + 0.04 * (torch.exp(gap) - gap - 1)
    return (per_token * mask).sum() / mask.sum().clamp(min=1)
