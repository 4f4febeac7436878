"""sync: the policy's weights on their way to the engine, after a step and before a rollout.

What is divided is made whole for it: a tensor, a layer or all of the model at once, as the framework does
it. TRL 1.16 generation/vllm_generation.py sync_weights: one tensor at a time, under FSDP1 one unit, but
all of a PEFT model under ZeRO-3, whose adapters are merged first. ms-swift 4.6 rollout_mixin.py: all at once
unless move_model_batches says otherwise (modelscope/ms-swift#7986). verl 0.9 vllm_rollout.py: a tensor at
a time through a bucket; adapters alone once the engine has the base.
"""

from math import prod

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.counts import base_weights, lora_of
from planner.terms.shards import outside_layers
from planner.terms.term import Term
from planner.terms.weights import trained_width

SOURCE = "TRL vllm_generation.py sync_weights; ms-swift rollout_mixin.py; verl vllm_rollout.py update_weights"
WORDS = {"tensor": "one tensor", "layer": "one layer", "model": "all of the model"}


def sync_unit(r: Resolved) -> str | int:
    """Return what is whole at once while weights are pushed: tensor, layer, model, a part; "" = nothing."""
    here, merged = r.placement, r.method is not Method.FULL
    if not here.gathers:
        return ""
    if merged and r.switches.syncs_adapters_alone and not r.folds_adapters:
        return ""
    if isinstance(r.sync, int):
        return r.sync
    if merged and here.window and r.switches.merges_whole:
        return "model"
    if r.sync == "tensor" and not (here.flat_buffers or here.window):
        return "layer"  # FSDP1's flat parameters come whole or not at all
    return r.sync


def synced(model: ModelSpec, r: Resolved) -> Term:
    """Return the whole copies, and the bucket they are sent through."""
    unit, width = sync_unit(r), max(element_bytes(r.dtype), trained_width(r))
    if r.method is not Method.FULL:
        width = element_bytes(r.dtype)
    outside = sum(module.parameters for module in outside_layers(model))
    layer = max(layer.parameters for layer in model.layers)
    if r.folds_adapters:
        layer += _folded(model, r)
    if isinstance(unit, int):
        elements = max(outside, -(-model.num_layers // unit) * layer)
    else:
        elements = {
            "": 0,
            "tensor": _largest_tensor(model),
            "layer": max(outside, layer),
            "model": model.parameters,
        }[unit]
    size = elements * width
    base = base_weights(model, r)
    if base.quantized and unit:
        size = base.total * elements // model.parameters
    bucket = r.switches.sync_bucket_bytes
    return Term(
        "communication",
        size + bucket,
        "{0} whole of {1} ranks' shards {2:,} B"
        + (" + the bucket it is sent through {3:,} B" if bucket else ""),
        (
            WORDS.get(str(unit), f"one of {unit} parts" if unit else "nothing"),
            r.placement.weight_shards,
            size,
            bucket,
        ),
        SOURCE,
    )


def _folded(model: ModelSpec, r: Resolved) -> int:
    """Return elements beside a whole layer while its adapters are folded in: they are whole with it, and of one
    weight at a time their product and its sum with it (trainer/engines/vllm_adapters.py merged_weight)."""
    counts = lora_of(model, r)
    largest = max((each.in_features * each.out_features for each in counts.adapted), default=0)
    return -(-counts.parameters // model.num_layers) + 2 * largest


def _largest_tensor(model: ModelSpec) -> int:
    """Return elements of the largest tensor."""
    modules = [*outside_layers(model), *(m for layer in model.layers for m in layer.modules)]
    return max((prod(shape) for module in modules for shape in module.shapes), default=0)
