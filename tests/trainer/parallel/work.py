"""What the two-rank tests run on every rank: a prepared run, its gradients on one batch, its losses."""

import copy
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from planner.errors import VramwiseError
from planner.terms.activations import MLP_TILE_TOKENS
from trainer import stepping
from trainer.checkpointing import decoder_layers
from trainer.config import parse_run
from trainer.data import Order, load_samples
from trainer.grpo import Grpo
from trainer.parallel.ranks import Ranks
from trainer.preflight import longest_prompt, prepare
from trainer.prompt_data import read_prompts
from trainer.rewards import load_rewards
from trainer.rollout import sampling_settings
from trainer.session import Session
from trainer.sft import loss, make_order, next_batch, split
from trainer.validation import loss_measure, read_held_out, read_run_examples, reward_measure


def prepared(ranks: Ranks, document: dict[str, Any], root: str) -> Any:
    """Return (run, train section, the run ready to step)."""
    run, train = parse_run(document, root=Path(root))
    balanced = bool(train.router_aux_loss_coef)
    return run, train, prepare(run, train, router_loss=balanced, ranks=ranks)


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
    examples = read_run_examples(samples, run, train, ready.policy.tokenizer)
    order, _ = make_order(examples, run, train)
    return lambda: next_batch(examples, order, ready=ready)


def sft_gradients(
    ranks: Ranks, document: dict[str, Any], root: str, budget: int = 64, tile: int = MLP_TILE_TOKENS
) -> Any:
    """Return the loss and the gradients of one batch; `budget` 0: a sequence is a micro-batch."""
    with patch("trainer.preflight.MLP_TILE_TOKENS", tile):
        run, train, ready = prepared(ranks, document, root)
    batch = sft_batches(ready, run, train, root)()
    lengths = [len(sequence.token_ids) for sequence in batch]
    if not budget:
        budget = max(lengths)
        assert min(lengths) > budget // 2, "two would be one micro-batch"
    total = 0.0
    with ready.policy.training():
        for part in split(batch, budget, ready=ready):
            share, _ = loss(
                part,
                ready=ready,
                num_tokens=sum(sum(sequence.scored) for sequence in batch),
                all_tokens=sum(lengths),
                coefficient=train.router_aux_loss_coef or 0.0,
            )
            share.backward()
            total += share.item()
    return ready.policy.ranks.sum(total), gradients(ready.policy)


def sft_step(ready: Any, batch: Any, step: int) -> Any:
    """Make one optimizer step on a batch; return its update."""
    count = sum(sum(sequence.scored) for sequence in batch)
    return ready.stepper.run(
        step,
        micro_batches=lambda budget: split(batch, budget, ready=ready),
        loss=lambda part: loss(part, ready=ready, num_tokens=count),
        longest=max(len(sequence.token_ids) for sequence in batch),
    )


def sft_curve(ranks: Ranks, document: dict[str, Any], root: str, steps: int) -> list[float]:
    """Return the losses and gradient norms of `steps` steps."""
    run, train, ready = prepared(ranks, document, root)
    take = sft_batches(ready, run, train, root)
    figures = []
    for step in range(steps):
        update = sft_step(ready, take(), step)
        figures += [update.loss, update.grad_norm]
    return figures


def grpo_gradients(ranks: Ranks, document: dict[str, Any], root: str) -> Any:
    """Return the loss and the gradients of a step of GRPO, and its share of flat groups and of cut completions."""
    found: list[dict[str, torch.Tensor]] = []
    (logged,), _ = grpo_run(ranks, document, root, 1, stepped=found)
    shares = logged["frac_reward_zero_std"], logged["completions/truncated_frac"]
    return logged["loss"], found[0], shares


def grpo_run(
    ranks: Ranks,
    document: dict[str, Any],
    root: str,
    steps: int,
    stepped: list[dict[str, torch.Tensor]] | None = None,
) -> Any:
    """Return the logged figures of `steps` steps, and every trained weight behind them.

    `stepped` gets the gradients of each.
    """
    run, train, ready = prepared(ranks, document, root)
    apply_step = stepping.apply_step

    def noted(*arguments: Any, **options: Any) -> Any:
        if stepped is not None:
            stepped.append(gradients(ready.policy))
        return apply_step(*arguments, **options)

    ranks = ready.ranks
    samples = load_samples(train.dataset, root=Path(root))
    limit = longest_prompt(run)
    prompts = read_prompts(
        samples, ready.policy.tokenizer, train.dataset, limit=limit, rewards=train.rewards
    )
    order = Order(size=len(prompts), seed=train.seed, shuffle=train.dataset.shuffle)
    output = Path(root) / f"out-{ranks.size}-{ranks.rank}"
    output.mkdir(exist_ok=True)
    session = Session(train, output=output, policy=ready.policy, stepper=ready.stepper, order=order)
    settings = sampling_settings(
        train.sampling,
        ready.policy.tokenizer,
        num_generations=ready.num_generations,
        max_new_tokens=ready.completion_tokens,
    )
    with closing(load_rewards(train.rewards, root=Path(root))) as rewards:
        grpo = Grpo(train, prompts, order, rewards, ready, ready.engine, settings, session)
        with session, ready.device, patch("trainer.stepping.apply_step", noted):
            for step in range(steps):
                grpo.step(step)
    weights = {
        name: getattr(parameter, "full_tensor", lambda p=parameter: p)().detach().clone()
        for name, parameter in ready.policy.trainable()
    }
    return session.metrics, weights


