"""LoRA target columns, in any source's words -> module names of the model at hand."""

import re

from planner.models.spec import ModelSpec, ModuleKind

_ROLE_OF_WORD = {
    "q": "q", "q_proj": "q", "query": "q",
    "k": "k", "k_proj": "k", "key": "k",
    "v": "v", "v_proj": "v", "value": "v",
    "o": "o", "o_proj": "o", "output_proj": "o", "projection": "o",
    "gate": "gate", "gate_proj": "gate",
    "up": "up", "up_proj": "up",
    "down": "down", "down_proj": "down",
}  # fmt: skip
_LEAVES = {
    "q": {"q_proj"},
    "k": {"k_proj"},
    "v": {"v_proj"},
    "o": {"o_proj", "out_proj", "dense", "c_proj"},
    "gate": {"gate_proj", "gate_up_proj", "w1"},
    "up": {"up_proj", "gate_up_proj", "w3", "fc1", "dense_h_to_4h", "c_fc"},
    "down": {"down_proj", "w2", "fc2", "dense_4h_to_h"},
}
_FUSED = {"qkv_proj", "query_key_value", "c_attn", "W_pack", "Wqkv", "wqkv"}


def lora_targets(text: str, model: ModelSpec) -> tuple[str, ...]:
    """Return leaf names of the model's linears that the column means, sorted."""
    words = set(re.findall(r"[A-Za-z_]+", text))
    leaves = {
        module.leaf
        for layer in model.layers
        for module in layer.modules
        if module.kind in (ModuleKind.LINEAR, ModuleKind.CONV1D)
    }
    if "all" in words and ("linear" in words or "layers" in words):
        return tuple(sorted(leaves))
    roles = {_ROLE_OF_WORD[word] for word in words if word in _ROLE_OF_WORD}
    if "mlp" in words:
        roles |= {"gate", "up", "down"}
    if "DEFAULT" in words or not roles:
        # ms-swift of 2023 adapts the query-key-value projection, PEFT and LitGPT q and v
        roles = {"q", "k", "v"} if "DEFAULT" in words else {"q", "v"}
    wanted = {leaf for role in roles for leaf in _LEAVES[role]} | words
    if roles & {"q", "k", "v"}:
        wanted |= _FUSED
    return tuple(sorted(wanted & leaves))
