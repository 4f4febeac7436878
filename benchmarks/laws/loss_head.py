"""Loss-head micro-benchmarks: hidden states and lm_head to a loss, forward and backward.

One unit of logits is tokens x vocabulary in the hidden dtype. Counts of units, hidden states
and weight copies are those alive at the peak; Liger's script holds a torch and a Liger module
(two weights), the weight's `.grad` of the call before, and for algorithms with a reference a
second head in each.
"""

import re
from dataclasses import dataclass

from benchmarks.laws.kernels import read_sizes, workspaces
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rows import Row

QUANTITY = "loss_head_peak_allocated"


@dataclass(frozen=True, slots=True)
class Head:
    """Sizes of one loss-head call."""

    hidden: int
    vocab: int
    tokens: int
    length: int
    """Tokens of one sequence."""
    element: int = 2

    @property
    def weight_bytes(self) -> int:
        """One lm_head weight."""
        return self.hidden * self.vocab * self.element

    @property
    def logits_bytes(self) -> int:
        """Logits of all tokens in the hidden dtype."""
        return self.tokens * self.vocab * self.element

    @property
    def hidden_bytes(self) -> int:
        """Hidden states of all tokens."""
        return self.tokens * self.hidden * self.element

    @property
    def sequence_logits_bytes(self) -> int:
        """Logits of one sequence in the hidden dtype."""
        return self.length * self.vocab * self.element


# algorithm: weights, logits units, hidden copies alive at the peak of the full-logits version
_FULL = {
    "sft": (3, 3, 2),  # log-softmax, its gradient, dlogits; x and x.grad
    "preference": (5, 7, 2),  # fp32 log-softmax and gradient (2 + 2 units each) stay to the end
    "kto": (10, 7, 2),
    "grpo": (5, 8, 3),  # 16 bytes per element: logits, fp32 log-softmax, gradients, reference
}
# weights, sequence-logits units of the chunk, hidden copies of the chunked version
_CHUNKED = {
    "orpo": (5, 12, 3),
    "cpo": (5, 12, 3),
    "simpo": (5, 10, 3),
    "dpo": (7, 12, 4),
    "kto": (7, 12, 3),
    "grpo": (7, 1, 4),
}
_KIND = {"orpo": "preference", "cpo": "preference", "simpo": "preference", "dpo": "preference"}
_SAME_TENSORS = {"gspo": "grpo", "dapo": "grpo", "dr_grpo": "grpo", "bnpo": "grpo", "cispo": "grpo"}


def predict_loss_benchmark(row: Row) -> Prediction:
    """Return the peak of a loss-head benchmark in bytes."""
    if "XTuner" in row["kernels"]:
        return _xtuner(row)
    head = _head(row)
    algorithm = _SAME_TENSORS.get(row["algo"], row["algo"]) or "sft"
    provider = row["framework"].lower() if row["algo"] else row["kernels"].lower()
    fused = "liger" in provider or row["loss_impl"] in {"liger", "chunked"}
    work = workspaces(row["gpu"])
    if algorithm == "sft":
        value = (_liger_cross_entropy(head) if fused else _full(head, "sft")) + work
    elif fused:
        value = _chunked(head, algorithm) + work
    else:
        value = _full(head, _KIND.get(algorithm, algorithm)) + work
    return around(QUANTITY, value, 0.9, 1.1)


def _head(row: Row) -> Head:
    sizes, dtype = read_sizes(row)
    named = {key: int(value) for key, value in re.findall(r"\b([HV])=(\d+)", row["model"])}
    sizes = {**sizes, **named}
    hidden, vocab = sizes.get("H"), sizes.get("V")
    length = row.integer("seq_len") or sizes.get("BT") or sizes.get("T")
    if not hidden or not vocab or not length:
        raise NotCovered("loss-head benchmark without hidden, vocabulary and tokens")
    batch = row.integer("batch_per_device") or sizes.get("B") or 1
    wide = "float32" in dtype or row["dtype"] == "fp32"
    return Head(hidden, vocab, batch * length, length, 4 if wide else 2)


def _full(head: Head, kind: str) -> int:
    if kind not in _FULL:
        raise NotCovered(f"no buffer list for the full-logits loss {kind!r}")
    weights, units, hidden = _FULL[kind]
    return (
        weights * head.weight_bytes
        + units * head.logits_bytes
        + hidden * head.hidden_bytes
        + 8 * head.tokens
    )


def _chunked(head: Head, algorithm: str) -> int:
    if algorithm not in _CHUNKED:
        raise NotCovered(f"no buffer list for the chunked loss {algorithm!r}")
    weights, units, hidden = _CHUNKED[algorithm]
    return (
        weights * head.weight_bytes
        + units * head.sequence_logits_bytes
        + hidden * head.hidden_bytes
    )


def _liger_cross_entropy(head: Head) -> int:
    """Liger's fused linear cross-entropy: chunks of next_pow2(tokens / ceil(V / H)) rows."""
    parts = -(-head.vocab // head.hidden)
    rows = 1 << max(0, (-(-head.tokens // parts) - 1).bit_length())
    # half logits, their fp32 copy, the half gradient; x, x.grad and the new gradient
    chunk = 4 * rows * head.vocab * head.element
    return 4 * head.weight_bytes + chunk + 3 * head.hidden_bytes + 12 * head.tokens


def _xtuner(row: Row) -> Prediction:
    """XTuner's chunked cross-entropy: fp32 logits of one chunk, gradients accumulated."""
    sizes = re.search(r"(\d+)x(\d+)", row["model"])
    chunk = re.search(r"chunk_size (\d+)", row["kernels"])
    tokens = row.integer("seq_len")
    if not sizes or not chunk or not tokens:
        raise NotCovered("loss-head benchmark without hidden, vocabulary and chunk size")
    head = Head(int(sizes[1]), int(sizes[2]), tokens, int(chunk[1]))
    weight, rows = head.weight_bytes, head.length * head.vocab
    # weight, .grad, accumulated and new gradient; x, x.grad, its parts; five fp32 chunk buffers
    value = 4 * weight + 3 * head.hidden_bytes + 5 * rows * 4 + workspaces(row["gpu"])
    return around("peak_reserved" if "reserved" in row.quantity else QUANTITY, value, 0.9, 1.15)
