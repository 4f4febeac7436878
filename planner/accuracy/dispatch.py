"""Sends a row to the mapper of its layout."""

from pydantic import ValidationError

from planner.accuracy.megatron_rows import is_megatron, predict_megatron
from planner.accuracy.prediction import NotARun, NotCovered, Prediction
from planner.accuracy.rl_rows import predict_rl
from planner.accuracy.rows import Layout, Row
from planner.accuracy.sft_rows import predict_sft
from planner.accuracy.speed_score import predict_speed
from planner.accuracy.vllm_rows import predict_vllm
from planner.errors import VramwiseError


def predict_row(row: Row) -> Prediction:
    """Return what a plan says about `row`; raises NotCovered with the reason, NotARun for no run."""
    if row.is_law:
        raise NotARun("a kernel or loss-head benchmark: benchmarks/laws")
    if row.is_estimate:
        raise NotARun("somebody's estimate, no measurement: vramwise published")
    try:
        if row.layout in (Layout.THROUGHPUT, Layout.DECODE):
            return predict_speed(row)
        if row.layout is Layout.VLLM:
            return predict_vllm(row)
        if row.layout is Layout.RL:
            return predict_rl(row)
        return predict_megatron(row) if is_megatron(row) else predict_sft(row)
    except VramwiseError as error:  # the planner refuses it: its own sentence is the reason
        raise NotCovered(error.message) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise NotCovered(f"the row's {where} is outside what a recipe allows") from error
