"""Linear attention: gated delta net, KDA, lightning attention. A state of fixed size, no cache of tokens."""

from dataclasses import replace

from planner.layer.program import Program
from planner.layer.tape import Value
from planner.mixers import attention as a
from planner.mixers.delta import delta, is_delta
from planner.mixers.mixer import Cache, Linears, Mixer
from planner.mixers.recurrence import recurrent, running_and_block_end, states
from planner.models.spec import LayerSpec


def record(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
    """Record a delta net, or lightning attention."""
    return (delta if is_delta(layer) else recurrent)(p, x, layer, linears, width)


MIXER = Mixer(
    record=record,
    assumes="flash-linear-attention and causal-conv1d",
    keeps_apart=False,
    reads_images=False,
    divides=False,
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=states),
    pages=replace(a.PAGES, states=running_and_block_end),
    lora_roots=a.ROOTS | {"linear_attn"},
)
