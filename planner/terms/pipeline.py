"""What a pipeline adds to a stage: the graphs of micro-batches under way, and what waits between stages."""

from planner.models.spec import ModelSpec
from planner.run.resolved import Resolved
from planner.terms.activations import Activations, op_settings
from planner.terms.logits import logit_width
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
    """Return what stays between steps of what the neighbour stages sent."""
    stage, one = r.stage, _stream(model, r)
    received = stage.chunks - stage.first if stage.stages > 1 else 0
    if r.switches.pipelines == "megatron":
        return Term(
            "communication",
            2 * received * one,
            "{0} input(s) from the stage before x {1:,} B, each with its gradient",
            (received, one),
            MEGATRON,
        )
    sent = stage.chunks - stage.last if stage.stages > 1 else 0
    counted = stage.micro_batches * (2 * received + sent)
    return Term(
        "communication",
        counted * one,
        "{0} micro-batches x {1:,} B: inputs and their gradients of {2} chunk(s), gradients for {3}",
        (stage.micro_batches, one, received, sent),
        TORCH,
    )


def under_way(model: ModelSpec, r: Resolved) -> tuple[Term, ...]:
    """Return what waits beside the graphs while micro-batches run: buffers, outputs, the last stage's logits.

    torch's stage has a buffer for every micro-batch's input and gradient from its first step on, holds each
    output until its backward, an input's gradient to the end of the step, and all of the last stage's
    outputs. The inputs under way are among the graphs.
    """
    stage = r.stage
    if stage.stages == 1 or r.switches.pipelines != "torch":
        return ()
    one, flying = _stream(model, r), stage.chunks_in_flight
    received, sent = stage.chunks - stage.first, stage.chunks - stage.last
    waiting = max(0, stage.micro_batches * received - flying)
    done = max(0, stage.micro_batches - -(-flying // stage.chunks)) * received
    count = waiting + done + stage.micro_batches * sent + flying
    passed = Term(
        "communication",
        count * one,
        "{0} hidden states of {1:,} B: buffers of {2} micro-batches, {3} outputs under way",
        (count, one, stage.micro_batches, flying),
        TORCH,
    )
    if not stage.last:
        return (passed,)
    each = r.tokens * model.vocab * logit_width(r)
    made = stage.micro_batches - 1
    outputs = Term(
        "logits",
        made * each,
        "{0} earlier micro-batches' logits x {1:,} B, to be merged at the end of the step",
        (made, each),
        TORCH,
    )
    return passed, outputs


def _stream(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of one micro-batch's hidden states on this rank."""
    return r.tokens * op_settings(model, r).stream(model.hidden)


MEGATRON = (
    "megatron-core 0.20 core/pipeline_parallel/schedules.py: set_input_tensor is an attribute of the block, "
    "backward_step retains its gradient"
)
TORCH = "torch 2.13 distributed/pipelining/stage.py: args_recv_info, grad_recv_info, fwd_cache, output_chunks"
