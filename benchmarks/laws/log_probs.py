"""The fp32 tensors that make log-probabilities of materialised logits (rows of rl.csv)."""

import re

from benchmarks.laws.loss_head import Head
from planner.accuracy.names import model_named
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rows import Row


def predict_log_probs(row: Row) -> Prediction:
    """Return the bytes of the tensors; raises NotCovered for figures that are something else."""
    named = re.search(r"vocab (\d+)", row["model"])
    vocab = int(named[1]) if named else _padded_vocab(row)
    length = row.integer("seq_len") or 0
    head = Head(0, vocab, length * (row.integer("batch_per_device") or 1), length, 4)
    if row.quantity == "oom_alloc":
        value = head.logits_bytes  # one tensor of the failed allocation
    elif row.quantity.endswith("logprob_peak_naive"):
        value = 2 * head.logits_bytes  # logits and their log-softmax
    elif row.quantity.endswith("logprob_peak_selective"):
        value = head.logits_bytes + head.sequence_logits_bytes  # row by row
    else:
        raise NotCovered(f"no law for the figure {row.quantity!r}")
    return around("logprob_tensors", value, 0.97, 1.03)


def _padded_vocab(row: Row) -> int:
    """Return this rank's part of the vocabulary, padded as Megatron does (128 x ranks)."""
    ranks = int((re.search(r"tp(\d+)", row["sharding"]) or ["", "1"])[1])
    step = 128 * ranks
    return -(-model_named(row["model"]).vocab // step) * step // ranks
