"""vLLM start-up logs: every figure is read off the plan of the run that the row describes.

A figure that follows from another line of the same log (tokens of the printed pool) has a name that
starts with log_: it checks how blocks are cut, and predicts nothing.
"""

from collections.abc import Callable

from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rows import Row
from planner.accuracy.vllm_engine import DEGREES, ENCODER, RANK, SKIP_LIST, Run, run_of
from planner.machines.vllm_overheads import Measured
from planner.plan import Plan
from planner.terms.engine import Serving, kv_pool
from planner.terms.vllm_blocks import VllmKv

_POOL = ("kv_cache_memory_exact", "kv_cache_memory", "component:vllm_kv_cache")


def predict_vllm(row: Row) -> Prediction:
    """Return what the plan says about one figure of a vLLM log."""
    law = _LAWS.get(row.quantity)
    if law is None:
        raise NotCovered(f"the figure {row.quantity!r} is not one that the planner states")
    return law(row, run_of(row))


def _serving(found: Plan) -> Serving:
    if found.serving is None:
        raise NotCovered("no engine runs in this plan")
    return found.serving


def _figure(
    name: str, run: Run, read: Callable[[Serving], Measured], *, card: bool = True
) -> Prediction:
    """Return a figure with the interval of its empirical parts and of the choices left open."""
    result = run.planned(card=card)
    value = read(_serving(result))
    spread = [value, *(read(_serving(other)) for other in run.alternatives())]
    low, high = min(item.low for item in spread), max(item.high for item in spread)
    return Prediction(_named(name, run, card), value.typical, low, high, result)


def _named(name: str, run: Run, card: bool) -> str:
    """Return the quantity's name; figures of runs with open choices are kept apart."""
    settled = _MOVES_WEIGHTS if not card else None
    left = [choice for choice in run.open if settled is None or choice in settled]
    return f"{name}_unstated" if left else name


def _more_weights(run: Run, serving: Serving) -> int:
    """Return what a list of 16-bit modules that nobody saw may add: Unsloth's dynamic ones, 15%."""
    return int(0.15 * serving.weights_bytes) if SKIP_LIST in run.open else 0


def _more_activations(run: Run, serving: Serving) -> int:
    """Return what an encoder's own profile may add: one log's peak was six times the text's (F0097)."""
    return 5 * serving.activation_peak_bytes if ENCODER in run.open else 0


_MOVES_WEIGHTS = frozenset({SKIP_LIST, DEGREES, "adapter rank"})


def _around(value: float, low: float, high: float) -> Measured:
    return Measured(int(value * low), int(value), int(value * high))


def _weights(row: Row, run: Run) -> Prediction:
    if "store loader" in row["model"]:
        raise NotCovered("weights are loaded outside torch's allocator")
    return _figure("model_weights", run, lambda s: _weights_range(run, s), card=False)


def _weights_range(run: Run, serving: Serving) -> Measured:
    found = _around(serving.weights_bytes, 0.98, 1.02)
    return found._replace(high=found.high + _more_weights(run, serving))


def _non_torch(row: Row, run: Run) -> Prediction:
    return _figure("non_torch_memory", run, lambda s: s.non_torch)


def _settle(row: Row, run: Run) -> None:
    """Refuse what nobody could plan from the row's arguments."""
    law = run.planned(card=False).resolved.framework.engine
    if "length" in run.open and law.whole_prompts_up_to:
        raise NotCovered("the log states no length, and this release profiles whole prompts")


def _activation(row: Row, run: Run) -> Prediction:
    _settle(row, run)
    # the card only moves the library's workspace and the default batch
    card = run.machine is not None or row.integer("max_num_seqs") is None
    return _figure("activation_peak", run, lambda s: _peak_range(run, s), card=card)


def _peak_range(run: Run, serving: Serving) -> Measured:
    found = _around(serving.activation_peak_bytes, 0.95, 1.1)
    return found._replace(high=found.high + _more_activations(run, serving))


def _pool_range(run: Run, serving: Serving) -> Measured:
    taken = _more_weights(run, serving) + _more_activations(run, serving)
    return serving.kv._replace(low=serving.kv.low - taken)


def _memory(row: Row, run: Run) -> Prediction:
    _settle(row, run)
    # a printed pool of no bytes is a refusal (Row.failed): only the plan's verdict counts then
    return _figure("kv_cache_memory", run, lambda s: _pool_range(run, s))


