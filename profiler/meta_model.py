"""Plans an architecture the planner does not know from transformers' own module tree.

The model is built on torch's meta device: every shape, no memory. What the tree does not say
(heads, windows, experts per token) comes from the config; where that is silent too, or the
layers hold a mixer that is not ordinary attention, the answer is an error, never a guess.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import MissingExtraError, UnknownNameError, UnsupportedError, UsageError
from planner.families.blocks import group_layers
from planner.models.config_file import read_config
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleKind,
    ModuleSpec,
)

if TYPE_CHECKING:
    from torch import nn

_QUERY = ("q_proj", "query", "q", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
_MASKS = {"full_attention": MixerKind.FULL, "sliding_attention": MixerKind.SLIDING}


def build_on_meta(config: Mapping[str, Any]) -> Any:
    """Return the nn.Module of a config.json's fields on the meta device, a multimodal one whole."""
    try:
        import torch
        from transformers import (
            CONFIG_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForMultimodalLM,
        )
    except ImportError:
        raise MissingExtraError("planning from transformers' module tree", "train") from None
    fields = {key: value for key, value in config.items() if key != "quantization_config"}
    model_type = str(fields.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise UnknownNameError("transformers architecture", model_type, CONFIG_MAPPING)
    try:
        settings = AutoConfig.for_model(model_type, **fields)
        classes: list[Any] = [AutoModelForCausalLM]
        if hasattr(settings, "vision_config"):
            classes.insert(0, AutoModelForImageTextToText)
        elif hasattr(settings, "audio_config"):
            classes.insert(0, AutoModelForMultimodalLM)
        known = [cls for cls in classes if type(settings) in cls._model_mapping]
        if not known:
            raise UnsupportedError(f"transformers has no language model for {model_type!r}")
        with torch.device("meta"):
            return known[0].from_config(settings)
    except UsageError:
        raise
    except Exception as error:
        # transformers raises its own many errors for a bad config
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"transformers cannot build {model_type!r}: {reason[:160]}") from None


def module_counts(model: "nn.Module") -> dict[str, int]:
    """Return parameters by module path, layer numbers as "*"; a shared tensor counts once."""
    counts: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                path = re.sub(r"\.\d+(?=\.|$)", ".*", name)
                counts[path] = counts.get(path, 0) + parameter.numel()
    return counts


