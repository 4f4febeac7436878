"""LoRA target columns, in any source's words -> module names of the model at hand."""

import re

from planner.models.lora_targets import leaves_of_roles, linear_names, lora_counts
from planner.models.spec import ModelSpec

_ROLE_OF_WORD = {
    "q": "q", "q_proj": "q", "query": "q",
    "k": "k", "k_proj": "k", "key": "k",
    "v": "v", "v_proj": "v", "value": "v",
    "o": "o", "o_proj": "o", "output_proj": "o", "projection": "o",
    "gate": "gate", "gate_proj": "gate",
    "up": "up", "up_proj": "up",
    "down": "down", "down_proj": "down",
}  # fmt: skip


def lora_targets(text: str, model: ModelSpec) -> tuple[str, ...]:
    """Return leaf names of the model's linears that the column means, sorted."""
    words = set(re.findall(r"[A-Za-z_]+", text))
    leaves = set(linear_names(model))
    if "all" in words and ("linear" in words or "layers" in words):
        return tuple(sorted(leaves))
    roles = {_ROLE_OF_WORD[word] for word in words if word in _ROLE_OF_WORD}
    if "mlp" in words:
        roles |= {"gate", "up", "down"}
    if "DEFAULT" in words or not roles:
        # ms-swift of 2023 adapts the query-key-value projection, PEFT and LitGPT q and v
        roles = {"q", "k", "v"} if "DEFAULT" in words else {"q", "v"}
    return tuple(sorted(leaves_of_roles(model, roles) | (words & leaves)))


def targets_of_count(model: ModelSpec, rank: int, trained: int) -> tuple[str, ...]:
    """Return the linears that a printed count of trainable parameters fits best: all, or attention's."""
    left = {"out_proj"} if model.model_type == "nemotron_h" else set()  # PEFT refuses Mamba's
    roles = set("qkvo")
    choices = [
        tuple(sorted(leaves - left))
        for leaves in (
            set(linear_names(model)),
            set(leaves_of_roles(model, roles | {"gate", "up", "down"})),
            set(leaves_of_roles(model, roles)),
        )
    ]
    return min(
        choices,
        key=lambda leaves: abs(lora_counts(model, leaves, rank=rank).parameters - trained),
    )
