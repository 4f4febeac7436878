"""What a training forward holds beside its layers: NEFTune's noise, the router logits of a mixture's auxiliary loss."""

from typing import TYPE_CHECKING

from planner.models.spec import MlpKind, ModelSpec
from planner.run.resolved import Resolved

if TYPE_CHECKING:
    from planner.terms.activations import Activations


def with_noise_and_routers(
    model: ModelSpec, r: Resolved, found: "Activations", tokens: int, *, width: int, act: int
) -> "Activations":
    """Return activations with them; `width` bytes an element of the stream, `act` of a linear's output.

    The noise lives before the first layer: the embeddings' output, the noise, (this trainer: the noise in
    its sample's measure,) and their sum. Router logits wait from their layer to the loss, where each layer's
    softmax is made in fp32 and kept for its backward; their gradients wait for their layer's backward.
    """
    if r.neftune:
        found = _with_noise(model, r, found, tokens, width)
    mixtures = [
        (layer.mlp.num_experts, layer.count)
        for layer in model.layers
        if layer.mlp.kind is MlpKind.MOE
    ]
    if not r.router_loss or not mixtures:  # a part of a model, such as a tower, has none
        return found
    count = sum(layers for _, layers in mixtures)
    logits = sum(experts * layers for experts, layers in mixtures) * tokens * act
    kept_softmax = logits // act * 4
    largest = max(experts for experts, _ in mixtures) * tokens * 4
    last, first = found.backward[:-1], found.backward[-1]
    return found._replace(
        kept=found.kept + logits,
        # the layer that runs has its own anyway
        forward=found.forward + logits - logits // count,
        loss_forward=found.loss_forward + logits,
        loss_backward=found.loss_backward + logits,
        loss_copied=found.loss_copied + logits,
        balance=kept_softmax + largest,
        backward=(
            *(m._replace(activations=m.activations + logits) for m in last),
            first._replace(activations=first.activations + logits // count),
        ),
        parts=(*found.parts, ("router logits", count, logits / count)),
    )


def _with_noise(
    model: ModelSpec, r: Resolved, found: "Activations", tokens: int, width: int
) -> "Activations":
    own = r.switches.trace_step == "own"
    lengths = (
        8 * tokens if own else 0
    )  # of each token's sample, held from one micro-batch to the next
    parts = found.parts
    fixed = sum(int(count * each) for name, count, each in parts if name == "cosines and sines")
    noise = fixed + (4 if own else 3) * model.hidden * width * tokens
    return found._replace(
        kept=found.kept + lengths,
        forward=max(found.forward, noise) + lengths,
        loss_forward=found.loss_forward + lengths,
        loss_backward=found.loss_backward + lengths,
        loss_copied=found.loss_copied + lengths,
        backward=tuple(m._replace(activations=m.activations + lengths) for m in found.backward),
        parts=(*parts, ("lengths of the noise's samples", 1, lengths)) if own else parts,
    )
