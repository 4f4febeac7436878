"""GRPO rows."""

from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rows import Row


def predict_rl(row: Row) -> Prediction:
    """Return."""
    if row["model"].startswith("lm_head"):
        from planner.accuracy.kernels import predict_kernel

        return predict_kernel(row)
    raise NotCovered("todo")
