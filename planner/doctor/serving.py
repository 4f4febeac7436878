"""A vLLM start-up against the plan, term by term, and what its KV cache allows, exactly."""

from dataclasses import dataclass
from typing import Any

from planner.doctor.context import Context
from planner.doctor.sizes import printed
from planner.doctor.vllm_log import VllmLog
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.plan import Plan, plan
from planner.run.recipe import EngineKind, EngineSection, Method, Recipe, Task
from planner.units import GiB, format_bytes

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
    planned = _plan(log, context)
    terms = {term.name: term.bytes for term in planned.phase("rollout").terms} if planned else {}
    per_token = log.kv_bytes_per_token or _per_token(terms, log)
    tokens = log.kv_tokens or (log.kv_bytes // per_token if log.kv_bytes and per_token else None)
    budget = log.budget_bytes
    if budget is None and log.total_bytes and log.gpu_memory_utilization:
        budget = int(log.total_bytes * log.gpu_memory_utilization)
    rows = (
        ("weights", log.weights_bytes, terms.get("weights")),
        ("non-torch", log.non_torch_bytes, terms.get("overhead")),
        ("activation", log.activation_bytes, terms.get("engine")),
        ("CUDA graphs", log.graphs_bytes, None),
        ("KV cache", log.kv_bytes, None),
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


def _unexplained(log: VllmLog, budget: int | None) -> int | None:
    if budget is None or None in (log.weights_bytes, log.kv_bytes, log.activation_bytes):
        return None
    parts = (log.weights_bytes, log.kv_bytes, log.activation_bytes, log.non_torch_bytes)
    return budget - sum(part or 0 for part in parts)


def _per_token(terms: dict[str, int], log: VllmLog) -> int | None:
    length = int(log.settings.get("max_seq_len", 0) or 0)
    return terms["kv_cache"] // length if length and "kv_cache" in terms else None


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


def _plan(log: VllmLog, context: Context) -> Plan | None:
    model = context.model
    total = log.total_bytes or context.vram_bytes
    if model is None or not total:
        return None
    settings = log.settings
    length = int(settings.get("max_seq_len", 0) or 0) or log.request_tokens or 4096
    seqs = settings.get("max_num_seqs", "")
    recipe = Recipe(
        task=Task.SERVE,
        method=Method.FULL,
        framework="vllm",
        context=length,
        engine=EngineSection(
            kind=EngineKind.VLLM_SERVER,
            gpu_memory_utilization=log.gpu_memory_utilization,
            tensor_parallel=int(settings.get("tensor_parallel_size", 1) or 1),
            max_num_seqs=int(seqs) if seqs.isdigit() else None,
        ),
    )
    try:
        return plan(model, recipe, Machine(vram_bytes=max(total, GiB)))
    except VramwiseError:
        return None
