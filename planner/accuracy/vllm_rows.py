"""vLLM rows."""

from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rows import Row


def predict_vllm(row: Row) -> Prediction:
    """Return."""
    raise NotCovered("todo")
