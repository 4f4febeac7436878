"""What recurrent mixers share: projections around a fused scan, and a state of fixed size."""

from math import prod

from planner.layer.program import Program
from planner.layer.tape import Op, Value
from planner.mixers.mixer import Linears
from planner.models.spec import LayerSpec, MixerSpec, ModuleSpec


def recurrent(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
    """Record Mamba or linear attention with its fused kernels (mamba-ssm, flash-linear-attention).

    The kernels save the projections and their own output and recompute the rest in backward.
    """
    tape = p.tape
    inner = (layer.mixer.inner_dim or x.size / width) * p.s.act
    parts, inside = _projections(p, x, linears.ins, width)
    mixed = tape.op(
        parts, inner, saves=parts, scratch=sum(part.size for part in parts), kind=Op.KERNEL
    )
    tape.drop(*parts)
    steps = tuple(p.linear(mixed, module, p.s.act) for module in inside)
    scanned = tape.op((mixed, *steps), inner, saves=(mixed, *steps), scratch=inner, kind=Op.KERNEL)
    tape.drop(mixed, *steps)
    if linears.out is None:
        return scanned
    out = p.linear(scanned, linears.out, p.s.act)
    tape.drop(scanned)
    return out


def _projections(
    p: Program, x: Value, ins: list[ModuleSpec], width: int
) -> tuple[tuple[Value, ...], list[ModuleSpec]]:
    """Record what reads the stream, or such a projection's result (the second half of a low-rank gate).

    Also return what reads the convolution's result: Mamba-1's x_proj. Its dt_proj, which reads a part
    of that, works inside the scan.
    """
    streamed = x.size / width
    results: dict[int, Value] = {}
    inside: list[ModuleSpec] = []
    for number, module in enumerate(ins):
        if module.in_features == streamed:
            results[number] = p.linear(x, module, width)
            continue
        first = next((n for n in results if ins[n].out_features == module.in_features), None)
        if first is not None:
            results[number] = p.linear(results[first], module, p.s.act)
            p.tape.drop(results.pop(first))
        elif not inside:
            inside.append(module)
    return tuple(results.values()), inside


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
