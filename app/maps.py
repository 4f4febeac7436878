"""Heat maps as Vega-Lite specs: models x methods and GPUs x methods; a click selects a cell."""

from collections.abc import Sequence

from app.charts import Spec, tall, tips
from app.palette import SEQUENTIAL, TERM_COLOURS


def heat_map(rows: Sequence[Spec], *, columns: Sequence[str], models: Sequence[str]) -> Spec:
    """Return models x methods coloured by the longest context; rows: model, method, context, said."""
    return {
        "height": tall(len(models), 24),
        "data": {"values": list(rows)},
        "encoding": {
            "y": {"field": "model", "type": "nominal", "sort": list(models), "title": None,
                  "axis": {"labelLimit": 220}},
            "x": {"field": "method", "type": "nominal", "title": None,
                  "scale": {"domain": list(columns)}, "axis": {"orient": "top", "labelAngle": 0}},
        },
        "layer": [
            {
                "mark": {"type": "rect", "cursor": "pointer"},
                "params": [
                    {"name": "cell", "select": {"type": "point", "fields": ["model", "method"]}},
                ],
                "encoding": {
                    "color": {
                        "field": "context",
                        "type": "quantitative",
                        "scale": {"type": "log", "scheme": SEQUENTIAL},
                        "legend": None,
                    },
                    "tooltip": tips("model", "method", "context", "batch", "peak", "settings"),
                },
            },
            {
                "mark": {"type": "text", "fontSize": 11, "fontWeight": 600},
                "encoding": {
                    "text": {"field": "said"},
                    "color": {
                        "condition": {"test": "datum.bright", "value": "#10141B"},
                        "value": "#FFFFFF",
                    },
                },
            },
        ],
    }  # fmt: skip


def verdict_map(cells: Sequence[Spec]) -> Spec:
    """Return GPUs x methods coloured by verdict: cells of gpu, method, verdict, peak, headroom."""
    gpus = list(dict.fromkeys(cell["gpu"] for cell in cells))
    verdicts = {
        "fits": TERM_COLOURS["activations"],
        "tight": TERM_COLOURS["gradients"],
        "does not fit": TERM_COLOURS["overhead"],
    }
    place = {
        "y": {"field": "gpu", "type": "nominal", "sort": gpus, "title": None,
              "axis": {"labelLimit": 200}},
        "x": {"field": "method", "type": "nominal", "sort": ["qlora", "lora", "full"],
              "title": None, "axis": {"orient": "top", "labelAngle": 0}},
    }  # fmt: skip
    rect = {
        "mark": {"type": "rect", "cursor": "pointer"},
        "params": [{"name": "cell", "select": {"type": "point", "fields": ["gpu", "method"]}}],
        "encoding": {
            **place,
            "color": {
                "field": "verdict",
                "type": "nominal",
                "scale": {"domain": list(verdicts), "range": list(verdicts.values())},
                "legend": {"title": None, "orient": "top"},
            },
            "tooltip": tips("name", "memory", "method", "verdict", "peak", "headroom"),
        },
    }
    text = {
        "mark": {"type": "text", "fontSize": 11, "fontWeight": 600},
        "encoding": {
            **place,
            "text": {"field": "said"},
            "color": {
                "condition": {"test": "datum.verdict === 'fits'", "value": "#FFFFFF"},
                "value": "#10141B",
            },
        },
    }
    return {"height": tall(len(gpus), 24), "data": {"values": list(cells)}, "layer": [rect, text]}
