"""Steps on preferences, as TRL runs them: DPO, KTO, ORPO and SimPO.

trl 1.16 dpo_trainer.py and kto_trainer.py `_compute_loss`: the policy's forward through the fused head, then
the reference under no_grad while the policy's graph waits; a separate copy, or the adapters switched off.
KTO asks policy and reference about mismatched pairs too, without a graph. ORPO and SimPO (trl.experimental
orpo and cpo, `concatenated_forward`) have full logits and no reference; ORPO the chosen rows' likelihood.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from planner.run.recipe import Reference, Task
from profiler.storages import StorageTracker
from profiler.subjects.autocast import FakeScaler, autocast
from profiler.subjects.beside import Beside, frozen
from profiler.subjects.loss_heads import selective_log_softmax
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import TrlGrpo

BETA = 0.1


class TrlPairs(TrlGrpo):
    """DPO (rows: chosen, then rejected) and KTO (rows: completions of either kind)."""

    def __init__(
        self, options: StepOptions, *, task: Task, fused: bool, reference: Reference
    ) -> None:
        super().__init__(options, fused=fused)
        self.task = task
        self.name = f"trl-{task}" if fused else f"trl-full-logits-{task}"
        self.notes = ()
        self.reference = reference
        self.other: Any = None

    def build(self) -> torch.nn.Module:
        """Return the policy, with a copy beside it if the reference is one."""
        policy = super().build()
        if self.reference is not Reference.SEPARATE:
            return policy
        return Beside(policy, frozen(self.options))

    def run(self, model: Any, tracker: StorageTracker) -> None:
        """Run the optimizer steps."""
        if isinstance(model, Beside):
            self.other, model = model.other, model.trained
        super().run(model, tracker)

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch."""
        options = self.options
        tokens = torch.zeros((options.micro_batch, options.length), dtype=torch.long)
        kto = self.task is Task.KTO
        if kto:
            with tracker.in_phase("score"), torch.no_grad():
                self.log_probs(model, tokens)
        tracker.phase = "forward"
        logp = self.log_probs(model, tokens).sum(dim=1)
        ratio = logp
        if self.reference not in (Reference.NONE, Reference.PRECOMPUTED):
            with tracker.in_phase("reference"), torch.no_grad(), self._switched(model) as other:
                if kto:
                    self.log_probs(other, tokens)
                beside = self.log_probs(other, tokens).sum(dim=1)
            ratio = logp - beside
        loss = 1 - torch.sigmoid(BETA * ratio) if kto else _pairs(ratio)
        del tokens, logp, ratio
        self.backward(loss.mean(), scaler)

    def backward(self, loss: torch.Tensor, scaler: FakeScaler | None) -> None:
        """Run the backward of one micro-batch."""
        loss = loss / self.options.gradient_accumulation
        (loss if scaler is None else scaler.scale(loss)).backward()

    @contextlib.contextmanager
    def _switched(self, model: Any) -> Iterator[Any]:
        if self.other is not None:
            yield self.other
            return
        with model.disable_adapter():
            yield model


def _pairs(ratio: torch.Tensor) -> torch.Tensor:
    chosen, rejected = ratio.chunk(2, dim=0)
    return -F.logsigmoid(BETA * (chosen - rejected))


class TrlOdds(TrlPairs):
    """ORPO and SimPO: full logits of both sides, no reference."""

    def __init__(self, options: StepOptions, *, task: Task) -> None:
        super().__init__(options, task=task, fused=False, reference=Reference.NONE)
        self.name = f"trl-{task}"

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch."""
        options = self.options
        tracker.phase = "forward"
        tokens = torch.zeros((options.micro_batch, options.length), dtype=torch.long)
        with autocast(options):
            outputs = model(**self.masked(tokens))
            logits = outputs.logits
        if options.converts_outputs:
            logits = logits.float()
        del outputs
        half = options.micro_batch // 2
        loss: Any = 0.0
        if self.task is Task.ORPO:
            shifted = logits[:half][..., :-1, :].contiguous()
            labels = tokens[:half][..., 1:].contiguous().view(-1)
            loss = F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels)
            del shifted, labels
        logp = selective_log_softmax(logits[:, :-1, :], tokens[:, 1:]).mean(-1)
        averages = (logits[:half].detach().mean(), logits[half:].detach().mean())
        loss = loss + _pairs(logp).mean()
        self.held = averages
        # _compute_loss returns: its variables go, the graph stays
        del logits, logp, tokens, averages
        self.backward(loss, scaler)