def _logged(row: Row) -> float | None:
    """Return the pool that the same log prints."""
    sizes = (row.peers.get(name) for name in _POOL)
    return next((size for size in sizes if size is not None and size > 0), None)


def _cut(run: Run, kv_bytes: float) -> VllmKv:
    found = run.planned(card=False)
    pool = kv_pool(run.model, found.resolved, int(kv_bytes))
    if pool is None:
        raise NotCovered("the model keeps no KV cache")
    return pool


def _counted(name: str, read: Callable[[VllmKv], float]) -> Callable[[Row, Run], Prediction]:
    """Return the law of a count that vLLM prints of its pool."""

    def law(row: Row, run: Run) -> Prediction:
        logged = _logged(row)
        if logged is not None:
            _countable(run)
            value = read(_cut(run, logged))
            # the pool is printed with two decimals
            return Prediction(f"log_{name}", value, 0.99 * value, 1.01 * value)
        pool = _figure(name, run, lambda s: _pool_range(run, s))
        result = run.planned()
        pools = (
            kv_pool(run.model, result.resolved, int(size))
            for size in (pool.low, pool.value, pool.high)
        )
        low, typical, high = (read(found) if found else 0.0 for found in pools)
        return Prediction(pool.quantity, typical, low, high, result)

    return law


def _countable(run: Run) -> None:
    """Refuse to count a pool's bytes where the row leaves its cut open."""
    if "a draft model" in run.open:
        raise NotCovered("a draft model's cache shares the pool")
    if RANK in run.open:
        raise NotCovered("the pool is one rank's, the count the least of all ranks")
    _same_count(run)


def _same_count(run: Run) -> None:
    """Refuse what releases count differently where the release is not known."""
    if "version" in run.open and len({layer.mixer.kind for layer in run.model.layers}) > 1:
        raise NotCovered(
            "the release is not known, and they count a hybrid model's tokens differently"
        )


def _concurrency(row: Row, run: Run) -> Prediction:
    blocks, tokens = (row.peers.get(name) for name in ("num_gpu_blocks", "kv_cache_tokens_printed"))
    if blocks is None and tokens is None:
        return _counted("max_concurrency", lambda pool: pool.concurrency)(row, run)
    _same_count(run)
    pool = _cut(run, 0)
    pool = pool.of_blocks(int(blocks)) if blocks is not None else pool.of_tokens(int(tokens or 0))
    value = pool.concurrency
    return Prediction("log_max_concurrency", value, 0.98 * value, 1.02 * value)


def _cpu_blocks(row: Row, run: Run) -> Prediction:
    if "unsloth" in f"{row['source']} {row['model']}".lower():
        raise NotCovered("Unsloth sets the swap space itself; the log does not print it")
    return _figure("num_cpu_blocks", run, lambda s: _around(s.cpu_blocks, 0.99, 1.01), card=False)


def _budget(row: Row, run: Run) -> Prediction:
    return _figure("usable_budget", run, lambda s: _around(s.budget_bytes, 0.995, 1.005))


def _graphs(row: Row, run: Run) -> Prediction:
    return _figure("cudagraph_memory_actual", run, lambda s: s.graphs)


def _resident(row: Row, run: Run) -> Prediction:
    return _figure(
        "weights_and_non_torch",
        run,
        lambda s: Measured(*(s.weights_bytes + size for size in s.non_torch)),
    )


def _torch_peak(row: Row, run: Run) -> Prediction:
    return _figure(
        "peak_torch_memory",
        run,
        lambda s: _around(s.weights_bytes + s.activation_peak_bytes, 0.98, 1.05),
    )


_LAWS: dict[str, Callable[[Row, Run], Prediction]] = {
    "model_weights": _weights,
    "component:vllm_weights": _weights,
    "non_torch_memory": _non_torch,
    "component:vllm_non_torch": _non_torch,
    "activation_peak": _activation,
    "component:vllm_activation_peak": _activation,
    "kv_cache_memory": _memory,
    "kv_cache_memory_exact": _memory,
    "component:vllm_kv_cache": _memory,
    "kv_cache_tokens_printed": _counted("kv_cache_tokens_printed", lambda pool: pool.tokens),
    "num_gpu_blocks": _counted("num_gpu_blocks", lambda pool: pool.num_blocks),
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
