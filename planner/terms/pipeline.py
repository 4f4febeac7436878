"""What a pipeline adds to a stage: the graphs of micro-batches under way, and what waits between stages."""

from planner.models.spec import ModelSpec
from planner.run.resolve import Resolved
from planner.terms.activations import Activations, op_settings
from planner.terms.term import Term


def in_flight(found: Activations, r: Resolved) -> Activations:
    """Return a stage's activations with the graphs of the other micro-batches that wait beside.

    `found`: of one micro-batch through all of the stage's chunks.
    """
    stage = r.stage
    others = found.kept * (stage.chunks_in_flight - stage.chunks) // stage.chunks
    if not others:
        return found
    return found._replace(
        kept=found.kept + others,
        forward=found.forward + others,
        loss_forward=found.loss_forward + others,
        loss_backward=found.loss_backward + others,
        loss_copied=found.loss_copied + others,
        backward=tuple(
            moment._replace(activations=moment.activations + others) for moment in found.backward
        ),
        parts=(*found.parts, ("graphs of the pipeline's other micro-batches", 1, others)),
    )


def passed_on(model: ModelSpec, r: Resolved) -> Term:
    """Return what came from the neighbour stages: a chunk's input and, on its way back, its gradient.

    megatron-core: TransformerBlock.input_tensor is an attribute and schedules.backward_step retains its
    gradient, so both stay from a step to the next.
    """
    stage = r.stage
    received = stage.chunks - stage.first if stage.stages > 1 else 0
    one = r.tokens * op_settings(model, r).stream(model.hidden)
    return Term(
        "communication",
        2 * received * one,
        "{0} input(s) from the stage before x {1:,} B, each with its gradient",
        (received, one),
        "megatron-core 0.20 core/pipeline_parallel/schedules.py: set_input_tensor, retain_grad",
    )
