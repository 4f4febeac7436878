"""DoRA on a linear, operation by operation: PEFT 0.21, tuners/lora/dora.py, DoraLinearLayer.forward.

The norm of W + BA is made of whole matrices at every forward: an identity of `in` rows through A and
B, its scaled copy and the sum. It gets no gradient, but what made BA lives until the forward returns.
"""

from typing import NamedTuple

from planner.layer.tape import Tape, Value


class Sides(NamedTuple):
    """The matrix that is adapted, and widths in bytes."""

    rows: int
    columns: int
    rank: int
    adapter: int
    """Of an adapter's element."""
    inside: int
    """Of an element of the adapter's outputs."""
    weight_copy: bool
    """The base weight is dequantised, or cast, into a copy."""
    bias: bool
    recomputes: bool
    """With dropout the base's product is made again, of what was dropped out."""


def norm_matrices(tape: Tape, sides: Sides) -> list[Value]:
    """Record the norm's matrices; those that live until the forward returns are returned."""
    whole = sides.rows * sides.columns * sides.inside
    eye = tape.value(0, sides.columns**2 * sides.adapter, needs_grad=False)
    low = tape.value(0, sides.columns * sides.rank * sides.inside, needs_grad=False)
    update = tape.value(0, whole, needs_grad=False)
    held = [eye, low, update]
    if not tape.grad_enabled:  # without a graph nothing holds what made the update
        tape.drop(eye, low)
        held = [update]
    if sides.weight_copy:
        held.append(tape.value(0, whole, needs_grad=False))
    scaled = tape.value(0, whole, needs_grad=False)
    total = tape.value(0, whole, needs_grad=False)
    tape.drop(scaled)
    tape.drop(total)
    return held


def scaled_sum(tape: Tape, base: Value, inner: Value, high: Value, sides: Sides) -> Value:
    """Record (m - 1) * base + m * BA(x) * scaling; `high` is dropped, `base` is the caller's."""
    size = sides.rows * sides.inside
    magnitude = sides.rows * sides.adapter
    product = base
    if sides.recomputes:
        product = tape.op((inner,), size)
    elif sides.bias:
        product = tape.op((base,), size)
    first = tape.op((product,), size, saves=(product,), scratch=size, weight_grad=magnitude)
    second = tape.op((high,), size, saves=(high,), scratch=size, weight_grad=magnitude)
    scaled = tape.op((second,), size)
    tape.drop(second)
    out = tape.add(first, scaled, size)
    tape.drop(first, scaled, high)
    if product is not base:
        tape.drop(product)
    return out
