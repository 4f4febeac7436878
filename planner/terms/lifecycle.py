"""Evaluating, saving and resuming: what a run holds when it does not train.

transformers 5.19 trainer.py evaluation_loop: the loss of a batch without a graph; where metrics want them,
logits of all batches stay on the GPU until eval_accumulation_steps, each time concatenated into a new tensor
(EvalLoopContainer, nested_concat). _save and accelerate's get_state_dict: sharded weights are gathered on
rank 0, unit by unit, into host memory. _load_optimizer_and_scheduler: states come through host memory on
one GPU and straight to the device on several.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.run.tasks import TASKS, Head
from planner.terms.activations import op_settings
from planner.terms.adapters import trained_parameters
from planner.terms.columns import micro_batch
from planner.terms.gradients import gradients
from planner.terms.host import node_ranks, of_node
from planner.terms.loading import loading_host
from planner.terms.logits import logits
from planner.terms.term import Term
from planner.terms.weights import gathered, weights
from planner.terms.window import gathered_module
from planner.terms.zero import standing_bucket, standing_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.phases import Phase

TRAINER = "transformers trainer.py evaluation_loop, trainer_pt_utils.py EvalLoopContainer"
STANDING = ("weights", "adapters", "optimizer", "overhead", "engine")


class Moment(NamedTuple):
    """One phase beside training."""

    name: str
    terms: tuple[Term, ...]


def lifecycle(model: ModelSpec, r: Resolved, phases: "Sequence[Phase]") -> list[Moment]:
    """Return the phases that the recipe asks for: evaluate, save, resume."""
    forward = next(phase for phase in phases if phase.name == "forward")
    standing = tuple(term for term in forward.terms if term.name in STANDING)
    if r.placement.gathers:  # the forward's weights include what it gathers
        standing = (weights(model, r), *(term for term in standing if term.name != "weights"))
    standing = (*standing, standing_bucket(model, r), standing_gradients(r, gradients(model, r)))
    found = []
    if r.eval_samples and TASKS[r.task].generates:
        rollout = next(phase for phase in phases if phase.name == "rollout")
        found.append(Moment("evaluate", rollout.terms))
    elif r.eval_samples:
        found.append(Moment("evaluate", (*standing, *_evaluation(model, r))))
    if r.save != "none":
        found.append(Moment("save", (*standing, _save(model, r))))
    if r.resume:
        found.append(Moment("resume", standing))
    return found


def lifecycle_host(model: ModelSpec, r: Resolved) -> tuple[Term, ...]:
    """Return a node's host memory of the same and of loading: the largest, for they do not overlap.

    A whole checkpoint is made by the first rank alone: of accelerate get_state_dict, of DeepSpeed's
    stage3_gather_16bit_weights_on_model_save. Evaluating and resuming every rank has its own copy.
    """
    ranks = node_ranks(r)
    wanted = [loading_host(model, r)]
    if r.eval_samples and r.eval_logits:
        wanted.append(of_node(_on_host(model, r), ranks))
    if r.save != "none":
        wanted.append(of_node(_saved(model, r, "saved"), ranks if r.save == "sharded" else 1))
    if r.resume:
        wanted.append(of_node(_saved(model, r, "loaded"), ranks))
    largest = max(wanted, key=lambda term: term.bytes)
    return (largest,) if largest.bytes else ()


def _evaluation(model: ModelSpec, r: Resolved) -> tuple[Term, ...]:
    """Return a batch's forward without a graph, and the logits of the batches before it."""
    rows = r.eval_batch * TASKS[r.task].rows
    own = replace(r, sequences=rows, columns=(), cached=False, checkpointing=r.checkpointing)
    # the model's forward holds the embeddings' output beside the layer at work
    embedded = own.tokens * model.hidden * op_settings(model, own).residual
    layer = micro_batch(model, own).no_grad + embedded
    head = logits(model, own).score
    hidden = own.tokens * model.hidden * element_bytes(r.compute_dtype)
    text = "{0} sequence(s), the embeddings' output and one layer without a graph {1:,} B"
    work = Term("activations", layer, text, (rows, layer), "planner/layer/blocks.py")
    if head.bytes + hidden > layer:
        work = Term("activations", hidden, "last hidden states {0:,} B", (hidden,), TRAINER)
    else:
        head = Term("logits", 0)
    if not r.eval_logits:
        return work, head
    return work, _gathered_logits(model, own)


