"""Kernel micro-benchmarks (Liger's): one forward and backward, buffer by buffer.

Liger's harness repeats the call ten times in one process and takes the median of
`max_memory_allocated`, so gradients of the inputs (`.grad`) are alive from the call before.
Each law lists the buffers alive at its peak; the figures agree to the last MiB.
"""

import json
import re
from dataclasses import dataclass

from planner.accuracy.names import machine_named
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rows import Row
from planner.terms.overhead import BLAS_WORKSPACE_BYTES, blas_workspace_bytes, handles

QUANTITY = "kernel_peak_allocated"
_ELEMENT = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


@dataclass(frozen=True, slots=True)
class Bench:
    """The sizes of one benchmark call."""

    kernel: str
    provider: str
    mode: str
    sizes: dict[str, int]
    element: int
    sm_count: int

    def size(self, *names: str) -> int:
        """Return the first size that is given; raises NotCovered when none is."""
        for name in names:
            if name in self.sizes:
                return self.sizes[name]
        raise NotCovered(f"kernel benchmark without the size {names[0]}")


def predict_kernel(row: Row) -> Prediction:
    """Return the peak of a kernel benchmark in bytes."""
    from benchmarks.laws.loss_head import predict_loss_benchmark

    if row["model"].startswith("lm_head") or "fused_linear" in row["model"]:
        return predict_loss_benchmark(row)
    bench = _read(row)
    law = _LAWS.get(bench.kernel)
    if law is None:
        raise NotCovered(f"no law for the kernel benchmark {bench.kernel!r}")
    return around(QUANTITY, law(bench), 0.95, 1.05)


def read_sizes(row: Row) -> tuple[dict[str, int], str]:
    """Return the integer sizes a benchmark row carries in its notes, and its dtype."""
    sizes = {name: int(value) for name, value in re.findall(r"\b([A-Z]{1,2})=(\d+)", row["notes"])}
    config = re.search(r"\{.*\}", row["notes"])
    try:
        extra = json.loads(config.group()) if config else {}
    except json.JSONDecodeError as error:
        raise NotCovered("kernel benchmark with an unreadable configuration") from error
    sizes |= {name: value for name, value in extra.items() if isinstance(value, int)}
    return sizes, str(extra.get("dtype", ""))


def workspaces(gpu: str) -> int:
    """Return the two cuBLAS workspaces of a forward and a backward thread."""
    return handles(trains=True) * blas_workspace_bytes(machine_named(gpu).gpu)


def _read(row: Row) -> Bench:
    sizes, dtype = read_sizes(row)
    kernel = row["model"].removeprefix("kernel ")
    default = 4 if kernel == "cross_entropy" else 2  # its script draws fp32 logits
    return Bench(
        kernel=kernel,
        provider=row["kernels"],
        mode=row["method"].split(":")[-1].strip(),
        sizes=sizes,
        element=_ELEMENT.get(dtype, default),
        sm_count=132 if "H100" in row["gpu"] else 108,
    )


def _cross_entropy(bench: Bench) -> float:
    rows = bench.size("B") * bench.size("T")
    logits = rows * bench.size("V") * bench.element
    if bench.provider == "liger":
        # the gradient overwrites the logits; int64 targets, fp32 loss and statistics per row
        return logits + rows * (8 + 4 + 8) + 512
    if bench.provider == "huggingface":
        # logits, .grad, log-softmax, its gradient, the new gradient of the logits
        return 5 * logits + rows * 8
    raise NotCovered(f"no law for cross_entropy by {bench.provider}")


def _embedding(bench: Bench) -> float:
    raise NotCovered(
        "the figure holds gigabytes left by earlier benchmarks of the same process, "
        "which the row does not state"
    )


def _mlp(bench: Bench) -> float:
    hidden, inner = bench.size("hidden_size"), bench.size("intermediate_size")
    tokens = bench.size("bsz", "B") * bench.size("T")
    h, i = tokens * hidden * bench.element, tokens * inner * bench.element
    weights = 3 * hidden * inner * bench.element
    work = handles(trains=True) * BLAS_WORKSPACE_BYTES
    fused = bench.provider == "liger"
    if bench.provider not in {"liger", "huggingface"}:
        raise NotCovered(f"no law for {bench.kernel} by {bench.provider}")
    if bench.mode == "forward":
        # x, .out; gate, up, product (and the activation, which the fused kernel does not keep)
        return weights + work + 2 * h + (3 if fused else 4) * i
    # weights and their .grad; one new weight gradient while hidden gradients pile up
    late = 2 * weights + weights // 3 + work
    if fused:
        return late + 7 * h + 3 * i
    early = 2 * weights + work + 4 * h + 7 * i
    return max(early, late + 5 * h + 6 * i)


def _norm(bench: Bench) -> float:
    rows = bench.size("M")
    width = bench.size("N", "H")
    x = rows * width * bench.element
    if bench.kernel == "rms_norm" and bench.provider == "huggingface":
        # bf16: x, dy, y, x.grad, new grad and the weighted product; fp32: x, x*r, their
        # gradients, the square and the scaled copy (28 of the 40 bytes)
        return rows * width * (40 if bench.element == 2 else 28) + 2 * rows * 4
    statistics = 2 * rows * 4
    # x, dy, y, x.grad and the new gradient
    plain = 5 * x + statistics
    if bench.kernel == "rms_norm" and bench.provider == "liger":
        # per-program fp32 partial sums of the weight's gradient, at most 1 MiB an SM
        return plain + min(2 * rows * width * 4, bench.sm_count * 1024**2)
    return plain


def _rope(bench: Bench) -> float:
    q_heads, k_heads = bench.size("num_q_heads"), bench.size("num_kv_heads")
    tokens = bench.size("seq_len", "T")
    head = bench.size("hidden_size", "H") // q_heads
    q, k = (n * head * tokens * bench.element for n in (q_heads, k_heads))
    tables = 2 * tokens * head * bench.element + 8 * tokens
    if bench.provider == "liger":
        return 2 * (q + k) + tables + BLAS_WORKSPACE_BYTES  # rotated in place, plus .grad
    if bench.provider == "huggingface":
        # rotate_half, its product and the sum for queries while the keys wait
        return 6 * q + 4 * k + tables + BLAS_WORKSPACE_BYTES
    raise NotCovered(f"no law for rope by {bench.provider}")


_LAWS = {
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "swiglu": _mlp,
    "geglu": _mlp,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _rope,
}
