"""Pipeline schedules: how many micro-batches' graphs a stage holds at once, and what waits between stages.

Read in megatron-core 0.20, core/pipeline_parallel/schedules.py: forward_backward_pipelining_without_
interleaving (1F1B), with_interleaving and get_pp_rank_microbatches.
"""

from typing import NamedTuple

from planner.terms.activations import Activations


class Schedule(NamedTuple):
    """One stage's place in a pipeline."""

    stages: int
    stage: int
    chunks: int
    """Virtual stages: parts of the model that one rank runs, 1 without interleaving."""
    micro_batches: int
    """Of one step."""


ALONE = Schedule(1, 0, 1, 1)


def chunks_in_flight(schedule: Schedule) -> int:
    """Return the forwards of one chunk whose backward has not begun, at their most.

    A stage first runs its warm-up forwards, then one forward before each backward. 1F1B: as many as there
    are stages behind it. Interleaved: two for each, and (chunks - 1) groups of as many micro-batches as
    there are stages.
    """
    stages, stage, chunks, micro_batches = schedule
    if stages == 1:
        return 1
    behind = stages - stage - 1
    warm = behind if chunks == 1 else 2 * behind + (chunks - 1) * stages
    return min(warm + 1, chunks * micro_batches)


def in_flight(found: Activations, schedule: Schedule) -> Activations:
    """Return a stage's activations with the graphs of the other micro-batches that wait beside.

    `found`: of one micro-batch through all of the stage's chunks.
    """
    waiting = chunks_in_flight(schedule) - schedule.chunks
    if schedule.stages == 1 or not waiting:
        return found
    others = max(waiting * found.kept // schedule.chunks, -found.kept)
    return found._replace(
        kept=found.kept + others,
        forward=found.forward + others,
        loss_forward=found.loss_forward + others,
        loss_backward=found.loss_backward + others,
        loss_copied=found.loss_copied + others,
        backward=tuple(
            moment._replace(activations=moment.activations + others) for moment in found.backward
        ),
        parts=(*found.parts, ("graphs of other micro-batches in the pipeline", 1, others)),
    )


def waiting_inputs(schedule: Schedule) -> int:
    """Return hidden states that stay between steps: each chunk's last input and its gradient.

    TransformerBlock.input_tensor is an attribute, and retain_grad keeps what is sent back.
    """
    received = schedule.chunks - (1 if schedule.stage == 0 else 0)
    return 2 * received if schedule.stages > 1 else 0