def evaluation(ranks: Ranks, document: dict[str, Any], root: str) -> Any:
    """Return the figures of an evaluation before the first step, and this rank's sampled prompts."""
    run, train, ready = prepared(ranks, document, root)
    held_out = load_samples(train.validation, root=Path(root))
    if ready.engine is None:
        examples = read_held_out(held_out, run, train, ready.policy.tokenizer)
        return loss_measure(examples, ready)(0), []
    asked: list[int] = []
    generate = ready.engine.generate

    def counted(prompts: Any, settings: Any) -> Any:
        asked.append(len(prompts))
        return generate(prompts, settings)

    ready.engine.generate = counted
    with closing(load_rewards(train.rewards, root=Path(root))) as rewards:
        measure = reward_measure(held_out, rewards, ready, state=lambda done: {})
        return measure(0), asked


def every(ranks: Ranks, work: Any, cases: Any) -> list[Any]:
    """Return what `work(ranks, *case)` returns for each of `cases`."""
    return [work(ranks, *case) for case in cases]


def spoiled(
    ranks: Ranks, document: dict[str, Any], root: str, kind: str, layer: int, call: int
) -> Any:
    """Return two steps' figures where, on rank 1 alone, the MLP of a layer fails in its n-th call.

    `kind`: "memory" runs out, or "nan" comes of it; "" nothing happens.
    """
    run, train, ready = prepared(ranks, document, root)
    ranks = ready.ranks
    take = sft_batches(ready, run, train, root)
    calls = 0

    def spoil(_module: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call or ranks.rank != 1:
            return None
        if kind == "memory":
            raise torch.OutOfMemoryError("as if")
        return (inputs[0] * float(kind),)

    if kind:
        decoder_layers(ready.policy.base)[layer].mlp.register_forward_pre_hook(spoil)
    before = {name: local.detach().clone() for name, local in ready.policy.stepped()}
    found: list[Any] = []
    for step in range(2):
        update = sft_step(ready, take(), step)
        stays = all(torch.equal(before[name], local) for name, local in ready.policy.stepped())
        found.append((update.loss, update.grad_norm, update.skipped, stays, update.scale))
    return found, ready.stepper.budget.halvings, calls


def short_of_memory(ranks: Ranks, document: dict[str, Any], root: str, call: int) -> Any:
    """Return what a rollout makes where, on rank 1, memory runs out in the n-th forward."""
    _, train, ready = prepared(ranks, document, root)
    ranks = ready.ranks
    prompts = [list(range(5, 9 + 3 * place)) for place in range(3)]
    settings = sampling_settings(
        train.sampling, ready.policy.tokenizer, num_generations=4, max_new_tokens=6
    )
    calls = 0

    def spoil(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call and ranks.rank == 1:
            raise torch.OutOfMemoryError("as if")

    ready.policy.base.model.norm.register_forward_pre_hook(spoil)
    # rank 0 has one prompt, rank 1 two: they end after different numbers of tokens
    own = prompts[:1] if ranks.rank == 0 else prompts[1:]
    made = ready.engine.generate(own, replace(settings, seed=3, temperature=1e-3))
    return [list(each.token_ids) for each in made], ready.engine._wave


def step_zero(
    ranks: Ranks, document: dict[str, Any], root: str, memory: list[str] | None = None
) -> Any:
    """Return planned and measured bytes by phase, and what was said; or why the run does not fit.

    `memory`: what each rank's machine has.
    """
    document = copy.deepcopy(document)
    if memory:
        document["train"]["device_memory"] = memory[ranks.rank]
    run, train = parse_run(document, root=Path(root))
    said: list[str] = []
    try:
        ready = prepare(run, train, ranks=ranks, say=said.append)
    except VramwiseError as error:
        return error.message.partition(";")[0]
    return ready.planned_bytes, ready.measured_bytes, "\n".join(said)
