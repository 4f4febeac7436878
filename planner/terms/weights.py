"""weights: the base model on one GPU, the models beside it, and what sharding gathers."""

from planner.dtypes import element_bytes
from planner.models.spec import LINEARS, ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.companions import with_companions
from planner.terms.counts import adapters, base_weights, rest_width
from planner.terms.rope_tables import rope_tables
from planner.terms.shards import (
    FOUR_BIT,
    adapter_shard,
    layer_shard,
    model_shard,
    outside_layers,
    packed_layer,
    packed_model,
    packed_root,
    root_shard,
)
from planner.terms.term import Term
from planner.terms.window import window


def weights(model: ModelSpec, r: Resolved) -> Term:
    """Return the base weights of one GPU."""
    base = base_weights(model, r)
    shards = r.placement.weight_shards
    part = None
    width = trained_width(r) if r.method is Method.FULL and r.trains else element_bytes(r.dtype)
    if r.placement.flat_buffers and r.quantization in FOUR_BIT:
        part = packed_model(model, r, shards)
        size = part.divided + part.constants
        template = (
            "{0:,} parameters as {1} over {2} ranks, each tensor in whole rows, {3:,} B + constants "
            "whole on each, {4:,} B"
        )
        args: tuple[object, ...] = (base.quantized_parameters, r.quantization, shards, *part)
    elif base.quantized:
        size = -(-base.total // shards)
        template = (
            "{0:,} parameters as {1} with constants = {2:,} B, the rest {3:,} B, over {4} shard(s)"
        )
        args = (
            base.quantized_parameters,
            r.quantization,
            base.quantized,
            base.rest,
            shards,
        )
    elif r.placement.flat_buffers:
        size = model_shard(model, shards) * width
        template = "{0:,} parameters x {1} B over {2} ranks, each tensor in whole rows"
        args = (model.parameters, width, shards)
    else:
        size = -(-model.parameters * width // shards)
        template, args = (
            "{0:,} parameters x {1} B / {2} shard(s)",
            (model.parameters, width, shards),
        )
    if r.placement.offload.weights:
        here = part.constants if part else 0
        template = "on the host between uses: {0:,} B a rank"
        template += " + 4-bit constants {1:,} B" if here else ""
        size, args = here, (size - here, here)
    if tables := sum(rope_tables(model, r)):
        size += tables
        template += f" + cosines and sines of all positions {{{len(args)}:,}} B"
        args = (*args, tables)
    return with_companions(
        Term("weights", size, template, args, "config.json, module by module"), r
    )


def flat_units(model: ModelSpec) -> tuple[int, ...]:
    """Return the parameters of each flat unit of FSDP: what is outside the layers, then every layer."""
    order = [model.layers[index].parameters for index in model.layer_order]
    return max(0, model.parameters - sum(order)), *order


def gathered(model: ModelSpec, r: Resolved, layers: int) -> Term:
    """Return the unsharded copies while layers run: the root unit and `layers` layers (prefetch)."""
    if not r.placement.gathers:
        return Term("weights", 0)
    if r.placement.window:
        return window(model, r)
    width = min(element_bytes(r.compute_dtype), trained_width(r))
    root = sum(module.parameters for module in outside_layers(model)) * width
    base = base_weights(model, r)
    largest = max(layer.parameters for layer in model.layers)
    if base.quantized:
        each = largest * base.quantized // max(1, base.quantized_parameters)
    else:
        each = largest * width
    if r.placement.flat_buffers:
        ranks = r.placement.weight_shards
        if r.quantization in FOUR_BIT:
            root = packed_root(model, r, ranks) * ranks
            each = packed_layer(model, r, ranks) * ranks
        elif not base.quantized:
            root = root_shard(model, ranks) * ranks * width
            each = max(layer_shard(layer, ranks) for layer in model.layers) * ranks * width
        if r.method is not Method.FULL:
            adapted = adapter_shard(model, r, ranks) * ranks // model.num_layers
            each += element_bytes(r.adapter_dtype) * adapted
            root += _saved_outside(model, r) * rest_width(r)
    if r.float8_all_gather and not base.quantized:  # torchao fsdp_utils: cast before it is gathered
        most = max(model.layers, key=lambda layer: layer.parameters)
        linears = sum(m.weight_parameters for m in most.modules if m.kind in LINEARS)
        each -= linears * (width - 1)
    # an offloaded shard is copied to the device before it is gathered
    copied = max(root, layers * each) // r.placement.weight_shards
    # (FSDP2's copy is gone when the unit is copied out of the flat buffer)
    flat = r.placement.flat_buffers
    copied = (
        copied if r.placement.offload.weights and not flat and r.placement.weight_shards > 1 else 0
    )
    return Term(
        "weights",
        root + layers * each + copied,
        "gathered: embeddings and head {0:,} B + {1} layer(s) x {2:,} B"
        + (" + the shard from the host {3:,} B" if copied else ""),
        (root, layers, each, copied),
        "FSDP FULL_SHARD: the root unit stays gathered from forward to backward",
    )


def _saved_outside(model: ModelSpec, r: Resolved) -> int:
    """Return the parameters of modules_to_save's copies that are in no layer, which are the root unit's."""
    rest = adapters(model, r).rest
    inside = sum(
        layer.count * module.parameters
        for layer in model.layers
        for module in layer.modules
        if module.name in rest.linears
    )
    return rest.saved_parameters - inside


def kept_between(model: ModelSpec, r: Resolved, layers: int) -> Term:
    """Return what stays of `layers` layers between their forward and their backward beside their shards.

    torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py: to_sharded_post_forward clones the slice of a
    smaller group; without resharding the gathered parameters stay.
    """
    over = r.placement.keeps_over
    if not over:
        return Term("weights", 0)
    largest = max(layer.parameters for layer in model.layers)
    unit = gathered(model, r, 1).bytes - gathered(model, r, 0).bytes
    every = unit * sum(flat_units(model)[1:]) // (largest * model.num_layers)
    text = "of {0} layer(s) {1:,} B / {2} from forward to backward"
    return Term("weights", layers * every // over, text, (layers, every, over), RESHARD)


RESHARD = "torch 2.13 _fully_shard: reshard_after_forward"


def trained_width(r: Resolved) -> int:
    """Bytes of a trained base parameter."""
    return 4 if r.placement.fp32_shards else element_bytes(r.dtype)
