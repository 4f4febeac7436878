"""State-space mixers: Mamba, Mamba2 and what the hybrids build from them."""

from dataclasses import dataclass

from planner.families.blocks import conv, group_layers, linear, norm, parameter
from planner.families.decoder import finish
from planner.families.fields import ConfigFields
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)

NO_MLP = MlpSpec(kind=MlpKind.NONE)
Mixer = tuple[MixerSpec, tuple[ModuleSpec, ...]]


@dataclass(frozen=True, kw_only=True)
class Mamba2Shape:
    """The sizes of one Mamba2 mixer."""

    num_heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    chunk: int
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    gated_norm: bool = True
    state_fp32: bool = False

    @property
    def inner(self) -> int:
        """Width of the mixer."""
        return self.num_heads * self.head_dim


def mamba2(prefix: str, hidden: int, shape: Mamba2Shape) -> Mixer:
    """Return a Mamba2 mixer: one input projection, conv over x, B and C, and the gated norm."""
    channels = shape.inner + 2 * shape.groups * shape.state
    conv_shapes: tuple[tuple[int, ...], ...] = ((channels, 1, shape.kernel),)
    if shape.conv_bias:
        conv_shapes += ((channels,),)
    heads = (shape.num_heads,)
    modules: tuple[ModuleSpec, ...] = (
        parameter(prefix, heads, heads, heads),
        conv(f"{prefix}.conv1d", *conv_shapes),
        linear(
            f"{prefix}.in_proj",
            hidden,
            shape.inner + channels + shape.num_heads,
            bias=shape.bias,
        ),
        linear(f"{prefix}.out_proj", shape.inner, hidden, bias=shape.out_bias),
    )
    if shape.gated_norm:
        modules += (norm(f"{prefix}.norm", shape.inner),)
    spec = MixerSpec(
        kind=MixerKind.MAMBA,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        state_shapes=(
            (channels, shape.kernel - 1),
            (shape.num_heads, shape.head_dim, shape.state),
        ),
        state_fp32=shape.state_fp32,
        inner_dim=shape.inner,
        conv_kernel=shape.kernel,
        chunk_size=shape.chunk,
    )
    return spec, modules


def mamba1(
    prefix: str,
    hidden: int,
    *,
    inner: int,
    state: int,
    kernel: int,
    rank: int,
    bias: bool,
    conv_bias: bool,
    norms: bool = False,
) -> Mixer:
    """Return a Mamba mixer; Jamba's also normalises dt, B and C."""
    conv_shapes: tuple[tuple[int, ...], ...] = ((inner, 1, kernel),)
    if conv_bias:
        conv_shapes += ((inner,),)
    modules: tuple[ModuleSpec, ...] = (
        parameter(prefix, (inner, state), (inner,)),
        conv(f"{prefix}.conv1d", *conv_shapes),
        linear(f"{prefix}.in_proj", hidden, 2 * inner, bias=bias),
        linear(f"{prefix}.x_proj", inner, rank + 2 * state),
        linear(f"{prefix}.dt_proj", rank, inner, bias=True),
        linear(f"{prefix}.out_proj", inner, hidden, bias=bias),
    )
    if norms:
        modules += (
            norm(f"{prefix}.dt_layernorm", rank),
            norm(f"{prefix}.b_layernorm", state),
            norm(f"{prefix}.c_layernorm", state),
        )
    spec = MixerSpec(
        kind=MixerKind.MAMBA,
        state_shapes=((inner, kernel - 1), (inner, state)),
        inner_dim=inner,
        conv_kernel=kernel,
    )
    return spec, modules


def _first(fields: ConfigFields, hidden: int) -> Mixer:
    return mamba1(
        "mixer",
        hidden,
        inner=fields.integer("expand") * hidden,
        state=fields.integer("state_size"),
        kernel=fields.integer("conv_kernel"),
        rank=fields.auto("time_step_rank", -(-hidden // 16)),
        bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
    )


def _second(fields: ConfigFields, hidden: int) -> Mixer:
    heads, head_dim = fields.integer("num_heads"), fields.integer("head_dim")
    inner = fields.integer("expand") * hidden
    if heads * head_dim != inner:
        allowed = f"num_heads * head_dim must be expand * hidden_size = {inner}"
        raise fields.error("num_heads", heads, allowed)
    bias = fields.flag("use_bias")
    shape = Mamba2Shape(
        num_heads=heads,
        head_dim=head_dim,
        groups=fields.integer("n_groups"),
        state=fields.integer("state_size"),
        kernel=fields.integer("conv_kernel"),
        chunk=fields.integer("chunk_size"),
        bias=bias,
        out_bias=bias,
        conv_bias=fields.flag("use_conv_bias"),
    )
    return mamba2("mixer", hidden, shape)


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a pure Mamba or Mamba2 model."""
    hidden = fields.integer("hidden_size")
    mixer = (_second if fields.model_type == "mamba2" else _first)(fields, hidden)
    layer = LayerSpec(
        count=1,
        mixer=mixer[0],
        mlp=NO_MLP,
        modules=(*mixer[1], norm("norm", hidden)),
        num_norms=1,
    )
    layers, order = group_layers([0] * fields.integer("num_hidden_layers"), lambda _: layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm_f", hidden),),
        embed_name="embeddings",
    )
