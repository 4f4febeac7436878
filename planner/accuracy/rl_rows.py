"""Rows of rl.csv: GRPO runs, loss heads, colocated engines, context limits."""

import re

from planner.accuracy.kernels import predict_kernel
from planner.accuracy.loss_head import Head
from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered, Prediction, around
from planner.accuracy.rl_recipe import rl_recipe
from planner.accuracy.rows import Row
from planner.accuracy.sft_rows import figure, load_bytes
from planner.accuracy.vllm_rows import predict_vllm
from planner.plan import plan
from planner.terms.kv_cache import sequence_bytes

BOUNDLESS_GIB = 4096.0
_PLANNED = {
    "peak_allocated": "peak_allocated",
    "peak_reserved": "peak_reserved",
    "reserved_after_run": "peak_reserved",
    "nvidia-smi": "nvidia_smi_used_peak",
}


def predict_rl(row: Row) -> Prediction:
    """Return what the planner says about a row of rl.csv."""
    quantity = row.quantity
    if row["model"].startswith("lm_head"):
        return predict_kernel(row)
    if quantity.startswith("component:vllm_"):
        return predict_vllm(row)
    if quantity == "component:training":
        return around("published_training", _training(row), 0.8, 1.2)
    if quantity.startswith("vendor_estimate"):
        return _sum_of_lines(row)
    if quantity.startswith(("component:logprob_peak", "oom_alloc")):
        return _log_probabilities(row)
    if quantity.startswith("component:"):
        return _component(row)
    model = model_named(row["model"])
    recipe = rl_recipe(row, model)
    machine = machine_named(row["gpu"], row.integer("num_gpus") or 1)
    result = plan(model, recipe, machine)
    if quantity in _PLANNED:
        return figure(_PLANNED[quantity], result)
    if quantity == "max_context_capacity":
        # the figure is the memory with which this context was the largest
        value = result.device_used_bytes
        return Prediction(quantity, value, result.low_bytes, 1.1 * result.high_bytes)
    if quantity == "reserved_before_train":
        return around("static_load_reserved", load_bytes(result), 0.97, 1.1)
    if quantity == "training_delta_reserved":
        value = result.reserved_peak_bytes - load_bytes(result)
        return around(quantity, value, 0.7, 1.4)
    raise NotCovered(f"the figure {quantity!r} is not one that the planner states")


def _training(row: Row) -> int:
    """Return the training line of a published GRPO table: an SFT step on all completions."""
    fields = {"algo": "sft", "vllm": "none", "framework": "hf", "lora_rank": "32"}
    if row["framework"] == "unsloth":
        fields["framework"] = "unsloth"
    model = model_named(row["model"])
    recipe = rl_recipe(row.changed(**fields), model)
    # no card holds this job: the allocator is not pressed by a capacity
    return plan(model, recipe, machine_named("", 1, BOUNDLESS_GIB)).device_used_bytes


def _sum_of_lines(row: Row) -> Prediction:
    """Return a total or a saving of a published GRPO table from its lines."""
    name = row.quantity.removeprefix("vendor_estimate:")
    full = row.changed(framework="trl", loss_impl="full_logits", grad_ckpt="", attn="fa2")
    logits, weights = (
        {
            side: _component(part.changed(quantity_measured=f"component:{line}")).value
            for side, part in (("full", full), ("own", row))
        }
        for line in ("grpo_logits", "inference_weights")
    )
    if name == "total":
        cache = sequence_bytes(model_named(row["model"]), row.integer("seq_len") or 0)
        value = _training(row) + logits["own"] + weights["own"] + cache
    elif name == "saving_grad_ckpt":
        value = _training(full) - _training(row)
    elif name == "saving_linear_algorithm":
        value = logits["full"] - logits["own"]
    else:
        raise NotCovered("a vendor's estimate, not a measurement")
    return around(f"published_{name}", value, 0.8, 1.2)


def _component(row: Row) -> Prediction:
    """Return one line of a published GRPO table."""
    model, name = model_named(row["model"]), row.quantity.removeprefix("component:")
    tokens = row.integer("seq_len") or 0
    shared = row["framework"] == "unsloth"
    if name == "grpo_logits":
        rows = tokens * (1 if shared else row.integer("num_generations") or 1)
        return around("grpo_logits", 2 * 2 * rows * model.vocab, 0.99, 1.01)
    if name == "kv_cache":
        return around("kv_cache", sequence_bytes(model, tokens), 0.99, 1.01)
    if name == "inference_weights":
        value = 0 if shared else 2 * model.parameters
        return Prediction("engine_weights", value, 0.99 * value, 1.01 * value)
    raise NotCovered(f"the figure {row.quantity!r} is not one that the planner states")


def _log_probabilities(row: Row) -> Prediction:
    """Return the fp32 tensors that make log-probabilities of materialised logits."""
    named = re.search(r"vocab (\d+)", row["model"])
    vocab = int(named[1]) if named else _padded_vocab(row)
    length = row.integer("seq_len") or 0
    head = Head(0, vocab, length * (row.integer("batch_per_device") or 1), length, 4)
    if row.quantity == "oom_alloc":
        value = head.logits_bytes  # one tensor of the failed allocation
    elif row.quantity.endswith("naive"):
        value = 2 * head.logits_bytes  # logits and their log-softmax
    else:
        value = head.logits_bytes + head.sequence_logits_bytes  # row by row
    return around("logprob_tensors", value, 0.97, 1.03)


def _padded_vocab(row: Row) -> int:
    """Return this rank's part of the vocabulary, padded as Megatron does (128 x ranks)."""
    ranks = int((re.search(r"tp(\d+)", row["sharding"]) or ["", "1"])[1])
    step = 128 * ranks
    return -(-model_named(row["model"]).vocab // step) * step // ranks
