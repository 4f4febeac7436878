"""Cosines and sines of all positions that some code keeps on the card, once or in every layer.

unsloth 2024.9 models/llama.py: LlamaRotaryEmbedding registers both as buffers of min(4 x 8,192,
max_position_embeddings) positions, LongRopeRotaryEmbedding of the original positions; models/gemma.py
makes them in fp32. transformers below 4.48 had such a module in every attention, later ones have one
a model.
"""

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.resolved import Resolved

MOST_POSITIONS = 4 * 8192
"""Tables grow beyond this only when a longer sequence comes."""


def rope_tables(model: ModelSpec, r: Resolved) -> list[int]:
    """Return the bytes of each table."""
    kind, models = r.switches.rope_tables, r.switches.rope_table_models
    if kind == "none" or model.model_type not in models or not r.trains:
        return []
    rotating = [layer for layer in model.layers if layer.mixer.num_heads]
    if not rotating:
        return []
    positions = model.rope_first_position or min(MOST_POSITIONS, model.max_position)
    if r.seq_tokens > positions:
        positions = -(-r.seq_tokens // 8192) * 8192
    width = 4 if model.norm == "rmsnorm_gemma" else element_bytes(r.compute_dtype)
    holders = sum(layer.count for layer in rotating) if kind == "layers" else 1
    return [positions * rotating[0].mixer.head_dim * width] * (2 * holders)
