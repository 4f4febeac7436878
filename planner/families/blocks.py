"""The pieces that every family is made of: linears, norms, embeddings, attention, MLPs, experts."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

from planner.models.spec import LayerSpec, ModuleKind, ModuleSpec

Key = TypeVar("Key", bound=Hashable)


def linear(
    name: str, in_features: int, out_features: int, *, bias: bool = False, count: int = 1
) -> ModuleSpec:
    """Return an nn.Linear: weight [out, in] and maybe bias [out]."""
    shapes: tuple[tuple[int, ...], ...] = ((out_features, in_features),)
    if bias:
        shapes += ((out_features,),)
    return ModuleSpec(name=name, kind=ModuleKind.LINEAR, shapes=shapes, count=count)


def norm(name: str, width: int, *, bias: bool = False, count: int = 1) -> ModuleSpec:
    """Return a norm: weight [width] and maybe bias [width]."""
    shapes = ((width,), (width,)) if bias else ((width,),)
    return ModuleSpec(name=name, kind=ModuleKind.NORM, shapes=shapes, count=count)


def embedding(name: str, rows: int, width: int) -> ModuleSpec:
    """Return an nn.Embedding: weight [rows, width]."""
    return ModuleSpec(name=name, kind=ModuleKind.EMBEDDING, shapes=((rows, width),))


def parameter(name: str, *shapes: tuple[int, ...], count: int = 1) -> ModuleSpec:
    """Return bare nn.Parameters of the given shapes."""
    return ModuleSpec(name=name, kind=ModuleKind.PARAMETER, shapes=shapes, count=count)


def buffer(name: str, *shapes: tuple[int, ...], count: int = 1) -> ModuleSpec:
    """Return persistent buffers: in the checkpoint and on the GPU, never trained."""
    return ModuleSpec(name=name, kind=ModuleKind.BUFFER, shapes=shapes, count=count)


def conv(name: str, *shapes: tuple[int, ...], count: int = 1) -> ModuleSpec:
    """Return an nn.Conv with the given weight and bias shapes."""
    return ModuleSpec(name=name, kind=ModuleKind.CONV, shapes=shapes, count=count)


def experts(name: str, *shapes: tuple[int, ...]) -> ModuleSpec:
    """Return fused expert weights, for example [E, 2I, H] and [E, H, I], held as bare parameters."""
    return ModuleSpec(name=name, kind=ModuleKind.EXPERTS, shapes=shapes)


def attention(
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    prefix: str = "self_attn",
    out_name: str = "o_proj",
) -> tuple[ModuleSpec, ...]:
    """Return the four separate projections of grouped-query attention."""
    query, key = num_heads * head_dim, num_kv_heads * head_dim
    return (
        linear(f"{prefix}.q_proj", hidden, query, bias=bias),
        linear(f"{prefix}.k_proj", hidden, key, bias=bias),
        linear(f"{prefix}.v_proj", hidden, key, bias=bias),
        linear(f"{prefix}.{out_name}", query, hidden, bias=bias if out_bias is None else out_bias),
    )


def gated_mlp(
    hidden: int, intermediate: int, *, bias: bool = False, prefix: str = "mlp"
) -> tuple[ModuleSpec, ...]:
    """Return gate, up and down of a SwiGLU-like MLP."""
    return (
        linear(f"{prefix}.gate_proj", hidden, intermediate, bias=bias),
        linear(f"{prefix}.up_proj", hidden, intermediate, bias=bias),
        linear(f"{prefix}.down_proj", intermediate, hidden, bias=bias),
    )


def group_layers(
    keys: Sequence[Key], build: Callable[[Key], LayerSpec]
) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
    """Return the distinct layers with their counts, and each layer's index among them.

    `keys` holds one key for every layer in order; equal keys mean equal layers.
    """
    index: dict[Key, int] = {}
    order = tuple(index.setdefault(key, len(index)) for key in keys)
    counts = [0] * len(index)
    for kind in order:
        counts[kind] += 1
    layers = tuple(replace(build(key), count=counts[kind]) for key, kind in index.items())
    return layers, order
