"""Heat maps as Vega-Lite specs: models x methods and GPUs x methods; a click selects a cell."""

from collections.abc import Sequence

from app.charts import Spec, tall, tips
from app.palette import SEQUENTIAL


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


def card_map(rows: Sequence[Spec], *, gpus: Sequence[str], columns: Sequence[str]) -> Spec:
    """Return GPUs x methods coloured by the share of the memory that is left: rows of finder.card_rows."""
    place = {
        "y": {"field": "gpu", "type": "nominal", "sort": list(gpus), "title": None,
              "axis": {"labelLimit": 200}},
        "x": {"field": "method", "type": "nominal", "title": None,
              "scale": {"domain": list(columns)}, "axis": {"orient": "top", "labelAngle": 0}},
    }  # fmt: skip
    rect = {
        "mark": {"type": "rect", "cursor": "pointer"},
        "params": [{"name": "cell", "select": {"type": "point", "fields": ["gpu", "method"]}}],
        "encoding": {
            "color": {
                "field": "share",
                "type": "quantitative",
                "scale": {"scheme": SEQUENTIAL, "domain": [0, 1]},
                "legend": None,
            },
            "tooltip": tips("name", "memory", "method", "peak", "left", "settings"),
        },
    }
    text = {
        "mark": {"type": "text", "fontSize": 11, "fontWeight": 600},
        "encoding": {
            "text": {"field": "left"},
            "color": {
                "condition": {"test": "datum.share >= 0.5", "value": "#10141B"},
                "value": "#FFFFFF",
            },
        },
    }
    return {
        "height": tall(len(gpus), 24),
        "data": {"values": list(rows)},
        "encoding": place,
        "layer": [rect, text],
    }
