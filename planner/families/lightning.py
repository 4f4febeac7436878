"""MiniMax-Text-01 and M1: lightning attention beside full attention, experts in every layer.

The lightning layers' decay tables are buffers that follow from the config; they are not counted.
"""

from planner.families.blocks import attention, group_layers, linear, norm
from planner.families.decoder import finish, head_shape
from planner.families.experts import routed
from planner.families.fields import ConfigFields
from planner.families.hybrid import full_attention
from planner.families.mamba import Mixer
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, ModelSpec


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return each layer's kind: layer_types, MiniMax's own 0/1 list, else full and linear in turn."""
    kinds = fields.pattern("layer_types", num_layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return kinds
    own = fields.items("attn_type_list", None)
    if own is None:
        own = [int(layer % 2 == 0) for layer in range(num_layers)]
    if len(own) != num_layers or any(kind not in (0, 1) for kind in own):
        raise fields.error("attn_type_list", own, f"0 or 1 for each of the {num_layers} layers")
    return ["full_attention" if kind else "linear_attention" for kind in own]


def lightning(fields: ConfigFields, hidden: int, heads: int, head_dim: int) -> Mixer:
    """Return lightning attention: a state [heads, head_dim, head_dim], no convolution."""
    width = heads * head_dim
    spec = MixerSpec(
        kind=MixerKind.LINEAR,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        gated_output=True,
        state_shapes=((heads, head_dim, head_dim),),
        # transformers and vLLM both accumulate it in fp32
        state_fp32=True,
        inner_dim=width,
        key_dim=width,
        chunk_size=fields.integer("block_size"),
    )
    return spec, (
        linear("self_attn.qkv_proj", hidden, 3 * width),
        linear("self_attn.out_proj", width, hidden),
        linear("self_attn.output_gate", hidden, width),
        norm("self_attn.norm", width),
    )


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a lightning-attention mixture of experts."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    shape = head_shape(fields, hidden)
    part = routed(fields, hidden, width="intermediate_size", number="num_local_experts")
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))

    def build_layer(kind: str) -> LayerSpec:
        mixer: Mixer = (full_attention(fields, shape), attention(hidden, *shape))
        if kind == "linear_attention":
            mixer = lightning(fields, hidden, shape[0], shape[2])
        modules = (*mixer[1], *part[1], *norms)
        return LayerSpec(count=1, mixer=mixer[0], mlp=part[0], modules=modules)

    layers, order = group_layers(layer_kinds(fields, num_layers), build_layer)
    return finish(
        fields, hidden=hidden, layers=layers, layer_order=order, final=(norm("norm", hidden),)
    )
