"""Supervised fine-tuning, top to bottom: tokenise, cross-entropy through the chunked head, step.

The loss is the mean over all trained tokens of the optimizer step, whatever the micro-batches are.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from planner.run.recipe import RunFile, Task
from trainer.batching import MicroBatch, ScoredSequence, collate, micro_batches
from trainer.callbacks import Callbacks, load_callbacks
from trainer.config import TrainSection
from trainer.data import Order, check_columns, load_samples
from trainer.losses import sft_loss
from trainer.model import load_tokenizer
from trainer.outlook import Outlook, loads
from trainer.packing import PackedOrder
from trainer.parallel.dealing import blank_batch, deal, evened
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.together import largest
from trainer.preflight import Preflight, prepare
from trainer.router_loss import balance_loss, router_coefficient
from trainer.run_folder import check_output, run_folder
from trainer.say import Say, silent
from trainer.scoring import hidden_and_routers, log_probs
from trainer.session import Result, Session
from trainer.sft_data import Examples
from trainer.validation import (
    Validation,
    load_validation,
    loss_measure,
    read_held_out,
    read_run_examples,
)

if TYPE_CHECKING:
    from trainer.fit import Fit


@dataclass(frozen=True, slots=True)
class Share:
    """What a micro-batch says about itself."""

    probability: float
    """Sum over its trained tokens."""
    balance: float = 0.0
    """Its part of the experts' auxiliary loss, before the coefficient."""


def train_sft(
    run: RunFile,
    train: TrainSection,
    *,
    root: Path,
    resume: bool = False,
    say: Say = silent,
    ranks: Ranks = ALONE,
    fit: "Fit | None" = None,
) -> Result:
    """Fine-tune as the run file says; return how it ended. Raises VramwiseError.

    Every rank of `ranks` calls it.
    """
    from transformers import AutoConfig

    callbacks = load_callbacks(train.callbacks, root=root)
    samples = load_samples(train.dataset, root=root)
    check_columns(samples, train.dataset, task="sft")
    # every row once, before any weight is loaded
    tokenizer = load_tokenizer(run.model, revision=run.revision)
    read = fit.examples if fit is not None else None
    examples = read or read_run_examples(samples, run, train, tokenizer, say=say)
    say(examples.summary())
    for number in range(min(train.print_completions, len(examples))):
        say(f"example {number + 1}, the loss is on what is in brackets: {examples.text_of(number)}")
    order, per_epoch = make_order(examples, run, train)
    held_out = load_validation(train, samples, root=root, task=Task.SFT)
    held = None if held_out is None else read_held_out(held_out, run, train, tokenizer)
    if held is not None:
        say(f"validation: {held.summary()}")
    config = AutoConfig.from_pretrained(run.model, revision=run.revision)
    coefficient = router_coefficient(config, train.router_aux_loss_coef)
    check_output(train, resume=resume)
    ready = prepare(
        run,
        train,
        say=say,
        per_epoch=per_epoch,
        held_out=len(held or ()),
        router_loss=bool(coefficient),
        ranks=ranks,
        fit=fit,
    )
    with run_folder(run, train, resume=resume, ranks=ranks) as output:
        ready.save(output)
        return _train(
            ready.train,
            examples,
            order,
            ready,
            held,
            callbacks,
            output=output,
            resume=resume,
            coefficient=coefficient,
        )


def _train(
    train: TrainSection,
    examples: Examples,
    order: Order,
    ready: Preflight,
    held_out: Examples | None,
    callbacks: Callbacks,
    *,
    output: Path,
    resume: bool,
    coefficient: float,
) -> Result:
    session = Session(
        train,
        output=output,
        policy=ready.policy,
        stepper=ready.stepper,
        order=order,
        ranks=ready.ranks,
    )
    if held_out is not None:
        session.validation = Validation(ready, output, loss_measure(held_out, ready))
    session.equip(ready, callbacks)
    if resume:
        session.resume()
    steps = max(0, train.steps - session.first_step)
    session.outlook = Outlook(
        ready, done=session.first_step, loads=loads(examples.lengths, order, ready, steps=steps)
    )
    with session, ready.device:
        for step in session.steps():
            started = time.perf_counter()
            batch = next_batch(examples, order, ready=ready)
            num_tokens = sum(sum(sequence.scored) for sequence in batch)
            update = ready.stepper.run(
                step,
                micro_batches=partial(split, batch, ready=ready),
                loss=partial(
                    loss,
                    ready=ready,
                    num_tokens=num_tokens,
                    all_tokens=sum(len(sequence.token_ids) for sequence in batch),
                    coefficient=coefficient,
                ),
                longest=max(len(sequence.token_ids) for sequence in batch),
            )
            seconds = time.perf_counter() - started
            ranks = ready.ranks
            logged = {
                "loss": update.loss,
                "mean_probability": ranks.sum(sum(s.probability for s in update.stats))
                / max(1, num_tokens),
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "epoch": order.epoch,
                "tokens": num_tokens,
                "train_tokens": update.num_tokens,
                "sequences": len(batch),
                "micro_batches": len(update.stats),
                "budget_tokens": ready.stepper.budget.tokens,
                **largest(ranks, ready.memory.take(ready.planned_bytes)),
                "seconds": seconds,
                "tokens_per_second": update.num_tokens / seconds,
            }
            if coefficient:
                logged["aux_loss"] = ranks.sum(sum(share.balance for share in update.stats))
            if update.skipped:
                session.skip(step, "the loss or a gradient is NaN or infinite", logged)
                continue
            line = f"loss {update.loss:.4f}  grad {update.grad_norm:.2f}  {seconds:.1f} s"
            session.log(step, logged, line=line)
    return session.result()


