"""Inference rows."""

from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rows import Row


def predict_inference(row: Row) -> Prediction:
    """Return."""
    raise NotCovered("todo")
