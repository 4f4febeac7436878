"""A vLLM start-up against the plan, term by term, and what its KV cache allows, exactly."""

from dataclasses import dataclass
from typing import Any

from planner.doctor.context import Context
from planner.doctor.sizes import printed
from planner.doctor.vllm_log import VllmLog
from planner.errors import VramwiseError
from planner.importers.vllm import read
from planner.machines.machine import Machine
from planner.plan import Plan, plan
from planner.terms.engine import kv_pool
from planner.units import GiB, format_bytes

ROUNDING_BYTES = 5 * GiB // 200
"""Five figures of a log, each printed to 0.01 GiB: half of that is lost in each."""
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """What one engine's log shows."""

    rows: tuple[tuple[str, int | None, int | None], ...]
    """(term, logged bytes, planned bytes)."""
    budget_bytes: int | None
    unexplained_bytes: int | None
    """budget - weights - non-torch - activation - KV (- graphs since 0.21): 0 when the log closes."""
    kv_bytes_per_token: int | None
    requests: tuple[tuple[int, int], ...]
    """(length, how many such requests the KV cache holds at once)."""
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "terms": [
                {"name": name, "logged_bytes": logged, "planned_bytes": planned}
                for name, logged, planned in self.rows
            ],
            "budget_bytes": self.budget_bytes,
            "unexplained_bytes": self.unexplained_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "requests": [{"tokens": tokens, "count": count} for tokens, count in self.requests],
            "advice": list(self.advice),
        }

    def text(self) -> str:
        """Return the report for a person."""
        lines = ["vLLM start-up", f"  {'':<14}{'logged':>14}{'planned':>14}"]
        for name, logged, planned in self.rows:
            cells = [
                format_bytes(value) if value is not None else "-" for value in (logged, planned)
            ]
            lines.append(f"  {name:<14}{cells[0]:>14}{cells[1]:>14}")
        if self.budget_bytes is not None:
            lines.append(f"  {'budget':<14}{format_bytes(self.budget_bytes):>14}")
        if self.unexplained_bytes is not None:
            lines.append(f"  {'unexplained':<14}{format_bytes(self.unexplained_bytes):>14}")
        if self.requests:
            shown = ", ".join(f"{count:,} of {tokens:,}" for tokens, count in self.requests)
            lines.append(f"  requests the KV cache holds at once: {shown} tokens")
        return "\n".join([*lines, *(f"  {sentence}" for sentence in self.advice)])


def serving_report(log: VllmLog, context: Context) -> ServingReport | None:
    """Return the log beside the plan, or None when the log shows no engine."""
    if not log.started:
        return None
    planned = planned_engine(log, context)
    serving = planned.serving if planned else None
    tokens = log.kv_tokens or _tokens(log, context, planned)
    per_token = log.kv_bytes_per_token
    if per_token is None and tokens and log.kv_bytes:
        per_token = log.kv_bytes // tokens
    budget = log.budget_bytes
    if budget is None and log.total_bytes and log.gpu_memory_utilization:
        budget = int(log.total_bytes * log.gpu_memory_utilization)
    rows = (
        ("weights", log.weights_bytes, serving.weights_bytes if serving else None),
        ("non-torch", log.non_torch_bytes, serving.non_torch.typical if serving else None),
        ("activation", log.activation_bytes, serving.activation_peak_bytes if serving else None),
        ("CUDA graphs", log.graphs_bytes, serving.graphs.typical if serving else None),
        ("KV cache", log.kv_bytes, serving.kv.typical if serving else None),
    )
    lengths = sorted({*LENGTHS, *((log.request_tokens,) if log.request_tokens else ())})
    requests = tuple(
        (length, tokens // length) for length in lengths if tokens and tokens // length
    )
    return ServingReport(
        rows=rows,
        budget_bytes=budget,
        unexplained_bytes=_unexplained(log, budget),
        kv_bytes_per_token=per_token,
        requests=requests[-6:],
        advice=_advice(log, tokens, per_token),
    )


def _tokens(log: VllmLog, context: Context, planned: Plan | None) -> int | None:
    """Return the tokens of the printed pool, cut as vLLM cuts it."""
    if planned is None or context.model is None or not log.kv_bytes:
        return None
    pool = kv_pool(context.model, planned.resolved, log.kv_bytes)
    return pool.tokens if pool else None


def _unexplained(log: VllmLog, budget: int | None) -> int | None:
    if budget is None or None in (log.weights_bytes, log.kv_bytes, log.activation_bytes):
        return None
    parts = (log.weights_bytes, log.kv_bytes, log.activation_bytes, log.non_torch_bytes)
    rest = budget - sum(part or 0 for part in parts)
    return 0 if abs(rest) <= ROUNDING_BYTES else rest  # every figure is printed with two decimals


def _advice(log: VllmLog, tokens: int | None, per_token: int | None) -> tuple[str, ...]:
    found = []
    length = log.request_tokens or int(log.settings.get("max_seq_len", 0) or 0)
    if tokens and length:
        ratio = tokens / length
        found.append(
            f"{tokens:,} tokens of KV cache hold {ratio:.2f} requests of {length:,} tokens"
        )
        if log.max_concurrency and abs(ratio - log.max_concurrency) > 0.02 * ratio:
            found.append(
                f"the log says {log.max_concurrency:.2f}: sliding windows or a hybrid cache need less for a long request"
            )
        if ratio < 1:
            found.append(f"--max-model-len {tokens} is the longest that starts")
    if (
        log.total_bytes
        and log.gpu_memory_utilization
        and per_token
        and log.gpu_memory_utilization < 0.95
    ):
        more = int(0.01 * log.total_bytes)
        found.append(
            f"every 0.01 of --gpu-memory-utilization is {printed(more)}, {more // per_token:,} tokens more"
        )
    return tuple(found)


def planned_engine(log: VllmLog, context: Context) -> Plan | None:
    """Return the plan of the engine by its own settings and release; None where it cannot be made."""
    model = context.model
    total = log.total_bytes or context.vram_bytes
    if model is None or not total:
        return None
    values: dict[str, Any] = {"model": context.model_name, **_arguments(log)}
    try:
        run = read(values, version=log.version or None).run
        machine = Machine(vram_bytes=max(total, GiB), num_gpus=run.machine.gpus)
        return plan(model, run.recipe, machine)
    except VramwiseError:
        return None


_UNSET = frozenset({"None", "null", "", "auto"})
_RENAMED = {"max_seq_len": "max_model_len", "model_tag": ""}


def _arguments(log: VllmLog) -> dict[str, Any]:
    """Return the settings that the log prints as the server's arguments."""
    found: dict[str, Any] = {}
    for key, value in log.settings.items():
        name = _RENAMED.get(key, key)
        if name and name != "model" and value not in _UNSET:
            found[name.replace("_", "-")] = {"True": True, "False": False}.get(value, value)
    if log.gpu_memory_utilization:
        found["gpu-memory-utilization"] = log.gpu_memory_utilization
    if "max-model-len" not in found and log.request_tokens:
        found["max-model-len"] = log.request_tokens
    return found
