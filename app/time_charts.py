"""Charts over time or steps as Vega-Lite specs: recordings and training runs."""

from collections.abc import Sequence

from app.charts import GIB_AXIS, Spec, tips
from app.palette import DASHES, SERIES, TERM_COLOURS, UNKNOWN_COLOUR
from profiler.report import PHASE_COLOURS


def timeline(rows: Sequence[Spec], shades: Sequence[Spec], *, axis: str) -> Spec:
    """Return bytes over time: rows of t_s, series, gib, size, phase; shades of start, end, phase."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    phases = list(dict.fromkeys(shade["phase"] for shade in shades))
    x = {"field": "t_s", "type": "quantitative", "axis": {"title": axis, "grid": False}}
    colours = [PHASE_COLOURS.get(phase, UNKNOWN_COLOUR) for phase in phases]
    layers: list[Spec] = []
    if shades:
        layers.append(
            {
                "data": {"values": list(shades)},
                "mark": {"type": "rect", "opacity": 0.22},
                "encoding": {
                    "x": {"field": "start", "type": "quantitative", "axis": x["axis"]},
                    "x2": {"field": "end"},
                    "color": {
                        "field": "phase",
                        "type": "nominal",
                        "scale": {"domain": phases, "range": colours},
                        "legend": {"title": None, "orient": "top", "columns": 3},
                    },
                    "tooltip": tips("phase"),
                },
            }
        )
    layers.append(
        {
            "data": {"values": list(rows)},
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.8},
            "encoding": {
                "x": x,
                "y": {"field": "gib", "type": "quantitative", "axis": GIB_AXIS},
                "stroke": {
                    "field": "series",
                    "type": "nominal",
                    "scale": {"domain": names, "range": list(SERIES[: len(names)])},
                    "legend": {
                        "title": None,
                        "orient": "top",
                        "symbolType": "stroke",
                        "symbolStrokeWidth": 3,
                    },
                },
                "tooltip": tips("series", "size", "phase"),
            },
        }
    )
    return {"height": 340, "layer": layers, "resolve": {"scale": {"color": "independent"}}}


def step_memory(rows: Sequence[Spec]) -> Spec:
    """Return memory over steps: rows of step, phase, kind, gib, size."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    colours = [PHASE_COLOURS.get(phase, UNKNOWN_COLOUR) for phase in phases]
    dashes = [list(DASHES[index % len(DASHES)]) for index in range(len(kinds))]
    return {
        "height": 320,
        "data": {"values": list(rows)},
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "axis": {"title": "step", "tickMinStep": 1, "tickCount": 8},
            },
            "y": {"field": "gib", "type": "quantitative", "axis": GIB_AXIS},
            "color": {
                "field": "phase",
                "type": "nominal",
                "scale": {"domain": phases, "range": colours},
                "legend": {"title": None, "orient": "top", "columns": 3},
            },
            "strokeDash": {
                "field": "kind",
                "type": "nominal",
                "scale": {"domain": kinds, "range": dashes},
                "legend": {
                    "title": None,
                    "orient": "top",
                    "symbolType": "stroke",
                    "symbolStrokeWidth": 3,
                },
            },
            "tooltip": tips("step", "phase", "kind", "size"),
        },
    }


def line(rows: Sequence[Spec], *, title: str) -> Spec:
    """Return one metric over the steps: rows of step, value."""
    return {
        "height": 180,
        "data": {"values": list(rows)},
        "mark": {"type": "line", "strokeWidth": 2, "color": TERM_COLOURS["weights"]},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "axis": {"title": "step", "tickMinStep": 1, "tickCount": 8},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "scale": {"zero": False},
                "axis": {"title": title},
            },
            "tooltip": tips("step", "value"),
        },
    }
