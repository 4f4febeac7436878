"""PPO's critic: a second model with a head of one number, trained beside the policy.

TRL wraps policy and value model in one module with one optimizer: both graphs stand until one backward, the
critic's after the policy's (experimental/ppo PolicyAndValueWrapper). verl's critic is a worker of its own,
which updates before or after the actor (`critic_apart`).
"""

from typing import NamedTuple

from planner.models.spec import ModelSpec
from planner.run.resolved import Resolved
from planner.terms.activations import Activations
from planner.terms.adapters import lora
from planner.terms.columns import micro_batch
from planner.terms.communication import buckets
from planner.terms.companions import as_trained
from planner.terms.gradients import gradients
from planner.terms.optimizer import optimizer
from planner.terms.term import Term
from planner.terms.zero import standing_gradients

SOURCE = "trl experimental/ppo ppo_trainer.py: PolicyAndValueWrapper"


class Critic(NamedTuple):
    """What training the value model takes."""

    spec: ModelSpec
    r: Resolved
    acts: Activations
    adapters: Term
    states: Term
    step: Term
    gradients: Term
    buckets: Term
    """DDP's or DeepSpeed's."""
    kept: Term
    """Gradients that are there from the start."""
    held: Term
    """Its graph, while the policy's forward and backward run; empty where it trains apart."""

    @property
    def standing(self) -> tuple[Term, ...]:
        """What it has for good beside its weights, which the weights' term counts."""
        return (self.adapters, self.states, self.buckets, self.kept)


def critic(r: Resolved) -> Critic | None:
    """Return the critic of a run that has one."""
    value = r.companion("value")
    if value is None:
        return None
    own = as_trained(r, value)
    acts, states = micro_batch(value.spec, own), optimizer(value.spec, own)
    held = 0 if r.switches.critic_apart else acts.loss_backward
    text = "the critic's graph until its own backward {0:,} B"
    grads, together = gradients(value.spec, own), held and own.placement.zero is not None
    return Critic(
        value.spec,
        own,
        acts,
        lora(value.spec, own),
        states.states,
        states.step,
        grads,
        Term("communication", 0) if together else buckets(value.spec, own),  # one engine of both
        standing_gradients(own, grads),
        Term("activations", held, text, (held,), SOURCE),
    )


def rollout_logits(model: ModelSpec, r: Resolved) -> Term:
    """Return the logits of every generated token that TRL's PPO keeps until the rollout is scored."""
    if not r.switches.keeps_rollout_logits:
        return Term("logits", 0)
    rows = r.sequences * r.grad_accum * r.completion_tokens
    return Term(
        "logits",
        4 * rows * model.vocab,
        "{0:,} generated tokens x {1:,} vocabulary x 4 B",
        (rows, model.vocab),
        "trl trainer/utils.py batch_generation: output_scores stacked, returned and kept",
    )