def make_order(examples: Examples, run: RunFile, train: TrainSection) -> tuple[Order, int]:
    """Return the order of samples, or of packed rows of them, and how many an epoch has."""
    shape: dict[str, Any] = {
        "size": len(examples),
        "seed": train.seed,
        "shuffle": train.dataset.shuffle,
    }
    if not run.recipe.packing:
        return Order(**shape), len(examples)
    packed = PackedOrder(**shape, lengths=examples.lengths, row_tokens=examples.limit)
    return packed, packed.rows


def next_batch(examples: Examples, order: Order, *, ready: Preflight) -> list[ScoredSequence]:
    """Return the sequences of one optimizer step, each cut at the recipe's length."""
    return [examples[index] for index in order.take(ready.prompts_per_step)]


def split(
    batch: list[ScoredSequence], budget_tokens: int, *, ready: Preflight
) -> Iterator[MicroBatch]:
    """Yield micro-batches of at most `budget_tokens` tokens, each on the device when it is asked for.

    They are of this rank's part of `batch`, and as many as every rank's.
    """
    ranks, device = ready.policy.ranks, ready.policy.device
    own = [batch[index] for index in deal([len(each.token_ids) for each in batch], ranks)]
    lengths = [len(sequence.token_ids) for sequence in own]
    pad = ready.policy.tokenizer.pad_token_id or 0
    row = ready.prompt_tokens + ready.completion_tokens
    picks = micro_batches(lengths, budget_tokens=budget_tokens, layout=ready.layout, row_tokens=row)
    made = (
        collate(own, pick, layout=ready.layout, pad_id=pad, row_tokens=row).to(device)
        for pick in picks
    )
    yield from evened(made, len(picks), ranks, blank=lambda: blank_batch(pad, device))


def loss(
    batch: MicroBatch,
    *,
    ready: Preflight,
    num_tokens: int,
    all_tokens: int = 0,
    coefficient: float = 0.0,
) -> tuple[Tensor, Share]:
    """Return (this micro-batch's share of the loss, what it says about itself).

    `num_tokens` are trained on in the whole step, `all_tokens` run. The experts' auxiliary loss is the
    mean over micro-batches, each weighted by its tokens.
    """
    return ready.policy.whole(
        lambda: _loss(
            batch,
            ready=ready,
            num_tokens=num_tokens,
            all_tokens=all_tokens,
            coefficient=coefficient,
        )
    )


def _loss(
    batch: MicroBatch,
    *,
    ready: Preflight,
    num_tokens: int,
    all_tokens: int,
    coefficient: float,
) -> tuple[Tensor, Share]:
    with ready.memory("forward"):
        hidden, routers = hidden_and_routers(ready.policy, batch, routers=bool(coefficient))
    ready.memory.loss_until(hidden)
    with ready.memory("loss"):
        # sampling settings don't apply: the loss is the model's own cross-entropy
        logp = log_probs(ready.policy, batch, hidden, chunk_rows=ready.recipe.loss_chunk_rows).logp
        if batch.blank:
            return 0.0 * logp.sum(), Share(0.0)
        share = sft_loss(logp, num_tokens=num_tokens)
        probability = logp.detach().exp().sum().item()
        if not coefficient:
            return share, Share(probability)
        real = int(batch.cu_seqlens[-1])
        balance = balance_loss(routers, ready.policy.base.config, batch) * (real / all_tokens)
        return share + coefficient * balance, Share(probability, float(balance.detach()))
