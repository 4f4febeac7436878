"""vLLM start-up logs: weights, profile, pool, tokens, blocks, concurrency."""

from collections.abc import Callable

from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rows import Row
from planner.accuracy.vllm_engine import Engine, engine_of
from planner.units import GiB

NON_TORCH_BYTES = 0.08 * GiB
"""CUDA context growth while the model loads and runs once, one GPU; NCCL adds more."""
NCCL_BYTES = 0.2 * GiB
GRAPHS_BYTES = 0.4 * GiB
SWAP_BYTES = 4 * GiB
"""swap_space of V0, per GPU."""


def predict_vllm(row: Row) -> Prediction:
    """Return what the planner says about one figure of a vLLM log."""
    law = _LAWS.get(row.quantity)
    if law is None:
        raise NotCovered(f"the figure {row.quantity!r} is not one that the planner states")
    return law(row, engine_of(row))


def _weights(row: Row, engine: Engine) -> Prediction:
    if "offload" in row["notes"]:
        raise NotCovered("weights are offloaded to the host by cpu_offload_gb")
    if "store loader" in engine.text:
        raise NotCovered("weights are loaded outside torch's allocator")
    return around("model_weights", engine.weights_bytes(), 0.95, 1.06)


def _non_torch_bytes(engine: Engine) -> float:
    return NON_TORCH_BYTES + (NCCL_BYTES if engine.tp > 1 else 0)


def _non_torch(row: Row, engine: Engine) -> Prediction:
    value = _non_torch_bytes(engine)
    # V0 before 2025 counted NCCL and CUDA start-up here: up to 2 GiB a process, more with TP
    return Prediction("non_torch_memory", value, 0, (8 if engine.tp > 1 else 2) * GiB)


def _activation(row: Row, engine: Engine) -> Prediction:
    value = engine.activation_bytes()
    return Prediction("activation_peak", value, 0.5 * value, 3 * value)


def _memory_bytes(row: Row, engine: Engine) -> float:
    """Return the pool: what is left of the budget."""
    budget = engine.budget_bytes()
    return budget - engine.weights_bytes() - _non_torch_bytes(engine) - engine.activation_bytes()


def _memory(row: Row, engine: Engine) -> Prediction:
    value = _memory_bytes(row, engine)
    # the profile's peak may be three times or half of what is expected of it
    slack = engine.activation_bytes() + 8 * _non_torch_bytes(engine)
    return Prediction("kv_cache_memory", value, value - 2.5 * slack, value + slack)


def _pool_bytes(row: Row, engine: Engine) -> float:
    """Return the pool: as the log prints it, or else what is left of the budget."""
    for name in ("kv_cache_memory_exact", "kv_cache_memory", "component:vllm_kv_cache"):
        logged = row.peers.get(name)
        if logged is not None and logged > 0:
            return logged
    return _memory_bytes(row, engine)


def _spread(row: Row) -> tuple[float, float]:
    logged = any(name.startswith("kv_cache_memory") for name in row.peers)
    return (0.98, 1.02) if logged else (0.8, 1.2)


def _tokens(row: Row, engine: Engine) -> Prediction:
    value = engine.pool(_pool_bytes(row, engine)).tokens
    name = "kv_cache_tokens_printed" if _spread(row)[0] > 0.9 else "kv_cache_tokens_from_budget"
    return around(name, value, *_spread(row))


def _blocks(row: Row, engine: Engine) -> Prediction:
    value = engine.pool(_pool_bytes(row, engine)).num_blocks
    name = "num_gpu_blocks" if _spread(row)[0] > 0.9 else "num_gpu_blocks_from_budget"
    return around(name, value, *_spread(row))


def _cpu_blocks(row: Row, engine: Engine) -> Prediction:
    if "unsloth" in f"{row['source']} {engine.text}".lower():
        raise NotCovered("Unsloth sets the swap space itself; the log does not print it")
    return around("num_cpu_blocks", engine.pool(SWAP_BYTES).num_blocks, 0.99, 1.01)


def _concurrency(row: Row, engine: Engine) -> Prediction:
    blocks = row.peers.get("num_gpu_blocks")
    tokens = row.peers.get("kv_cache_tokens_printed")
    if blocks is not None:
        value = blocks * engine.block / engine.max_len
    elif tokens is not None:
        value = tokens / engine.max_len
    else:
        value = engine.pool(_pool_bytes(row, engine)).concurrency
    return around("max_concurrency", value, 0.98, 1.02)


def _budget(row: Row, engine: Engine) -> Prediction:
    return around("usable_budget", engine.budget_bytes(), 0.995, 1.005)


def _graphs(row: Row, engine: Engine) -> Prediction:
    if row["enforce_eager"] == "True":
        return Prediction("cudagraph_memory_actual", 0, 0, 0.01 * GiB)
    return Prediction("cudagraph_memory_actual", GRAPHS_BYTES, 0.03 * GiB, 1.3 * GiB)


def _resident(row: Row, engine: Engine) -> Prediction:
    value = engine.weights_bytes() + _non_torch_bytes(engine)
    return around("weights_and_non_torch", value, 0.95, 1.06)


def _torch_peak(row: Row, engine: Engine) -> Prediction:
    value = engine.weights_bytes() + engine.activation_bytes()
    return around("peak_torch_memory", value, 0.9, 1.1)


_LAWS: dict[str, Callable[[Row, Engine], Prediction]] = {
    "model_weights": _weights,
    "component:vllm_weights": _weights,
    "non_torch_memory": _non_torch,
    "component:vllm_non_torch": _non_torch,
    "activation_peak": _activation,
    "component:vllm_activation_peak": _activation,
    "kv_cache_memory": _memory,
    "kv_cache_memory_exact": _memory,
    "component:vllm_kv_cache": _memory,
    "kv_cache_tokens_printed": _tokens,
    "num_gpu_blocks": _blocks,
    "num_cpu_blocks": _cpu_blocks,
    "max_concurrency": _concurrency,
    "usable_budget": _budget,
    "cudagraph_memory_actual": _graphs,
    "component:vllm_cuda_graph": _graphs,
    "initial_memory_usage": _resident,
    "memory_usage_post_profile": _resident,
    "consumed_weights_plus_non_torch": _resident,
    "peak_torch_memory": _torch_peak,
}
