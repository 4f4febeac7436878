"""The rehearsal: every phase of a run once, at the longest lengths that its recipe allows."""

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from planner.errors import VramwiseError
from planner.run.recipe import Task
from planner.units import format_bytes
from profiler.recording import Recording
from profiler.torch_recorder import LiveRecording, record
from trainer.batching import MicroBatch, ScoredSequence, collate
from trainer.config import TrainSection
from trainer.engines.transformers import TransformersEngine
from trainer.evaluation_phase import rehearse_evaluation
from trainer.losses import sft_loss
from trainer.model import Policy
from trainer.router_loss import balance_loss
from trainer.scoring import hidden_and_routers, log_probs
from trainer.shared_prefix import collate_shared
from trainer.stepping import make_run_optimizer

if TYPE_CHECKING:
    from trainer.preflight import Preflight


def rehearse(ready: "Preflight", train: TrainSection) -> Recording:
    """Run every phase once at full size and return what each held; halves the micro-batch until it fits."""
    while True:
        try:
            return _rehearse_once(ready, train)
        except torch.OutOfMemoryError:
            pass
        ready.policy.clear_gradients()
        ready.stepper.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        try:
            ready.stepper.budget.halve(ready.plan.resolved.seq_tokens)
        except VramwiseError as error:
            raise VramwiseError(
                f"preflight: {error.message}; planned {format_bytes(ready.plan.peak_bytes)} of "
                f"{format_bytes(ready.plan.capacity_bytes)}",
                hint=error.hint,
            ) from None


def _rehearse_once(ready: "Preflight", train: TrainSection) -> Recording:
    """Return what every phase of a step holds at the longest lengths; weights stay as they are."""
    policy = ready.policy
    # its own optimizer: state is made for real, and thrown away with it
    optimizer = make_run_optimizer(policy, ready.recipe, train)
    with record(policy.model, optimizer, subject="vramwise preflight") as live:
        if policy.sharded is not None:
            with live.phase("load"):  # what the first pass held
                policy.agreed(policy.sharded.gather_root)
        with live.phase("step"):
            policy.agreed(lambda: _step_without_change(policy, optimizer))
        engine = ready.engine
        if isinstance(engine, TransformersEngine):  # vLLM has its whole pool since it started
            rows = engine.max_rows(ready.prompts_per_step * ready.num_generations)
            with live.phase("rollout"):
                policy.agreed(
                    lambda: engine.rehearse(
                        rows,
                        num_prompts=-(-rows // ready.num_generations),
                        prompt_tokens=ready.prompt_tokens,
                        completion_tokens=ready.completion_tokens,
                    )
                )
        if ready.held_out:
            with live.phase("evaluation"):
                policy.agreed(lambda: rehearse_evaluation(ready, _worst_batch(ready)))
        for make in (_worst_batch, _worst_shared_batch)[: 1 if ready.sharing is None else 2]:
            with policy.training():
                policy.one_pass(partial(_learn, ready, live, make))
            policy.clear_gradients()
            optimizer.zero_grad(set_to_none=True)
    return live.recording


def _learn(
    ready: "Preflight", live: LiveRecording, make: Callable[["Preflight"], MicroBatch]
) -> bool:
    """Run a micro-batch forward and backward, each phase by its name."""
    batch = make(ready)
    share = ready.policy.whole(lambda: _loss(ready, live, batch))
    with live.phase("loss"):  # the head's backward is the loss's
        share.backward()
    return True


def _loss(ready: "Preflight", live: LiveRecording, batch: MicroBatch) -> Tensor:
    policy = ready.policy
    with live.phase("forward"):
        hidden, routers = hidden_and_routers(policy, batch, routers=bool(ready.recipe.router_loss))
    if hidden.requires_grad:
        hidden.register_hook(lambda _: live.turn("backward"))
    with live.phase("loss"):
        scored = log_probs(policy, batch, hidden, entropy=True, **ready.shape)
        share = sft_loss(scored.logp, num_tokens=len(batch.targets))
        if routers:
            share = share + balance_loss(routers, policy.base.config, batch)
    return share


def _step_without_change(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients of 0 at a rate of 0: optimizer state exists, weights are as before.

    Twice: in the first one a tensor's state is made when its turn comes, in the others all are there.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _, parameter in policy.stepped():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _worst_batch(ready: "Preflight") -> MicroBatch:
    """Return a micro-batch of the longest sequences that the budget takes."""
    length = ready.prompt_tokens + ready.completion_tokens
    count = max(1, ready.stepper.budget.tokens // length)
    scored = ready.completion_tokens if ready.recipe.task is Task.GRPO else length - 1
    sequence = ScoredSequence(
        token_ids=(ready.policy.tokenizer.eos_token_id or 0,) * length,
        scored=(False,) * (length - scored) + (True,) * scored,
    )
    batch = collate([sequence] * count, range(count), layout=ready.layout, row_tokens=length)
    return batch.to(ready.policy.device)


def _worst_shared_batch(ready: "Preflight") -> MicroBatch:
    """Return the largest micro-batch of shared prompts, mask and all, of a run that shares them."""
    assert ready.sharing is not None
    groups = ready.sharing.worst(
        ready.stepper.budget.tokens,
        prompt=ready.prompt_tokens,
        generations=ready.num_generations,
        token=ready.policy.tokenizer.eos_token_id or 0,
    )
    return collate_shared(
        groups,
        range(len(groups) * ready.num_generations),
        pad_id=0,
        dtype=ready.policy.dtype,
        device=ready.policy.device,
    )
