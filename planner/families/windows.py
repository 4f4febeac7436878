"""Which tokens each attention layer sees: full, sliding window or chunked, in the right layers."""

from collections.abc import Callable

from planner.families.fields import ConfigFields
from planner.models.spec import MixerKind

Mask = tuple[MixerKind, int]
"""Attention kind and its window in tokens (0 = all)."""
FULL: Mask = (MixerKind.FULL, 0)
KEEP_IDLE_WINDOW = frozenset({"qwen2", "qwen3"})
"""Others' config classes make it None where use_sliding_window is false (transformers 4.49 to 4.52)."""
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def window_everywhere(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Every layer slides if the config has a sliding_window (Mistral, Phi-3, StarCoder2, Mixtral)."""
    window = fields.optional("sliding_window")
    return [FULL if window is None else (MixerKind.SLIDING, window)] * num_layers


def full_everywhere(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Every layer sees all tokens."""
    return [FULL] * num_layers


def window_after(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Qwen: with use_sliding_window, the layers from max_window_layers on slide."""
    if not fields.flag("use_sliding_window"):
        return from_layer_types(fields, num_layers, lambda layer: False)
    start = fields.integer("max_window_layers", least=0)
    return from_layer_types(fields, num_layers, lambda layer: layer >= start)


def idle_window(fields: ConfigFields) -> int:
    """Return the window of a config that says no layer uses it, where the classes keep it; 0: none."""
    if fields.model_type not in KEEP_IDLE_WINDOW or fields.flag("use_sliding_window"):
        return 0
    return fields.optional("sliding_window") or 0


def window_even(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Sliding and full layers alternate, sliding first (Gemma-2, gpt-oss)."""
    return from_layer_types(fields, num_layers, lambda layer: layer % 2 == 0)


def window_three_of_four(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Every fourth layer is full (OLMo 3)."""
    return from_layer_types(fields, num_layers, lambda layer: (layer + 1) % 4 != 0)


def window_pattern(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Every sliding_window_pattern-th layer is full (Gemma 3)."""
    period = fields.integer("sliding_window_pattern", 6)
    return from_layer_types(fields, num_layers, lambda layer: (layer + 1) % period != 0)


def window_without_rope(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """SmolLM3: layers without rotary embedding slide, if use_sliding_window."""
    rope = fields.items("no_rope_layers", None)
    period = fields.integer("no_rope_layer_interval")
    slides = fields.flag("use_sliding_window")

    def is_sliding(layer: int) -> bool:
        has_rope = rope[layer] if rope and layer < len(rope) else (layer + 1) % period != 0
        return slides and not has_rope

    return from_layer_types(fields, num_layers, is_sliding)


def from_layer_types(
    fields: ConfigFields, num_layers: int, is_sliding: Callable[[int], bool]
) -> list[Mask]:
    """Return each layer's mask from layer_types, else from the family's own rule."""
    types = fields.pattern("layer_types", num_layers, LAYER_TYPES)
    if types is None:
        types = [
            "sliding_attention" if is_sliding(layer) else "full_attention"
            for layer in range(num_layers)
        ]
    masks: dict[str, Mask] = {"full_attention": FULL}
    if "sliding_attention" in types:
        window = fields.optional("sliding_window")
        masks["sliding_attention"] = (MixerKind.SLIDING, window) if window else FULL
    if "chunked_attention" in types:
        chunk = fields.optional("attention_chunk_size")
        masks["chunked_attention"] = (MixerKind.CHUNKED, chunk) if chunk else FULL
    return [masks[kind] for kind in types]


def window_everywhere_or_types(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Ministral: layer_types, else every layer slides."""
    return from_layer_types(fields, num_layers, lambda layer: True)


def window_moe(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Qwen3 MoE: with use_sliding_window every layer slides."""
    return (
        window_everywhere(fields, num_layers)
        if fields.flag("use_sliding_window")
        else full_everywhere(fields, num_layers)
    )


def window_qwen2_moe(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Qwen2 MoE: with use_sliding_window even layers slide below max_window_layers."""
    slides = fields.flag("use_sliding_window")
    limit = fields.integer("max_window_layers", least=0)
    return from_layer_types(
        fields, num_layers, lambda layer: slides and layer % 2 == 0 and layer < limit
    )