def model_spec_from_transformers(config_or_path: Mapping[str, Any] | str | Path) -> ModelSpec:
    """Return the ModelSpec of any ordinary-attention decoder that transformers can build.

    Raises UnsupportedError that names what is missing.
    """
    config = (
        dict(config_or_path)
        if isinstance(config_or_path, Mapping)
        else read_config(_config_file(Path(config_or_path)))
    )
    model = build_on_meta(config)
    settings = model.config.get_text_config()
    wanted = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
    lacking = [name for name in wanted if not getattr(settings, name, None)]
    if lacking:
        raise UnsupportedError(f"the config of {settings.model_type!r} lacks {', '.join(lacking)}")
    root, stack = _decoder(model, settings.num_hidden_layers)
    layers, order = group_layers(
        [_layer(layer, settings, index) for index, layer in enumerate(stack)], lambda layer: layer
    )
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    before, final, towers = _outside(model, root, {id(table), id(head)})
    return ModelSpec(
        name=str(config.get("_name_or_path") or settings.model_type),
        model_type=str(config["model_type"]),
        architecture=type(model).__name__,
        hidden=settings.hidden_size,
        vocab=settings.vocab_size,
        tied=head is not None and head.weight is table.weight,
        max_position=int(getattr(settings, "max_position_embeddings", 0) or 0),
        layers=layers,
        layer_order=order,
        embeddings=(_spec("embed_tokens", table), *before),
        final=final,
        head=None if head is None else _spec("lm_head", head),
        towers=towers,
        source="transformers' module tree",
    )


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _decoder(model: "nn.Module", num_layers: int) -> tuple[str, "nn.ModuleList"]:
    """Return the largest ModuleList of num_layers entries and the path it lies in."""
    from torch import nn

    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no list of {num_layers} layers")
    name, stack = max(found, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return name.rpartition(".")[0], stack


def _spec(name: str, module: "nn.Module") -> ModuleSpec:
    """Return a module's own parameters, weight first."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    shapes = tuple(tuple(p.shape) for p in module.parameters(recurse=False))
    if isinstance(module, nn.Linear):
        kind = ModuleKind.LINEAR
    elif isinstance(module, Conv1D):
        kind = ModuleKind.CONV1D
    elif isinstance(module, nn.Embedding):
        kind = ModuleKind.EMBEDDING
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        kind = ModuleKind.CONV
    elif any(len(shape) == 3 for shape in shapes):
        kind = ModuleKind.EXPERTS
    elif "norm" in type(module).__name__.lower():
        kind = ModuleKind.NORM
    else:
        kind = ModuleKind.PARAMETER
    return ModuleSpec(name=name, kind=kind, shapes=shapes)


def _layer(layer: "nn.Module", settings: Any, index: int) -> LayerSpec:
    modules = tuple(
        _spec(name, module)
        for name, module in layer.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    )
    return LayerSpec(
        count=1,
        mixer=_mixer(modules, settings, index),
        mlp=_mlp(modules, settings),
        modules=modules,
        num_norms=sum(
            m.kind is ModuleKind.NORM and m.shapes[0] == (settings.hidden_size,) for m in modules
        ),
    )


def _mixer(modules: tuple[ModuleSpec, ...], settings: Any, index: int) -> MixerSpec:
    """Return ordinary attention, checked against the query projection's width."""
    query = next((m for m in modules if m.leaf in _QUERY), None)
    odd = [m.name for m in modules if m.kind is ModuleKind.CONV or m.leaf in ("in_proj", "A_log")]
    if query is None or odd:
        raise UnsupportedError(
            f"layer {index} of {settings.model_type!r} has no ordinary attention "
            f"({', '.join(odd[:3]) or 'no query projection'})"
        )
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    if query.out_features not in (heads * head_dim, (heads + 2 * kv_heads) * head_dim):
        raise UnsupportedError(
            f"layer {index}: {query.name} has {query.out_features} outputs, not {heads} heads of "
            f"{head_dim}"
        )
    types = getattr(settings, "layer_types", None)
    name = types[index] if types else "full_attention"
    window = getattr(settings, "sliding_window", None) or 0
    if not types and window:
        name = "sliding_attention"
    if name not in _MASKS:
        raise UnsupportedError(f"layer {index}: attention of type {name!r} is not known")
    kind = _MASKS[name] if window else MixerKind.FULL
    return MixerSpec(
        kind=kind,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=window if kind is MixerKind.SLIDING else 0,
        qk_norm=any(m.leaf in ("q_norm", "k_norm", "q_layernorm") for m in modules),
        bias=len(query.shapes) > 1,
    )


def _mlp(modules: tuple[ModuleSpec, ...], settings: Any) -> MlpSpec:
    activation = str(getattr(settings, "hidden_act", None) or "silu")
    fused = [m for m in modules if m.kind is ModuleKind.EXPERTS]
    if fused:
        top_k = getattr(settings, "num_experts_per_tok", None)
        if not top_k:
            raise UnsupportedError(
                f"the config of {settings.model_type!r} lacks num_experts_per_tok"
            )
        down = [shape for shape in fused[0].shapes if len(shape) == 3][-1]
        width = next((n for n in down[1:] if n != settings.hidden_size), settings.hidden_size)
        return MlpSpec(
            kind=MlpKind.MOE,
            intermediate=width,
            activation=activation,
            num_experts=down[0],
            top_k=top_k,
        )
    linears = (ModuleKind.LINEAR, ModuleKind.CONV1D)
    down_names = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "fc_out", "w2")
    mlp = [m for m in modules if m.kind in linears and m.leaf in down_names]
    if not mlp:
        raise UnsupportedError(f"no MLP was found in the layers of {settings.model_type!r}")
    leaves = {m.leaf for m in modules}
    gated = bool(leaves & {"gate_proj", "gate_up_proj", "w1"})
    return MlpSpec(
        kind=MlpKind.GATED if gated else MlpKind.PLAIN,
        intermediate=mlp[-1].in_features,
        activation=activation,
        fused_gate_up="gate_up_proj" in leaves,
    )


def _outside(
    model: "nn.Module", root: str, known: set[int]
) -> tuple[tuple[ModuleSpec, ...], tuple[ModuleSpec, ...], tuple[ModuleSpec, ...]]:
    """Return what lies before the layers, after them, and in towers beside the language model."""
    groups: tuple[list[ModuleSpec], ...] = ([], [], [])
    prefix = f"{root}." if root else ""
    for name, module in model.named_modules():
        own = next(module.parameters(recurse=False), None)
        inner = name.removeprefix(prefix)
        in_stack = name.startswith(prefix) and re.match(r"[^.]+\.\d+\.", f"{inner}.")
        if own is None or id(module) in known or in_stack:
            continue
        if not name.startswith(prefix):
            groups[2].append(_spec(name, module))
        elif "embed" in inner or inner in ("wpe",):
            groups[0].append(_spec(inner, module))
        else:
            groups[1].append(_spec(inner, module))
    return tuple(groups[0]), tuple(groups[1]), tuple(groups[2])
