"""Activations of a micro-batch: one forward, or several of embeddings whose graphs wait for one loss."""

from dataclasses import replace

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.run.task_fields import Column
from planner.terms.activations import Activations, activations
from planner.terms.pipeline import in_flight


def micro_batch(model: ModelSpec, r: Resolved) -> Activations:
    """Return the activations of one micro-batch."""
    if not r.columns:
        return in_flight(activations(model, r, r.tokens), r)
    each = [activations(model, one_column(r, column), _tokens(column)) for column in r.columns]
    sizes = [_tokens(column) for column in r.columns]
    largest = each[sizes.index(max(sizes))]
    if r.cached:
        return largest
    # every column waits for the loss; the last one to run forward runs backward first
    others = sum(column.kept for column in each) - largest.kept
    outputs = _outputs(model, r)
    # a trained norm's output is among what its graph keeps; of a frozen one the features alone hold it
    last = 0 if r.method is Method.FULL else max(sizes) * model.hidden * element_bytes(r.dtype)
    return largest._replace(
        kept=largest.kept + others,
        forward=largest.forward + others + outputs,
        loss_forward=largest.loss_forward + others + outputs,
        loss_backward=largest.loss_backward + others + outputs + last,
        loss_copied=largest.loss_copied + others + outputs,
        backward=(
            *(
                moment._replace(activations=moment.activations + others + outputs + last)
                for moment in largest.backward
            ),
            # the first column runs backward last, when the others' gradients are all there
            *(
                moment._replace(activations=moment.activations + outputs + last, layers_left=0)
                for moment in largest.backward
            ),
        ),
        host=sum(column.host for column in each),
        parts=(
            *largest.parts,
            ("graphs of the other texts", 1, others),
            ("last hidden states, in the features", 1, outputs),
        ),
    )


def one_column(r: Resolved, column: Column) -> Resolved:
    """Return the choices of one forward of a micro-batch."""
    return replace(
        r,
        sequences=column.sequences,
        prompt_tokens=0,
        completion_tokens=column.tokens,
        columns=(),
    )


def _tokens(column: Column) -> int:
    return column.sequences * column.tokens


def _outputs(model: ModelSpec, r: Resolved) -> int:
    """Return the hidden states of the other columns, which sentence-transformers' features hold."""
    if len(r.columns) < 2:
        return 0
    width = element_bytes(r.dtype)
    largest = max(_tokens(column) for column in r.columns)
    return (sum(_tokens(column) for column in r.columns) - largest) * model.hidden * width
