"""Rows of rl.csv: GRPO and preference runs, colocated engines, context limits."""

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rl_recipe import rl_recipe
from planner.accuracy.rows import Row
from planner.accuracy.sft_rows import figure, load_bytes
from planner.accuracy.vllm_rows import predict_vllm
from planner.plan import Plan, plan

_PLANNED = {
    "peak_allocated": "peak_allocated",
    "peak_reserved": "peak_reserved",
    "reserved_after_run": "peak_reserved",
    "nvidia-smi": "nvidia_smi_used_peak",
}

_UPDATE = ("forward", "loss", "backward", "step")
_PHASES = {
    "load": ("load",),
    "rollout": ("rollout",),
    "score": ("score",),
    "update_actor": _UPDATE,
    "backward/step": _UPDATE,
}
"""Phases as the sources of rl_runs.csv call them."""
_ENGINE = frozenset({"kv_cache", "engine"})


def _phase_bytes(row: Row, result: Plan) -> int:
    """Return the largest of a phase; without vLLM, where that is a process of its own."""
    apart = "own proc" in row["vllm"]
    return max(
        sum(term.bytes for term in result.phase(name).terms if not (apart and term.name in _ENGINE))
        for name in _PHASES[row["phase"]]
    )


def predict_rl(row: Row) -> Prediction:
    """Return what the planner says about a row of rl.csv."""
    quantity = row.quantity
    if quantity.startswith("component:vllm_"):
        return predict_vllm(row)
    model = model_named(row["model"])
    recipe = rl_recipe(row, model)
    machine = machine_named(row["gpu"], row.integer("num_gpus") or 1)
    result = plan(model, recipe, machine)
    if row.failed:
        return Prediction(quantity, 0, 0, 0, result)  # only its verdict counts
    if quantity == "peak_allocated" and row["phase"] in _PHASES:
        value = _phase_bytes(row, result)
        return Prediction(quantity, value, *result.interval("allocated", value), result)
    if quantity in _PLANNED:
        return figure(_PLANNED[quantity], result)
    if quantity == "max_context_capacity":
        # the figure is the memory with which this context was the largest
        value = result.device_used_bytes
        return Prediction(quantity, value, *result.interval("device", value), result)
    if quantity == "reserved_before_train":
        return figure("static_load_reserved", result)
    if quantity == "training_delta_reserved":
        value = result.reserved_peak_bytes - load_bytes(result)
        return Prediction(quantity, value, *result.interval("reserved", value), result)
    raise NotCovered(f"the figure {quantity!r} is not one that the planner states")
