"""What recurrent mixers share: projections around a fused scan, and a state of fixed size."""

from math import prod

from planner.layer.program import Program
from planner.layer.tape import Value
from planner.mixers.mixer import Linears
from planner.models.spec import LayerSpec, MixerSpec


def recurrent(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
    """Record Mamba or linear attention with its fused kernels (mamba-ssm, flash-linear-attention).

    The kernels save the projections and their own output and recompute the rest in backward.
    """
    tape = p.tape
    inner = (layer.mixer.inner_dim or x.size / width) * p.s.act
    parts = tuple(p.linear(x, module, width) for module in linears.ins[:2])
    mixed = tape.op(parts, inner, saves=parts, scratch=sum(part.size for part in parts))
    tape.drop(*parts)
    scanned = tape.op((mixed,), inner, saves=(mixed,), scratch=inner)
    tape.drop(mixed)
    if linears.out is None:
        return scanned
    out = p.linear(scanned, linears.out, p.s.act)
    tape.drop(scanned)
    return out


def running_and_block_end(mixer: MixerSpec) -> int:
    """Return the states vLLM holds for a sequence under prefix caching."""
    return 2


def states(mixer: MixerSpec, element: float) -> float:
    """Return bytes of one sequence's convolution and recurrent states."""
    total = 0.0
    for index, shape in enumerate(mixer.state_shapes):
        wide = mixer.state_fp32 and index == len(mixer.state_shapes) - 1
        total += prod(shape) * (4 if wide else element)
    return total
