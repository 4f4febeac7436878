"""Charts as Vega-Lite specs: plain data in, a dict out. Colours come from app.palette."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.palette import (
    LIMIT_COLOUR,
    RANGE_COLOUR,
    TERM_COLOURS,
    UNKNOWN_COLOUR,
    framework_style,
    term_words,
)
from planner.plan import Plan
from planner.terms.term import TERM_NAMES
from planner.units import format_bytes, to_gib

Spec = dict[str, Any]
ROW_HEIGHT = 36
GIB_AXIS = {"title": "GiB", "format": "~r", "tickCount": 8}
TOKENS = "datum.value >= 1024 ? format(datum.value / 1024, '~r') + 'K' : datum.value"


def term_scale(names: Iterable[str]) -> Spec:
    """Return the colour encoding of terms, by their words: those present, always in the same colours."""
    present = set(names)
    shown = [name for name in (*TERM_NAMES, "unknown") if term_words(name) in present]
    domain = [term_words(name) for name in shown]
    colours = [TERM_COLOURS.get(name, UNKNOWN_COLOUR) for name in shown]
    return {
        "field": "term",
        "type": "nominal",
        "scale": {"domain": domain, "range": colours},
        "legend": {"title": None, "orient": "top", "columns": 3},
    }


def term_rows(plan: Plan) -> list[Spec]:
    """Return one row for every term of every phase, with formula and source to hover over."""
    rows = []
    for phase in plan.phases:
        for term in phase.terms:
            rows.append(
                {
                    "phase": phase.name,
                    "term": term_words(term.name),
                    "gib": to_gib(term.bytes),
                    "size": format_bytes(term.bytes),
                    "formula": term.formula,
                    "source": term.source,
                    "order": TERM_NAMES.index(term.name) if term.name in TERM_NAMES else 99,
                }
            )
    return rows


def phase_bars(plan: Plan) -> Spec:
    """Return the plan as one stacked bar per phase, with the capacity line and the peak's range."""
    phases = [phase.name for phase in plan.phases]
    y = {"field": "phase", "type": "nominal", "sort": phases, "title": None}
    rows = term_rows(plan)
    plan_terms = {row["term"] for row in rows}
    totals = [
        {"phase": p.name, "gib": to_gib(p.total_bytes), "label": format_bytes(p.total_bytes)}
        for p in plan.phases
    ]
    spread = [
        {
            "phase": plan.peak_phase,
            "low": to_gib(plan.low_bytes),
            "high": to_gib(plan.high_bytes),
            "said": f"{format_bytes(plan.low_bytes)} to {format_bytes(plan.high_bytes)}",
        }
    ]
    longest = max(plan.peak_bytes, plan.high_bytes, plan.capacity_bytes)
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar"},
        "encoding": {
            "y": y,
            "x": {
                "field": "gib",
                "type": "quantitative",
                "stack": "zero",
                "axis": GIB_AXIS,
                "scale": {"domain": [0, 1.15 * to_gib(longest)], "nice": False},
            },
            "color": term_scale(plan_terms),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": tips("phase", "term", "size", "formula", "source"),
        },
    }
    labels = {
        "data": {"values": totals},
        "mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 12},
        "encoding": {
            "y": y,
            "x": {"field": "gib", "type": "quantitative"},
            "text": {"field": "label"},
        },
    }
    interval = {
        "data": {"values": spread},
        "mark": {"type": "rule", "strokeWidth": 3, "color": RANGE_COLOUR, "yOffset": 15},
        "encoding": {
            "y": y,
            "x": {"field": "low", "type": "quantitative"},
            "x2": {"field": "high"},
            "tooltip": [{"field": "said", "title": "likely need in torch's pool"}],
        },
    }
    return {
        "height": tall(len(phases), ROW_HEIGHT, legend_rows=-(-len(plan_terms) // 3)),
        "layer": [bars, labels, interval, *limit_line(plan.capacity_bytes, axis="x")],
    }


def rank_rows(plan: Plan) -> list[Spec]:
    """Return one row for every term of every distinct rank at its own peak."""
    return [
        {
            "rank": kind.role,
            "term": term_words(name),
            "gib": to_gib(size),
            "size": format_bytes(size),
            "phase": kind.peak_phase,
            "order": TERM_NAMES.index(name) if name in TERM_NAMES else 99,
        }
        for kind in plan.ranks
        for name, size in kind.terms.items()
    ]


def rank_bars(plan: Plan) -> Spec:
    """Return one stacked bar per distinct rank at its own peak, with the capacity line."""
    names = [kind.role for kind in plan.ranks]
    y = {
        "field": "rank",
        "type": "nominal",
        "sort": names,
        "title": None,
        "axis": {"labelLimit": 240},
    }
    rows = rank_rows(plan)
    terms = {row["term"] for row in rows}
    longest = 1.15 * to_gib(max(plan.peak_bytes, plan.capacity_bytes))
    gib = {"field": "gib", "type": "quantitative", "stack": "zero", "axis": GIB_AXIS}
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar"},
        "encoding": {
            "y": y,
            "x": {**gib, "scale": {"domain": [0, longest], "nice": False}},
            "color": term_scale(terms),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": tips("rank", "phase", "term", "size"),
        },
    }
    return {
        "height": tall(len(names), ROW_HEIGHT, legend_rows=-(-len(terms) // 3)),
        "layer": [bars, *limit_line(plan.capacity_bytes, axis="x")],
    }


def limit_line(capacity_bytes: int, *, axis: str, label: str = "capacity") -> list[Spec]:
    """Return the dashed capacity line and its label as layers."""
    values = [{"limit": to_gib(capacity_bytes), "label": f"{label} {format_bytes(capacity_bytes)}"}]
    where = {"field": "limit", "type": "quantitative"}
    tips = [{"field": "label", "title": "limit"}]
    end = {"y": {"value": 0}, "x": where} if axis == "x" else {"y": where, "x": {"value": "width"}}
    text = {"type": "text", "align": "left", "fontSize": 11, "color": LIMIT_COLOUR}
    text |= (
        {"align": "right", "dx": -2, "dy": -7}
        if axis == "y"
        else {"align": "right", "dx": -4, "dy": -6}
    )
    return [
        {
            "data": {"values": values},
            "mark": {
                "type": "rule",
                "color": LIMIT_COLOUR,
                "strokeWidth": 2,
                "strokeDash": [6, 4],
            },
            "encoding": {axis: where, "tooltip": tips},
        },
        {
            "data": {"values": values},
            "mark": text,
            "encoding": {**end, "text": {"field": "label"}},
        },
    ]


def context_curve(
    lines: Mapping[str, Sequence[tuple[int, int]]], capacity_bytes: int, *, now: int
) -> Spec:
    """Return peak against context, a line for every framework: name -> [(tokens, bytes)]."""
    names = list(lines)
    rows = [
        {
            "framework": name,
            "tokens": tokens,
            "gib": to_gib(size),
            "peak": format_bytes(size),
            "verdict": "fits" if size <= capacity_bytes else "does not fit",
        }
        for name, points in lines.items()
        for tokens, size in points
    ]
    legend = {"title": None, "orient": "top", "symbolType": "stroke", "columns": 2}
    legend["symbolStrokeWidth"] = 3
    colour: Spec = {"field": "framework", "type": "nominal", "legend": legend}
    dash: Spec = dict(colour)
    styles = [framework_style(name) for name in names]
    colour["scale"] = {"domain": names, "range": [style[0] for style in styles]}
    dash["scale"] = {"domain": names, "range": [list(style[1]) for style in styles]}
    x = {
        "field": "tokens",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2},
        "axis": {"title": "context (tokens)", "labelExpr": TOKENS, "grid": False},
    }
    curve = {
        "data": {"values": rows},
        "mark": {"type": "line", "strokeWidth": 2.5},
        "encoding": {
            "x": x,
            "y": {
                "field": "gib",
                "type": "quantitative",
                "scale": {"type": "log", "base": 2},
                "axis": {**GIB_AXIS, "title": "peak (GiB, log)"},
            },
            "color": colour,
            "strokeDash": dash,
            "tooltip": tips("framework", "tokens", "peak", "verdict"),
        },
    }
    here = {
        "data": {"values": [{"now": now, "label": f"now {now:,}"}]},
        "mark": {"type": "rule", "strokeWidth": 1, "opacity": 0.5},
        "encoding": {
            "x": {"field": "now", "type": "quantitative"},
            "tooltip": [{"field": "label", "title": "context"}],
        },
    }
    return {"height": 330, "layer": [curve, here, *limit_line(capacity_bytes, axis="y")]}


def waterfall(rows: Sequence[Spec], *, unit: str = "GiB") -> Spec:
    """Return a waterfall: rows of step, start_gib, end_gib, change, kind (total, less or more)."""
    steps = [row["step"] for row in rows]
    colours = {
        "total": TERM_COLOURS["weights"],
        "less": TERM_COLOURS["activations"],
        "more": TERM_COLOURS["logits"],
    }
    kinds = {kind: colours[kind] for kind in colours if any(row["kind"] == kind for row in rows)}
    room = {"domain": [0, 1.45 * max((row["end_gib"] for row in rows), default=1)], "nice": False}
    y = {"field": "step", "type": "nominal", "sort": steps, "title": None,
         "axis": {"labelLimit": 230}}  # fmt: skip
    return {
        "height": tall(len(rows), 34),
        "data": {"values": list(rows)},
        "layer": [
            {
                "mark": {"type": "bar", "height": 22},
                "encoding": {
                    "y": y,
                    "x": {
                        "field": "start_gib",
                        "type": "quantitative",
                        "axis": {**GIB_AXIS, "title": unit},
                        "scale": room,
                    },
                    "x2": {"field": "end_gib"},
                    "color": {
                        "field": "kind",
                        "type": "nominal",
                        "scale": {"domain": list(kinds), "range": list(kinds.values())},
                        "legend": {"title": None, "orient": "top"},
                    },
                    "tooltip": tips("step", "change", "why"),
                },
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 12},
                "encoding": {
                    "y": y,
                    "x": {"field": "right_gib", "type": "quantitative"},
                    "text": {"field": "change"},
                },
            },
        ],
    }


def side_by_side(rows: Sequence[Spec], capacity_bytes: int | None, *, order: Sequence[str]) -> Spec:
    """Return one stacked bar per run: rows of run, term, gib, size, formula, order."""
    bars = {
        "data": {"values": list(rows)},
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "run", "type": "nominal", "sort": list(order), "title": None,
                  "axis": {"labelLimit": 200}},
            "x": {"field": "gib", "type": "quantitative", "stack": "zero", "axis": GIB_AXIS},
            "color": term_scale(row["term"] for row in rows),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": tips("run", "term", "size", "formula"),
        },
    }  # fmt: skip
    lines = limit_line(capacity_bytes, axis="x") if capacity_bytes else []
    return {"height": tall(len(order), ROW_HEIGHT, legend_rows=3), "layer": [bars, *lines]}


