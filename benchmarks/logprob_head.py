"""The log-prob head against naive full logits, TRL's tiles and Liger's torch path: peak and time.

One forward and backward of sum(logp), all implementations in one process on the same tensors:
`python benchmarks/logprob_head.py [--json]`. Peak = most bytes alive at once by storage, the head's
weight included, the weight's gradient too where it is trained. Time = CPU seconds of this process, which
a busy machine distorts less than the wall clock. `naive` is logits.float().log_softmax(). All on a CPU:
TRL's tiles make more temporaries there than its Triton kernel does on a GPU.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.units import MiB
from profiler.storages import StorageTracker
from trainer.logprob_head import logprob_head

SCHEMA_VERSION = 1
Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], weight [V, H], target [N]) -> sum of logp, differentiable."""
CHECKED_ROWS = 64
"""Rows whose gradient is compared with fp64."""
LIGER_SEQUENCES = 8
"""Liger's loss works on whole sequences: N is split into this many."""


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """This repository's head, entropy included, as TRL's."""
    return logprob_head(hidden, weight, target, entropy=True).logp.sum()


def naive(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Full logits, upcast."""
    logits = (hidden @ weight.t()).float()
    return logits.log_softmax(-1).gather(1, target[:, None]).sum()


def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """TRL's fused head, with the arguments of its GRPOTrainer."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    arguments = (hidden, weight, None, target, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0)
    return ChunkedLogProbFunction.apply(*arguments, ("entropy",))[0].sum()


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's fused GRPO loss on policy with advantages of 1: minus its gradient is sum(logp)'s."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    shape = (LIGER_SEQUENCES, -1)
    return -loss(
        hidden.reshape(*shape, hidden.shape[1]),
        weight,
        target.reshape(shape),
        torch.ones_like(target).reshape(shape),
        torch.ones(LIGER_SEQUENCES),
        num_items_in_batch=1,
    )[0]


IMPLEMENTATIONS: dict[str, tuple[Head, str | None]] = {
    "vramwise": (ours, None),
    "naive": (naive, None),
    "trl": (trl, "trl"),
    "liger": (liger, "liger_kernel"),
}


def installed() -> dict[str, Head]:
    """Return the implementations whose package is there."""
    return {
        name: head
        for name, (head, package) in IMPLEMENTATIONS.items()
        if package is None or importlib.util.find_spec(package) is not None
    }


def tensors(
    options: argparse.Namespace, rows: int, *, trainable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden, weight and target of the asked sizes."""
    generator = torch.Generator().manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    weight = torch.randn(options.vocab, options.width, generator=generator).mul_(0.05).to(dtype)
    hidden = torch.randn(rows, options.width, generator=generator).to(dtype)
    target = torch.randint(0, options.vocab, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(trainable), target


def peak_bytes(head: Head, options: argparse.Namespace, *, trainable: bool) -> int:
    """Return the most bytes alive during one forward and backward, inputs included.

    On fake tensors: the same storages, no arithmetic. Liger reads values, so it runs for real.
    """
    try:
        with FakeTensorMode():
            return _peak_bytes(head, tensors(options, options.rows, trainable=trainable))
    except DataDependentOutputException:
        return _peak_bytes(head, tensors(options, options.rows, trainable=trainable))


def _peak_bytes(head: Head, inputs: tuple[Tensor, Tensor, Tensor]) -> int:
    with StorageTracker() as tracker:
        for name, tensor in zip(("hidden", "weight", "target"), inputs, strict=True):
            tracker.adopt(tensor, term=name, module="")
        head(*inputs).backward()
    live = peak = 0
    for event in tracker.events:
        live += event.block.bytes if event.alloc else -event.block.bytes
        peak = max(peak, live)
    return peak


def measure(options: argparse.Namespace, *, trainable: bool) -> list[dict[str, object]]:
    """Return one row an implementation: peak, median time, error of the hidden gradient."""
    heads = installed()
    inputs = tensors(options, options.timed_rows, trainable=trainable)
    hidden, weight, _ = inputs
    exact = reference_gradient(inputs)
    rows: list[dict[str, object]] = []
    for name, head in heads.items():
        peak = peak_bytes(head, options, trainable=trainable)
        hidden.grad = weight.grad = None
        head(*inputs).backward()
        assert hidden.grad is not None
        found = hidden.grad[:CHECKED_ROWS].double()
        error = ((found - exact).norm() / exact.norm()).item()
        rows.append(
            {"implementation": name, "peak_bytes": peak, "hidden_grad_relative_error": error}
        )
    times: dict[str, list[float]] = {name: [] for name in heads}
    # interleaved: what slows the machine down slows all of them down
    for _ in range(options.repeat):
        for name, head in heads.items():
            hidden.grad = weight.grad = None
            start = time.process_time()
            head(*inputs).backward()
            times[name].append(time.process_time() - start)
    for row in rows:
        row["cpu_seconds"] = statistics.median(times[str(row["implementation"])])
    return rows


def reference_gradient(inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return d sum(logp) / d hidden of the first CHECKED_ROWS rows, in fp64."""
    hidden, weight, target = (tensor.detach() for tensor in inputs)
    weight = weight.double()
    probabilities = (hidden[:CHECKED_ROWS].double() @ weight.t()).softmax(-1)
    return weight[target[:CHECKED_ROWS]] - probabilities @ weight


def report(options: argparse.Namespace) -> dict[str, object]:
    """Return the whole document."""
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "rows": options.rows,
        "timed_rows": options.timed_rows,
        "width": options.width,
        "vocab": options.vocab,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "not_installed": sorted(set(IMPLEMENTATIONS) - set(installed())),
    }
    for kind, trainable in (("frozen", False), ("trainable", True)):
        found = measure(options, trainable=trainable)
        own = found[0]
        for row in found:
            row["peak_ratio"] = round(int(str(own["peak_bytes"])) / int(str(row["peak_bytes"])), 4)
            row["time_ratio"] = round(
                float(str(own["cpu_seconds"])) / float(str(row["cpu_seconds"])), 4
            )
        document[kind] = found
        document[f"{kind}_peak_bytes"] = own["peak_bytes"]
        document[f"{kind}_peak_mib"] = round(int(str(own["peak_bytes"])) / MiB, 2)
    return document


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="scored tokens N")
    parser.add_argument("--timed-rows", type=int, default=512, help="rows of the timed runs")
    parser.add_argument("--width", type=int, default=512, help="hidden size H")
    parser.add_argument("--vocab", type=int, default=65536, help="vocabulary V")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    document = report(options)
    if options.json:
        print(json.dumps(document, indent=2))
        return
    print(f"N={options.rows} H={options.width} V={options.vocab} {options.dtype}, one fwd + bwd")
    print(
        f"{'head':10} {'implementation':15} {'peak MiB':>9} {'CPU s':>8} {'ours/it: peak':>14} {'time':>6}"
    )
    for kind in ("frozen", "trainable"):
        for row in document[kind]:  # type: ignore[attr-defined]
            print(
                f"{kind:10} {row['implementation']:15} {row['peak_bytes'] / MiB:9.1f} "
                f"{row['cpu_seconds']:8.2f} {row['peak_ratio']:14.2f} {row['time_ratio']:6.2f}"
            )
    for name in document["not_installed"]:  # type: ignore[attr-defined]
        print(f"{name}: not installed, left out", file=sys.stderr)


if __name__ == "__main__":
    main()
