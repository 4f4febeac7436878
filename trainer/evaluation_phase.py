"""What an evaluation holds: its phase of the plan, and its part of the rehearsal."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from planner.errors import VramwiseError
from planner.phases import Phase, budget
from planner.plan import Plan
from planner.run.recipe import Task
from planner.terms.generation import rolling
from planner.units import format_bytes
from trainer.batching import MicroBatch
from trainer.engines.transformers import TransformersEngine
from trainer.scoring import hidden_rows, log_probs

if TYPE_CHECKING:
    from trainer.preflight import Preflight


def evaluation_phase(planned: Plan, *, prompts: int) -> Phase:
    """Return what an evaluation holds: a rollout of the same engine, or a forward without a graph."""
    if planned.resolved.task is Task.GRPO:
        rollout = planned.phase("rollout")
        kept = [term for term in rollout.terms if term.name != "activations"]
        work = rolling(planned.spec, planned.resolved, prompts=prompts)
        terms = (*kept, *([work] if work.bytes else []))
        return Phase("evaluation", terms, sum(term.bytes for term in terms))
    # the planner's own evaluation, of micro-batches as large as training's
    own = replace(planned.resolved, eval_samples=1, eval_batch=planned.resolved.batch)
    phases = budget(planned.spec, own, planned.machine).phases
    return replace(next(phase for phase in phases if phase.name == "evaluate"), name="evaluation")


@torch.no_grad()
def rehearse_evaluation(ready: "Preflight", batch: MicroBatch) -> None:
    """Hold what the largest evaluation holds: a full cache, or a forward of the worst micro-batch."""
    engine, train = ready.engine, ready.train
    if engine is None:

        def score() -> object:
            hidden = hidden_rows(ready.policy, batch)
            return log_probs(ready.policy, batch, hidden, chunk_rows=ready.recipe.loss_chunk_rows)

        ready.policy.whole(score)
    elif isinstance(engine, TransformersEngine):  # vLLM has its whole pool since it started
        generations = train.evaluation.generations
        rows = engine.max_rows(ready.held_out * generations)
        engine.rehearse(
            rows,
            num_prompts=-(-rows // generations),
            prompt_tokens=ready.prompt_tokens,
            completion_tokens=ready.completion_tokens,
        )


def check_evaluation_fits(planned: Plan, *, prompts: int) -> None:
    """Raise VramwiseError when training fits but an evaluation does not."""
    needed = evaluation_phase(planned, prompts=prompts).total_bytes
    if needed > planned.capacity_bytes:
        raise VramwiseError(
            f"train.validation: an evaluation needs {format_bytes(needed)}, "
            f"{format_bytes(planned.capacity_bytes)} on the device",
            hint="lower recipe.engine.max_num_seqs or recipe.micro_batch_size",
        )
