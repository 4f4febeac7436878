"""A vision tower as a small model: the same operations, tape and laws as the text's layers."""

from dataclasses import replace
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
from planner.models.vision_spec import Cut, VisionSpec
from planner.run.recipe import Attention, Checkpointing, Method
from planner.run.resolve import Resolved
from planner.terms.activations import Activations, activations


@lru_cache(maxsize=256)
def tower_model(vision: VisionSpec) -> ModelSpec:
    """Return the tower's blocks under the names that the layers' programs know."""
    hidden, bias = vision.hidden, vision.bias
    ins: tuple[ModuleSpec, ...]
    if vision.fused_qkv:
        ins = (linear("self_attn.qkv_proj", hidden, 3 * hidden, bias=True),)
    else:
        ins = tuple(linear(f"self_attn.{n}_proj", hidden, hidden, bias=bias) for n in "qkv")
    if vision.gated:
        mlp = gated_mlp(hidden, vision.intermediate, bias=True)
    else:
        mlp = (
            linear("mlp.up_proj", hidden, vision.intermediate, bias=True),
            linear("mlp.down_proj", vision.intermediate, hidden, bias=True),
        )
    plain = vision.norm == "layernorm"
    layer = LayerSpec(
        count=vision.depth,
        mixer=MixerSpec(
            kind=MixerKind.FULL,
            num_heads=vision.heads,
            num_kv_heads=vision.heads,
            head_dim=hidden // vision.heads,
            v_head_dim=hidden // vision.heads,
            bias=bias,
        ),
        mlp=MlpSpec(
            kind=MlpKind.GATED if vision.gated else MlpKind.PLAIN,
            intermediate=vision.intermediate,
            activation=vision.activation,
        ),
        modules=(
            norm("input_layernorm", hidden, bias=plain),
            *ins,
            linear("self_attn.o_proj", hidden, hidden, bias=bias),
            norm("post_attention_layernorm", hidden, bias=plain),
            *mlp,
        ),
    )
    return ModelSpec(
        name="vision tower",
        model_type="vision_tower_rope" if vision.rope else "vision_tower",
        hidden=hidden,
        vocab=1,
        tied=True,
        max_position=0,
        layers=(layer,),
        layer_order=(0,) * vision.depth,
        embeddings=(),
        final=(),
        head=None,
        norm=vision.norm,
    )


def tower_activations(
    vision: VisionSpec, r: Resolved, patches: int, images: int, *, trained: bool
) -> Activations:
    """Return the tower's activations on `images` images of `patches` patches each."""
    method = r.method if trained else Method.FULL
    own = replace(
        r,
        method=method,
        sequences=images,
        prompt_tokens=0,
        completion_tokens=patches,
        lora_targets="all-linear",
        modules_to_save=(),
        lora_bias="none",
        target_parameters=(),
        quantization=r.quantization if trained else "",
        padded=False,
        tiled_mlp=False,
    )
    found = activations(tower_model(vision), own, images * patches)
    if vision.cut is not Cut.NATIVE or r.attention is Attention.FLASH or not trained:
        return found
    return _joined(
        found,
        vision.depth,
        images * patches * vision.hidden * element_bytes(own.compute_dtype),
        own,
    )


def _joined(found: Activations, depth: int, one: int, r: Resolved) -> Activations:
    """Add the joined outputs: without flash's variable lengths Qwen-VL attends image by image (window
    by window) and concatenates, and the output projection saves the copy."""
    each = r.checkpointing is Checkpointing.NONE
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
