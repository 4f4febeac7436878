"""The choice within a budget: hulls worked by hand, groups that stay together, and every budget exact."""

import itertools
import random

import pytest

from planner.errors import UsageError
from trainer.quantize.bnb import BitsAndBytes
from trainer.quantize.choice import KEPT, Group, Option, choose, curve, groups, hull
from trainer.quantize.compressed import CompressedTensors
from trainer.quantize.harm import Candidate, Linear


def _linear(name, harm64, harm32, rows=64, columns=64, form="bnb"):
    made = (Candidate(form, 64, 2200, harm64, ""), Candidate(form, 32, 2300, harm32, ""))
    return Linear(name, rows, columns, made)


def test_a_hull_keeps_what_is_worth_its_bytes():
    cheap, bad, good, best = (
        Option(64, 100, 1.0),
        Option(32, 110, 0.95),  # 0.005 a byte; going on to 120 is worth 0.0425 a byte
        Option(16, 120, 0.1),
        Option(KEPT, 400, 0.0),
    )
    assert hull([best, bad, cheap, good]) == (cheap, good, best)
    assert hull([cheap, Option(32, 110, 1.2)]) == (cheap,)  # more bytes for more harm
    assert hull([Option(64, 100, 2.0), cheap]) == (cheap,)


def test_the_best_byte_is_bought_first_and_a_budget_is_kept():
    parts = groups([_linear("a.x", 4.0, 1.0), _linear("a.y", 0.2, 0.1)], BitsAndBytes(), 2)
    least = 1000 + 2 * 2200
    assert choose(parts, 1000, least).blocks == {"a.x": 64, "a.y": 64}
    chosen = choose(parts, 1000, least + 100)
    assert (chosen.blocks, chosen.bytes, chosen.harm) == ({"a.x": 32, "a.y": 64}, 5500, 1.2)
    # 8,192 B for x in 16 bits are not there, 100 for y are
    assert choose(parts, 1000, least + 250).blocks == {"a.x": 32, "a.y": 32}
    everything = choose(parts, 1000, 10**6)
    assert everything.kept() == ["a.x", "a.y"]
    assert everything.bytes == 1000 + 2 * 8192 == curve(parts, 1000)[-1].bytes
    with pytest.raises(UsageError, match=r"budget: .*5,399 B.* is below .*5,400 B"):
        choose(parts, 1000, least - 1)


def test_what_vllm_joins_stays_together():
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    linears = [
        _linear(f"l.0.self_attn.{name}", harm, harm / 2, form="compressed-tensors")
        for name, harm in zip(names, (0.1, 0.1, 9.0, 0.1), strict=True)
    ]
    parts = groups(linears, CompressedTensors(), 2)
    assert [len(part.linears) for part in parts] == [3, 1]
    budget = sum(part.options[0].bytes for part in parts) + 300
    assert set(choose(parts, 0, budget).blocks.values()) == {32, 64}
    blocks = choose(parts, 0, budget).blocks
    assert len({blocks[f"l.0.self_attn.{name}"] for name in names[:3]}) == 1


def test_at_its_own_corners_the_curve_is_the_best_there_is():
    """Against every combination of a few random groups."""
    dice = random.Random(3)
    for _ in range(20):
        parts = [
            Group(
                (Linear(f"m{number}", 1, 1, ()),),
                hull(Option(b, dice.randint(1, 60), dice.random()) for b in (64, 32, 16, KEPT)),
            )
            for number in range(4)
        ]
        every = [
            (sum(o.bytes for o in combination), sum(o.harm for o in combination))
            for combination in itertools.product(*(part.options for part in parts))
        ]
        for point in curve(parts, 0):
            best = min(harm for size, harm in every if size <= point.bytes)
            assert point.harm == pytest.approx(best)
            assert choose(parts, 0, point.bytes).harm == pytest.approx(best)
