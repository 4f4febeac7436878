"""A tower as a small model: the same operations, tape and laws as the text's layers."""

from dataclasses import replace
from enum import StrEnum
from functools import lru_cache

from planner.dtypes import element_bytes
from planner.families.blocks import gated_mlp, linear, norm
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)
from planner.models.vision_spec import TowerSpec
from planner.run.recipe import Attention, Checkpointing, Method
from planner.run.resolved import Resolved
from planner.terms.activations import MASK_ALIGNMENT, Activations, activations, op_settings
from planner.terms.counts import lora_of


class Graph(StrEnum):
    """What of a tower autograd follows."""

    NONE = "none"
    """Frozen, and its input needs no gradient."""
    THROUGH = "through"
    """Frozen, but its patch embedding's output was made to need a gradient, so a graph is kept."""
    ADAPTED = "adapted"
    TRAINED = "trained"


def graph_of(model: ModelSpec, tower: TowerSpec, r: Resolved) -> Graph:
    """Return what autograd follows of `tower` in this run.

    transformers 5 modeling_utils.py enable_input_require_grads: with checkpointing and adapters every
    nested model's embedding gets a hook that makes its output need a gradient, frozen towers' too.
    """
    if r.method is Method.FULL:
        return Graph.TRAINED
    if adapted(model, tower, r):
        return Graph.ADAPTED
    hooks = r.switches.hooks_towers and tower.hooked
    return Graph.THROUGH if hooks and r.checkpointing is not Checkpointing.NONE else Graph.NONE


def adapted(model: ModelSpec, tower: TowerSpec, r: Resolved) -> tuple[str, ...]:
    """Return the block's linears that have adapters, by the names that programs know."""
    found = adapted_names(model, r)
    return tuple(name for name, own in tower.names if f"{tower.root}.{own}" in found)


def adapted_names(model: ModelSpec, r: Resolved) -> frozenset[str]:
    """Return the adapted modules outside the text's layers."""
    if r.method is Method.FULL:
        return frozenset()
    return frozenset(m.name for m in lora_of(model, r).adapted if m.layer is None)


@lru_cache(maxsize=256)
def tower_model(tower: TowerSpec) -> ModelSpec:
    """Return the tower's blocks under the names that the layers' programs know."""
    hidden, bias = tower.hidden, tower.bias
    ins: tuple[ModuleSpec, ...]
    if tower.fused_qkv:
        ins = (linear("self_attn.qkv_proj", hidden, 3 * hidden, bias=True),)
    else:
        ins = tuple(linear(f"self_attn.{n}_proj", hidden, hidden, bias=bias) for n in "qkv")
    if tower.gated:
        mlp = gated_mlp(hidden, tower.intermediate, bias=tower.mlp_bias)
    else:
        mlp = (
            linear("mlp.up_proj", hidden, tower.intermediate, bias=True),
            linear("mlp.down_proj", tower.intermediate, hidden, bias=True),
        )
    plain = tower.norm == "layernorm"
    layer = LayerSpec(
        count=tower.depth,
        mixer=MixerSpec(
            kind=MixerKind.FULL,
            num_heads=tower.heads,
            num_kv_heads=tower.heads,
            head_dim=hidden // tower.heads,
            v_head_dim=hidden // tower.heads,
            bias=bias,
        ),
        mlp=MlpSpec(
            kind=MlpKind.GATED if tower.gated else MlpKind.PLAIN,
            intermediate=tower.intermediate,
            activation=tower.activation,
        ),
        modules=(
            norm("input_layernorm", hidden, bias=plain),
            *ins,
            linear("self_attn.o_proj", hidden, hidden, bias=bias),
            norm("post_attention_layernorm", hidden, bias=plain),
            *mlp,
        ),
        scaled=tower.scaled,
    )
    return ModelSpec(
        name="tower",
        model_type="vision_tower_rope" if tower.rope else "vision_tower",
        hidden=hidden,
        vocab=1,
        tied=True,
        max_position=0,
        layers=(layer,),
        layer_order=(0,) * tower.depth,
        embeddings=(),
        final=(),
        head=None,
        norm=tower.norm,
        norm_first=tower.norm_first,
    )


def tower_run(
    r: Resolved, graph: Graph, names: tuple[str, ...], rows: int, sequences: int
) -> Resolved:
    """Return the run as the tower sees it: `sequences` of `rows` rows each."""
    method = r.method
    if graph is Graph.TRAINED:
        method = Method.FULL
    elif method is Method.FULL:
        method = Method.LORA
    return replace(
        r,
        method=method,
        sequences=sequences,
        prompt_tokens=0,
        completion_tokens=rows,
        lora_targets=names,
        target_parameters=(),
        modules_to_save=(),
        lora_bias="none",
        padded=False,
        packing=False,
        tiled_mlp=False,
    )


def stream_width(tower: TowerSpec, r: Resolved, graph: Graph) -> int:
    """Return bytes of an element of the tower's hidden stream."""
    return op_settings(tower_model(tower), tower_run(r, graph, (), 1, 1)).residual


def tower_activations(
    tower: TowerSpec,
    r: Resolved,
    rows: int,
    sequences: int,
    *,
    graph: Graph,
    names: tuple[str, ...] = (),
) -> Activations:
    """Return the tower's activations on `sequences` images, tiles or windows of `rows` rows each."""
    if not tower.checkpoints:
        r = replace(r, checkpointing=Checkpointing.NONE)
    own = tower_run(r, graph, names if graph is Graph.ADAPTED else (), rows, sequences)
    if tower.masked and own.attention is Attention.SDPA:
        # the mask comes additive, once for all blocks: planner/terms/vision.py counts it
        switches = own.switches.model_copy(update={"mask": "packed"})
        own = replace(own, padded=True, switches=switches)
    model = tower_model(tower)
    found = activations(model, own, sequences * rows)
    if tower.masked and own.attention is Attention.SDPA and graph is not Graph.NONE:
        padded = padded_mask(rows) * sequences * element_bytes(own.compute_dtype)
        found = _beside(found, tower.depth, padded, own, saved=True)
    joins = tower.joined and r.attention is not Attention.FLASH
    saved = graph is Graph.TRAINED or "self_attn.o_proj" in names
    if not joins or graph is Graph.NONE:
        return found
    return _beside(
        found,
        tower.depth,
        sequences * rows * tower.hidden * element_bytes(own.compute_dtype),
        own,
        saved=saved,
    )


def padded_mask(rows: int) -> int:
    """Return the elements of the copy of a mask that SDPA pads to whole rows of MASK_ALIGNMENT, and saves."""
    return rows * -(-rows // MASK_ALIGNMENT) * MASK_ALIGNMENT if rows % MASK_ALIGNMENT else 0


def _beside(found: Activations, depth: int, one: int, r: Resolved, *, saved: bool) -> Activations:
    """Add `one` copy in each block, which its backward saves or not."""
    each = r.checkpointing is Checkpointing.NONE and saved
    kept = depth * one if each else 0
    here = kept if each else one
    return found._replace(
        kept=found.kept + kept,
        forward=found.forward + here,
        backward=tuple(
            moment._replace(activations=moment.activations + (here if number < 2 else one))
            for number, moment in enumerate(found.backward)
        ),
    )
