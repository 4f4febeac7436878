"""The report card of a quantised checkpoint: figures, the list and the curve, as JSON and as a picture."""

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from math import prod
from pathlib import Path
from typing import Any

from planner.report.svg import FONT
from planner.units import format_bytes, to_gib
from trainer.quantize.calibration import Calibration
from trainer.quantize.choice import KEPT, Choice, Point
from trainer.quantize.files import candidate_of
from trainer.quantize.formats import Format
from trainer.quantize.harm import Linear

JSON_FILE = "quantize.json"
PICTURE_FILE = "quantize.svg"
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 50, 60


def report(
    *,
    job_model: str,
    form: Format,
    dtype: str,
    choice: Choice,
    linears: Sequence[Linear],
    fixed: int,
    width: int,
    points: Sequence[Point],
    budget: int | None,
    card: str | None,
    measured_kl: float,
    data: Calibration,
    seconds: float,
) -> dict[str, Any]:
    """Return the card as a document; KL in nats a token, from the source to what is written."""
    return {
        "schema_version": 1,
        "model": job_model,
        "format": form.name,
        "read_by": form.readers,
        "dtype": dtype,
        "bytes": choice.bytes,
        "budget_bytes": budget,
        "card": card,
        "least_bytes": points[0].bytes,
        "unquantised_bytes": points[-1].bytes,
        "outside_linears_bytes": fixed,
        "predicted_kl": choice.harm,
        "measured_kl": measured_kl,
        "least_predicted_kl": points[0].harm,
        "calibration": {
            "source": data.source,
            "tokens": data.rows.numel(),
            "held_out_tokens": data.held.numel(),
        },
        "seconds": round(seconds, 1),
        "blocks": {
            _word(block): count for block, count in sorted(Counter(choice.blocks.values()).items())
        },
        "kept": choice.kept(),
        "linears": [_linear(linear, form, choice.blocks[linear.name], width) for linear in linears],
        "curve": [{"bytes": point.bytes, "predicted_kl": point.harm} for point in points],
    }


def _word(block: int) -> str:
    return "16-bit" if block == KEPT else f"block {block}"


def _linear(linear: Linear, form: Format, block: int, width: int) -> dict[str, Any]:
    if block == KEPT:
        size, harm = prod((linear.rows, linear.columns)) * width, 0.0
    else:
        own = candidate_of(linear, form, block)
        size, harm = own.bytes, own.harm
    return {"name": linear.name, "stored": _word(block), "bytes": size, "predicted_kl": harm}


def write_card(document: dict[str, Any], folder: Path) -> None:
    """Write the card beside the weights."""
    text = json.dumps(document, indent=1) + "\n"
    (folder / JSON_FILE).write_text(text, encoding="utf-8")
    (folder / PICTURE_FILE).write_text(picture(document), encoding="utf-8")


def picture(document: dict[str, Any]) -> str:
    """Return the curve of predicted KL against GiB as SVG, with what was chosen on it."""
    points = [(to_gib(each["bytes"]), each["predicted_kl"]) for each in document["curve"]]
    low, high = points[0][0], points[-1][0]
    top = max(points[0][1], document["measured_kl"]) * 1.05 or 1.0

    def at(size: float, harm: float) -> tuple[float, float]:
        across = (size - low) / (high - low or 1.0)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - harm / top * (HEIGHT - TOP - BOTTOM),
        )

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    chosen = to_gib(document["bytes"])
    said = (
        f"{document['format']}: {format_bytes(document['bytes'])}, predicted KL "
        f"{document['predicted_kl']:.4f}, measured {document['measured_kl']:.4f} nats a token"
    )
    shapes = [
        f'<polyline points="{line}" fill="none" stroke="#3b6fb6" stroke-width="2"/>',
        _dot(*at(chosen, document["predicted_kl"]), "#3b6fb6", "predicted"),
        _dot(*at(chosen, document["measured_kl"]), "#b6553b", "measured"),
        _text(LEFT, 28, said),
        _text(LEFT, HEIGHT - BOTTOM + 22, f"{low:.3f} GiB: four bits everywhere"),
        _text(WIDTH - RIGHT, HEIGHT - BOTTOM + 22, f"{high:.3f} GiB: 16 bits", anchor="end"),
        _text(
            (LEFT + WIDTH) / 2, HEIGHT - 14, "GiB of all weights, against nats a token", "middle"
        ),
        _text(LEFT - 8, TOP + 6, f"{top:.3g}", "end"),
        _text(LEFT - 8, HEIGHT - BOTTOM + 4, "0", "end"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(said)}" font-family="{FONT}" font-size="14">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>{"".join(shapes)}</svg>\n'
    )


def _dot(x: float, y: float, colour: str, word: str) -> str:
    mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{word}</title></circle>'
    return mark + _text(x + 9, y + 5, word)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
