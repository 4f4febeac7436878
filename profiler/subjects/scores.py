"""Steps without a vocabulary: reward model, reranker and embeddings.

trl 1.16 reward_trainer.py compute_loss: chosen and rejected in one forward of a sequence classifier, minus
the log-sigmoid of their difference. sentence-transformers CrossEncoder: binary cross-entropy of each pair.
MultipleNegativesRankingLoss: a forward for each column, every graph waits for the similarities; the features
hold the last hidden states. CachedMultipleNegativesRankingLoss: without a graph first, the gradients of the
embeddings, then a mini-batch with a graph after the other.
"""

from typing import Any

import torch
import torch.nn.functional as F

from planner.run.recipe import Task
from planner.run.resolved import Resolved
from profiler.storages import StorageTracker
from profiler.subjects.autocast import FakeScaler, autocast
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions

SCALE = 20.0


class ScoreStep(HfSft):
    """Reward model (pairs in one forward) and reranker (query with document)."""

    def __init__(self, options: StepOptions, *, task: Task) -> None:
        super().__init__(options)
        self.task = task
        self.name = f"hf-{task}"

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch."""
        options = self.options
        tracker.phase = "forward"
        tokens = torch.ones((options.micro_batch, options.length), dtype=torch.long)
        inputs = {"input_ids": tokens}
        if options.padded:
            inputs["attention_mask"] = torch.ones_like(tokens)
        with autocast(options):
            outputs = model(**inputs)
        scores = outputs.logits.float() if options.converts_outputs else outputs.logits
        if self.task is Task.REWARD:
            chosen, rejected = torch.chunk(scores.squeeze(-1), chunks=2)
            loss = -F.logsigmoid(chosen - rejected).mean()
            del chosen, rejected
        else:
            loss = F.binary_cross_entropy_with_logits(
                scores.squeeze(-1), torch.ones(options.micro_batch, dtype=scores.dtype)
            )
        del outputs, scores, inputs, tokens
        backward(loss, options, scaler)


class EmbedStep(HfSft):
    """In-batch negatives, with all graphs at once or through GradCache."""

    def __init__(self, options: StepOptions, *, resolved: Resolved) -> None:
        super().__init__(options)
        self.name = "sentence-transformers-cached" if resolved.cached else "sentence-transformers"
        self.columns = resolved.columns
        self.chunks = -(-resolved.batch // resolved.at_once)
        self.cached = resolved.cached

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run one micro-batch."""
        tracker.phase = "forward"
        if self.cached:
            self._through_cache(model, tracker)
            return
        features: list[
            torch.Tensor
        ] = []  # sentence_features hold token_embeddings until the step is over
        made = []
        for column in self.columns:
            tracker.phase = "forward"
            hidden = self._hidden(model, *column)
            features.append(hidden)
            made.append(hidden[:, -1])
        backward(_ranking_loss(made), self.options, scaler)
        features.clear()

    def _hidden(self, model: Any, rows: int, length: int) -> torch.Tensor:
        tokens = torch.ones((rows, length), dtype=torch.long)
        inputs = {"input_ids": tokens}
        if self.options.padded:
            inputs["attention_mask"] = torch.ones_like(tokens)
        with autocast(self.options):
            hidden: torch.Tensor = model(**inputs)[0]
        return hidden

    def _through_cache(self, model: Any, tracker: StorageTracker) -> None:
        texts = [[column] * self.chunks for column in self.columns]
        with tracker.in_phase("score"), torch.no_grad():
            made = [[self._hidden(model, *each)[:, -1].clone() for each in rows] for rows in texts]
        whole = [torch.cat(rows).requires_grad_() for rows in made]
        tracker.phase = "loss"
        _ranking_loss(whole).backward()
        grads = [each.grad for each in whole]
        for rows, grad in zip(texts, grads, strict=True):
            assert grad is not None
            for each, part in zip(rows, grad.chunk(self.chunks), strict=True):
                tracker.phase = "forward"
                embedded = self._hidden(model, *each)[:, -1]
                torch.dot(embedded.flatten(), part.flatten()).backward()
                del embedded


def _ranking_loss(made: list[torch.Tensor]) -> torch.Tensor:
    queries, documents = made[0], torch.cat(made[1:])
    scores = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T * SCALE
    return F.cross_entropy(scores, torch.arange(len(queries)))


def backward(loss: torch.Tensor, options: StepOptions, scaler: FakeScaler | None) -> None:
    """Run the backward of one micro-batch."""
    loss = loss / options.gradient_accumulation
    (loss if scaler is None else scaler.scale(loss)).backward()
