"""The same model in another code base: LitGPT's untied heads and fused activations."""

from dataclasses import replace

from planner.model import MlpSpec, ModelSpec

_LITGPT: dict[str, ModelSpec] = {}


def litgpt_model(model: ModelSpec) -> ModelSpec:
    """Return the model as LitGPT builds it: a head of its own, one kernel for GELU."""
    if model.name not in _LITGPT:
        layers = tuple(replace(layer, mlp=_fused(layer.mlp)) for layer in model.layers)
        _LITGPT[model.name] = replace(model, layers=layers, tied=False)
    return _LITGPT[model.name]


def _fused(mlp: MlpSpec) -> MlpSpec:
    return replace(mlp, activation="gelu") if mlp.activation.startswith("gelu") else mlp


def selective_bytes(model: ModelSpec, tokens: int, element: int = 2) -> int:
    """Return what torchtitan's selective checkpointing keeps beside the layers' inputs.

    Its policy saves every attention output and every second matmul: q, v, gate and down.
    """
    kept = 0
    for layer in model.layers:
        mixer = layer.mixer
        query = mixer.num_heads * mixer.head_dim
        value = (mixer.num_kv_heads or mixer.num_heads) * (mixer.v_head_dim or mixer.head_dim)
        kept += layer.count * (2 * query + value + layer.mlp.intermediate + model.hidden)
    return kept * tokens * element
