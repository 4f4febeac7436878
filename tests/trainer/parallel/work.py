"""What the two-rank tests run on every rank: a prepared run, its gradients on one batch, its losses."""

from pathlib import Path
from typing import Any

import torch

from trainer.config import parse_run
from trainer.data import load_samples
from trainer.parallel.ranks import Ranks
from trainer.preflight import longest_sequence, prepare
from trainer.sft import loss, make_order, next_batch, split
from trainer.sft_data import read_examples


def prepared(ranks: Ranks, document: dict[str, Any], root: str) -> Any:
    """Return (run, train section, the run ready to step)."""
    run, train = parse_run(document, root=Path(root))
    return run, train, prepare(run, train, ranks=ranks)


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """Return every trained parameter's whole gradient."""
    found = {}
    for name, parameter in policy.trainable():
        grad = parameter.grad
        if grad is not None:
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def sft_batches(ready: Any, run: Any, train: Any, root: str) -> Any:
    """Return a function that takes the next step's batch."""
    samples = load_samples(train.dataset, root=Path(root))
    examples = read_examples(
        samples,
        ready.policy.tokenizer,
        train.dataset,
        limit=longest_sequence(run),
        loss_on=train.loss_on,
    )
    order, _ = make_order(examples, run, train)
    return lambda: next_batch(examples, order, ready=ready)


def sft_gradients(ranks: Ranks, document: dict[str, Any], root: str, budget: int = 64) -> Any:
    """Return the loss and the gradients of one batch."""
    run, train, ready = prepared(ranks, document, root)
    batch = sft_batches(ready, run, train, root)()
    count = sum(sum(sequence.scored) for sequence in batch)
    total = 0.0
    with ready.policy.training():
        for part in split(batch, budget, ready=ready):
            share, _ = loss(part, ready=ready, num_tokens=count)
            share.backward()
            total += share.item()
    return ready.policy.ranks.sum(total), gradients(ready.policy)


def sft_curve(ranks: Ranks, document: dict[str, Any], root: str, steps: int) -> list[float]:
    """Return the losses and gradient norms of `steps` steps."""
    run, train, ready = prepared(ranks, document, root)
    take = sft_batches(ready, run, train, root)
    figures = []
    for step in range(steps):
        batch = take()
        count = sum(sum(sequence.scored) for sequence in batch)
        update = ready.stepper.run(
            step,
            micro_batches=lambda budget, batch=batch: split(batch, budget, ready=ready),
            loss=lambda part, count=count: loss(part, ready=ready, num_tokens=count),
            longest=max(len(sequence.token_ids) for sequence in batch),
        )
        figures += [update.loss, update.grad_norm]
    return figures
