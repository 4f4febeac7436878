"""Distillation from a resident teacher: TRL's GKD on full logits, and its chunked divergence.

trl 1.16 experimental/gkd compute_loss: student's forward, the teacher's under no_grad, generalized_jsd_loss
(its own code runs here, but for the mask, whose result has no shape without data). distillation_trainer.py
_compute_loss: hidden states of both, then ChunkedDivergenceFunction, whose allocations are followed here.
"""

from typing import Any

import torch

from planner.errors import MissingExtraError
from profiler.storages import StorageTracker
from profiler.subjects.autocast import FakeScaler, autocast
from profiler.subjects.beside import Beside, frozen
from profiler.subjects.hf_sft import decoder_of
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import TrlGrpo

TILE_TOKENS, TILE_COLUMNS = 4096, 32768


class Distill(TrlGrpo):
    """One step of a student with its teacher beside it."""

    def __init__(self, options: StepOptions, *, teacher: dict[str, Any], fused: bool) -> None:
        super().__init__(options, fused=fused)
        self.name = "trl-distill" if fused else "trl-gkd"
        self.notes = ("the student's own completions are not generated",)
        self.teacher_config = teacher
        self.completion = options.completion or options.length - 1
        self.other: Any = None

    def build(self) -> torch.nn.Module:
        """Return student and teacher."""
        student = super().build()
        return Beside(student, frozen(self.options, config=self.teacher_config, layers=None))

    def run(self, model: Any, tracker: StorageTracker) -> None:
        """Run the optimizer steps."""
        self.other, model = model.other, model.trained
        super().run(model, tracker)

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch."""
        options = self.options
        tracker.phase = "forward"
        tokens = torch.zeros((options.micro_batch, options.length), dtype=torch.long)
        loss = (
            self._chunked(model, tokens, tracker)
            if self.fused
            else self._gkd(model, tokens, tracker)
        )
        del tokens
        loss = loss / options.gradient_accumulation
        (loss if scaler is None else scaler.scale(loss)).backward()

    def _gkd(self, model: Any, tokens: torch.Tensor, tracker: StorageTracker) -> torch.Tensor:
        try:
            from trl.experimental.gkd import GKDTrainer
        except ImportError as error:
            raise MissingExtraError("trace --task distill", "train") from error
        student = self._outputs(model, tokens)
        with tracker.in_phase("teacher"), torch.no_grad():
            teacher = self._outputs(self.other, tokens)
        divergence = GKDTrainer.generalized_jsd_loss(  # type: ignore[no-untyped-call]
            student[:, :-1, :], teacher[:, :-1, :], reduction="none"
        )
        where = torch.zeros(tokens.shape[0] * (tokens.shape[1] - 1), dtype=torch.long)
        loss: torch.Tensor = divergence.reshape(-1, divergence.shape[-1])[where].sum()
        return loss

    def _outputs(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with autocast(self.options):
            made: torch.Tensor = model(**self.masked(tokens)).logits
        return made.float() if self.options.converts_outputs else made

    def _chunked(self, model: Any, tokens: torch.Tensor, tracker: StorageTracker) -> torch.Tensor:
        heads = [_head(model), self.other.get_output_embeddings()]
        with autocast(self.options):
            student = decoder_of(model)(**self.masked(tokens))[0]
            with tracker.in_phase("teacher"), torch.no_grad():
                teacher = decoder_of(self.other)(**self.masked(tokens))[0]
            where = torch.zeros(tokens.shape[0] * self.completion, dtype=torch.long)
            rows = [each.reshape(-1, each.shape[-1])[where] for each in (student, teacher)]
            del student, teacher
            made: torch.Tensor = Divergence.apply(  # type: ignore[no-untyped-call]
                rows[0], heads[0].weight, rows[1], heads[1].weight
            )
        return made.sum()


def _head(model: Any) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.get_output_embeddings()


class Divergence(torch.autograd.Function):
    """ChunkedDivergenceFunction's allocations; it computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        other: torch.Tensor,
        head: torch.Tensor,
    ) -> torch.Tensor:
        """Allocate one fp32 tile of each model."""
        tiles = [_tile(hidden, torch.float32) for _ in range(2)]
        result = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, other, head, torch.empty_like(result))
        del tiles
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """Allocate the fp32 gradients, both tiles and the 16-bit gradient of one, then cast."""
        hidden, weight, *_ = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        trains = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trains else None
        tiles = [_tile(hidden, torch.float32) for _ in range(2)]
        narrow = _tile(hidden, hidden.dtype)  # a variable of the backward's, like the tiles
        result = grad_hidden.to(hidden.dtype)
        trained = None if grad_weight is None else grad_weight.to(weight.dtype)
        del tiles, narrow
        return result, trained, None, None


def _tile(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return hidden.new_empty((min(hidden.shape[0], TILE_TOKENS), TILE_COLUMNS), dtype=dtype)
