"""Supervised fine-tuning, top to bottom: tokenise, cross-entropy through the chunked head, step.

The loss is the mean over all trained tokens of the optimizer step, whatever the micro-batches are.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from planner.run.recipe import RunFile
from trainer.batching import MicroBatch, ScoredSequence, collate, micro_batches
from trainer.config import TrainSection
from trainer.data import Order, Samples, check_columns, load_samples, tokenize_example
from trainer.losses import sft_loss
from trainer.preflight import Preflight, prepare
from trainer.say import Say, silent
from trainer.scoring import hidden_rows, log_probs
from trainer.session import Result, Session, check_output, run_folder


def train_sft(
    run: RunFile, train: TrainSection, *, root: Path, resume: bool = False, say: Say = silent
) -> Result:
    """Fine-tune as the run file says; return how it ended. Raises VramwiseError."""
    samples = load_samples(train.dataset, root=root)
    check_columns(samples, train.dataset, task="sft")
    output = prepare_output(run, train, resume=resume)
    ready = prepare(run, train, say=say)
    ready.save(output)
    order = Order(size=len(samples), seed=train.seed, shuffle=train.dataset.shuffle)
    session = Session(train, output=output, policy=ready.policy, stepper=ready.stepper, order=order)
    if resume:
        session.resume()
    with session, ready.device:
        for step in session.steps():
            started = time.perf_counter()
            batch = next_batch(samples, order, ready=ready, train=train)
            num_tokens = sum(sum(sequence.scored) for sequence in batch)
            update = ready.stepper.run(
                step,
                micro_batches=partial(split, batch, ready=ready),
                loss=partial(loss, ready=ready, num_tokens=num_tokens),
                longest=max(len(sequence.token_ids) for sequence in batch),
            )
            correct = sum(update.stats)
            seconds = time.perf_counter() - started
            logged = {
                "loss": update.loss,
                "mean_probability": correct / max(1, num_tokens),
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "tokens": num_tokens,
                "train_tokens": update.num_tokens,
                "micro_batches": len(update.stats),
                "budget_tokens": ready.stepper.budget.tokens,
                **ready.memory.take(ready.planned_bytes),
                "seconds": seconds,
                "tokens_per_second": update.num_tokens / seconds,
            }
            if update.skipped:
                session.skip(step, "the loss or a gradient is NaN or infinite", logged)
                continue
            line = f"loss {update.loss:.4f}  grad {update.grad_norm:.2f}  {seconds:.1f} s"
            session.log(step, logged, line=line)
    return session.result()


def next_batch(
    samples: Samples, order: Order, *, ready: Preflight, train: TrainSection
) -> list[ScoredSequence]:
    """Return the sequences of one optimizer step, each cut at the recipe's length."""
    limit = ready.prompt_tokens + ready.completion_tokens
    sequences = []
    for index in order.take(ready.prompts_per_step):
        ids, trained = tokenize_example(
            samples[index],
            ready.policy.tokenizer,
            train.dataset,
            limit=limit,
            loss_on=train.loss_on,
        )
        if len(ids) > 1 and any(trained):
            scored = tuple(bool(flag) for flag in trained)
            sequences.append(ScoredSequence(token_ids=tuple(ids), scored=scored))
    # a batch whose every completion was cut away: go on to the next samples
    return sequences or next_batch(samples, order, ready=ready, train=train)


def split(
    batch: list[ScoredSequence], budget_tokens: int, *, ready: Preflight
) -> Iterator[MicroBatch]:
    """Yield micro-batches of at most `budget_tokens` tokens, each on the device when it is asked for."""
    lengths = [len(sequence.token_ids) for sequence in batch]
    pad = ready.policy.tokenizer.pad_token_id or 0
    picks = micro_batches(lengths, budget_tokens=budget_tokens, layout=ready.layout)
    for pick in picks:
        yield collate(batch, pick, layout=ready.layout, pad_id=pad).to(ready.policy.device)


def loss(batch: MicroBatch, *, ready: Preflight, num_tokens: int) -> tuple[Tensor, float]:
    """Return (this micro-batch's share of the loss, the sum of its tokens' probabilities)."""
    with ready.memory("forward"):
        hidden = hidden_rows(ready.policy, batch)
    with ready.memory("loss"):
        # sampling settings don't apply: the loss is the model's own cross-entropy
        logp = log_probs(ready.policy, batch, hidden, chunk_rows=ready.recipe.loss_chunk_rows).logp
        return sft_loss(logp, num_tokens=num_tokens), logp.detach().exp().sum().item()
