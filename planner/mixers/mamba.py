"""Mamba 1 and 2: a convolution's and a selective scan's state, no cache of tokens."""

from dataclasses import replace

from planner.layer.program import Program
from planner.layer.tape import Value
from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Linears, Mixer
from planner.mixers.recurrence import recurrent, running_and_block_end, states
from planner.models.spec import LayerSpec, MixerSpec


def record(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
    """Record a selective scan, or a convolution alone: a state of one part."""
    alone = len(layer.mixer.state_shapes) == 1
    return (_convolution if alone else recurrent)(p, x, layer, linears, width)


def _convolution(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
    """Record LFM2's C * conv(B * x) (modeling_lfm2.py, Lfm2ShortConv): every factor is saved."""
    tape, inner = p.tape, width if p.s.quantized else p.s.act
    size = layer.mixer.inner_dim * inner
    both = p.linear(x, linears.ins[0], width)
    b, c, fed = tape.split(both, (size, size, size))
    mixed = tape.op((b, fed), size, saves=(b, fed))
    convolved = tape.op((mixed,), size, saves=(mixed,))
    tape.drop(mixed)  # bound to the convolution's result
    opened = tape.op((c, convolved), size, saves=(c, convolved))
    y = tape.view_copy(opened)  # channels come last again
    tape.drop(opened)
    assert linears.out is not None
    out = p.linear(y, linears.out, inner)
    tape.drop(y, convolved, b, c, fed, both)
    return out


def states_held(mixer: MixerSpec) -> int:
    """Return the states of a sequence: Mamba-2 (state [heads, head_dim, d_state]) also keeps a
    checkpoint inside a prefill."""
    mamba2 = len(mixer.state_shapes[-1]) == 3
    return running_and_block_end(mixer) + mamba2


MIXER = Mixer(
    record=record,
    assumes="mamba-ssm and causal-conv1d",
    keeps_apart=False,
    reads_images=False,
    divides=False,
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=states),
    pages=replace(a.PAGES, states=states_held),
    lora_roots=frozenset({"mamba", "mixer", "conv"}),
)