def scatter(rows: Sequence[Spec]) -> Spec:
    """Return predicted against measured on two log axes: rows of id, measured, predicted, miss ..."""
    low = min(min(row["measured"], row["predicted"]) for row in rows)
    high = max(max(row["measured"], row["predicted"]) for row in rows)
    log = {"type": "log", "nice": False, "domain": [low * 0.8, high * 1.25]}
    ideal = [{"measured": low, "predicted": low}, {"measured": high, "predicted": high}]
    axes = {
        "x": {"field": "measured", "type": "quantitative", "scale": log,
              "axis": {"title": "measured", "format": "~s"}},
        "y": {"field": "predicted", "type": "quantitative", "scale": log,
              "axis": {"title": "predicted", "format": "~s"}},
    }  # fmt: skip
    return {
        "height": 420,
        "layer": [
            {
                "data": {"values": ideal},
                "mark": {"type": "line", "color": LIMIT_COLOUR, "strokeDash": [6, 4]},
                "encoding": axes,
            },
            {
                "data": {"values": list(rows)},
                "params": [{"name": "row", "select": {"type": "point", "fields": ["id"]}}],
                "mark": {"type": "point", "filled": True, "size": 55, "cursor": "pointer"},
                "encoding": {
                    **axes,
                    "color": {
                        "field": "inside",
                        "type": "nominal",
                        "scale": {
                            "domain": ["inside the interval", "outside"],
                            "range": [TERM_COLOURS["weights"], TERM_COLOURS["optimizer"]],
                        },
                        "legend": {"title": None, "orient": "top"},
                    },
                    "shape": {"field": "inside", "type": "nominal", "legend": None},
                    "opacity": {"condition": {"param": "row", "value": 0.75}, "value": 0.15},
                    "tooltip": tips("id", "source", "quantity", "said", "miss"),
                },
            },
        ],
    }


def tall(rows: int, step: int, *, legend_rows: int = 1) -> int:
    """Return a chart's height in pixels: Streamlit fits axis and legend inside it."""
    return rows * step + 78 + 28 * legend_rows


def tips(*fields: str) -> list[Spec]:
    return [{"field": field, "type": "nominal", "title": field} for field in fields]