def _gathered_logits(model: ModelSpec, r: Resolved) -> Term:
    """Return the logits that wait on the device: those before, a batch's, and both concatenated."""
    batch = r.gpus * r.tokens * logit_bytes(model, r)
    count = _batches(r)
    # the last batch's forward finds those before it and the variable of the one before; then it is
    # concatenated with them into a new tensor
    head = logits(model, r).score.bytes if r.law.kind == "full" else batch
    running = (count if count > 1 else 0) * batch + head
    joined = (2 * count if count > 1 else 1) * batch
    return Term(
        "logits",
        max(running, joined),
        "the larger of {0} batch(es) x {1:,} B of logits, twice when concatenated, {2:,} B, and of a "
        "batch's loss beside them {3:,} B",
        (count, batch, joined, running),
        TRAINER,
    )


def logit_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of what a model answers for one token."""
    act = element_bytes(r.compute_dtype)
    width = 4 if r.autocast and r.switches.fp32_outputs else act
    return (
        width
        * {Head.VOCABULARY: model.vocab, Head.SCORE: 1, Head.NONE: model.hidden}[TASKS[r.task].head]
    )


def _batches(r: Resolved) -> int:
    """Return the batches whose logits are on the device at most."""
    samples = -(-r.eval_samples // (r.eval_batch * r.gpus))
    return min(samples, r.eval_accumulation or samples)


def _on_host(model: ModelSpec, r: Resolved) -> Term:
    """Return numpy's fp32 logits of every sample, and their concatenation where it is made in parts."""
    tokens = r.eval_samples * TASKS[r.task].rows * r.seq_tokens
    each = 4 * logit_bytes(model, r) // _width(r)
    parts = 2 if r.eval_accumulation else 1
    return Term(
        "logits",
        parts * tokens * each,
        "{0:,} tokens x {1:,} B in fp32 x {2}",
        (tokens, each, parts),
        "transformers trainer_pt_utils.py nested_numpify: numpy has no bf16",
    )


def _width(r: Resolved) -> int:
    return 4 if r.autocast and r.switches.fp32_outputs else element_bytes(r.compute_dtype)


def _save(model: ModelSpec, r: Resolved) -> Term:
    """Return what rank 0 gathers at once; unsharded tensors go to the host one by one."""
    if r.save == "sharded" or not r.placement.gathers:
        return Term("weights", 0)
    ranks = r.placement.weight_shards
    if r.placement.window:  # engine.py _zero3_consolidated_16bit_state_dict: a module at a time
        size, what = gathered_module(model) * element_bytes(r.dtype), "a module"
    else:
        size, what = gathered(model, r, 1).bytes, "a unit"
    text = "gathered of {0} ranks for saving, {1} at a time {2:,} B"
    return Term("weights", size, text, (ranks, what, size), "accelerate get_state_dict")


def _saved(model: ModelSpec, r: Resolved, what: str) -> Term:
    """Return the tensors of a checkpoint in host memory: what is trained, whole, and its states."""
    trained = trained_parameters(model, r)
    width = element_bytes(r.dtype if r.method is Method.FULL else r.adapter_dtype)
    shards = r.placement.weight_shards if r.save == "sharded" else 1
    size = -(-trained * width // shards)
    return Term(
        "weights",
        size,
        f"{what}: {{0:,}} trained parameters x {{1}} B / {{2}} shard(s)",
        (trained, width, shards),
        "safetensors: a state dict is made in host memory whole",
    )
