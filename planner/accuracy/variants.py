"""The same model in another code base: LitGPT's untied heads and fused activations."""

from dataclasses import replace

from planner.models.spec import LayerSpec, MlpSpec, ModelSpec, ModuleKind, ModuleSpec

_LITGPT: dict[str, ModelSpec] = {}


def litgpt_model(model: ModelSpec) -> ModelSpec:
    """Return the model as LitGPT builds it: its own head, one linear for q, k and v, one GELU."""
    if model.name not in _LITGPT:
        layers = tuple(
            replace(layer, mlp=_fused(layer.mlp), modules=_joined(layer)) for layer in model.layers
        )
        _LITGPT[model.name] = replace(model, layers=layers, tied=False)
    return _LITGPT[model.name]


def _fused(mlp: MlpSpec) -> MlpSpec:
    return replace(mlp, activation="gelu") if mlp.activation.startswith("gelu") else mlp


def _joined(layer: LayerSpec) -> tuple[ModuleSpec, ...]:
    """Return the layer's modules with q, k and v in one: the values stay a view of all three."""
    parts = [m for m in layer.modules if m.leaf in {"q_proj", "k_proj", "v_proj"}]
    if len(parts) != 3 or any(m.kind is not ModuleKind.LINEAR for m in parts):
        return layer.modules
    rows = sum(m.out_features for m in parts)
    shapes: tuple[tuple[int, ...], ...] = ((rows, parts[0].in_features),)
    if len(parts[0].shapes) > 1:
        shapes = (*shapes, (rows,))
    name = parts[0].name.removesuffix("q_proj") + "qkv_proj"
    joined = ModuleSpec(name=name, kind=ModuleKind.LINEAR, shapes=shapes)
    return (joined, *(m for m in layer.modules if m not in parts))
