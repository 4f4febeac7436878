"""Colours: the same for a term everywhere, told apart by every kind of eye."""

from itertools import combinations

import pytest

from app import charts, palette
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.terms.term import TERM_NAMES

# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
LEAST_DISTANCE = 24


def linear(colour: str) -> list[float]:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def times(matrix, vector) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    seen = [min(1.0, max(0.0, part)) for part in times(VISION[vision], linear(colour))]
    white = (0.9505, 1.0, 1.089)
    scaled = [part / full for part, full in zip(times(TO_XYZ, seen), white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def luminance(colour: str) -> float:
    return times(TO_XYZ, linear(colour))[1]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISION)
def test_terms_are_told_apart(vision: str) -> None:
    for one, other in combinations(palette.TERM_COLOURS.values(), 2):
        a, b = lab(one, vision), lab(other, vision)
        distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5
        assert distance >= LEAST_DISTANCE, (one, other, vision)


def test_every_term_has_a_colour() -> None:
    assert set(palette.TERM_COLOURS) == set(TERM_NAMES)


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK])
def test_text_links_and_the_limit_can_be_read(theme: dict[str, str]) -> None:
    assert contrast(theme["textColor"], theme["backgroundColor"]) >= 7
    assert contrast(theme["linkColor"], theme["backgroundColor"]) >= 4.5
    assert contrast(theme["primaryColor"], theme["backgroundColor"]) >= 3
    assert contrast(palette.LIMIT_COLOUR, theme["backgroundColor"]) >= 3


def colours_of(spec: dict) -> dict[str, str]:
    scale = spec["layer"][0]["encoding"]["color"]["scale"]
    return dict(zip(scale["domain"], scale["range"], strict=True))


def test_a_term_has_the_same_colour_on_every_chart() -> None:
    machine = make_machine("rtx-4090")
    for fields in ({"method": "full"}, {"method": "qlora", "task": "grpo"}, {"task": "serve"}):
        result = plan(find_model("qwen2.5-0.5b"), make_recipe(**fields), machine)
        rows = [{"run": "a", **row} for row in charts.term_rows(result)]
        for spec in (charts.phase_bars(result), charts.side_by_side(rows, None, order=["a"])):
            own = {palette.term_words(name): c for name, c in palette.TERM_COLOURS.items()}
            assert colours_of(spec).items() <= own.items()


def test_bars_carry_the_planners_bytes_formulas_and_sources() -> None:
    result = plan(find_model("qwen2.5-0.5b"), make_recipe(), make_machine("rtx-4090"))
    rows = charts.phase_bars(result)["layer"][0]["data"]["values"]
    terms = [(p.name, t) for p in result.phases for t in p.terms]
    assert len(rows) == len(terms)
    for row, (phase, term) in zip(rows, terms, strict=True):
        assert (row["phase"], row["term"]) == (phase, palette.term_words(term.name))
        assert row["gib"] == pytest.approx(term.bytes / 2**30)
        assert (row["formula"], row["source"]) == (term.formula, term.source)
