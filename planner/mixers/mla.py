"""DeepSeek's latent attention: heads from a low-rank latent, which is all that is cached."""

from dataclasses import replace

from planner.layer.program import Program
from planner.layer.tape import Value
from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Linears, Mixer
from planner.models.spec import MixerKind, MixerSpec

LATENT = "kv_a_proj_with_mqa"


def latent_heads(
    p: Program, x: Value, mixer: MixerSpec, linears: Linears, width: int, inner: int
) -> a.Heads:
    """Record the latent projections up to full queries, keys and values."""
    tape, named = p.tape, {module.leaf: module for module in linears.ins}
    heads, rope = mixer.num_heads, mixer.qk_rope_head_dim
    if mixer.q_lora_rank and "q_a_proj" in named:
        low = p.normed(p.linear(x, named["q_a_proj"], width), inner, mixer.q_lora_rank)
        raw = p.linear(low, named["q_b_proj"], inner)
        tape.drop(low)
    else:
        raw = p.linear(x, named["q_proj"], width)
    straight, turned = tape.split(raw, (raw.size - heads * rope * inner, heads * rope * inner))
    tape.drop(raw)
    wider = a.rotated_width(p, inner) / inner
    turned = p.rope(turned, turned.size * wider)
    q = tape.op((straight, turned), raw.size * wider)
    tape.drop(straight, turned)
    both = p.linear(x, named[LATENT], width)
    latent, shared = tape.split(both, (mixer.kv_lora_rank * inner, rope * inner))
    tape.drop(both)
    low = p.normed(latent, inner, mixer.kv_lora_rank)
    shared = p.rope(shared, rope * inner * wider)
    wide = p.linear(low, named["kv_b_proj"], inner)
    tape.drop(low)
    v_size = heads * (mixer.v_head_dim or mixer.head_dim) * inner
    k_part, v = tape.split(wide, (wide.size - v_size, v_size))
    tape.drop(wide)
    k = tape.op((k_part, shared), heads * mixer.head_dim * inner * wider)
    tape.drop(k_part, shared)
    return a.Heads(q, k, v, None)


def latent(mixer: MixerSpec, element: float) -> float:
    """Return bytes of one token's latent, its rotated part, and the indexer's key."""
    width = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return (width + mixer.index_head_dim) * element


INDEXER_SCALE_BYTES = 4
"""DeepSeek's sparse indexer caches fp8 keys with one fp32 scale a token."""


def index_key_bytes(mixer: MixerSpec) -> int:
    """Return bytes of one token's key as vLLM caches it; 0 without an indexer."""
    return mixer.index_head_dim + INDEXER_SCALE_BYTES if mixer.index_head_dim else 0


INDEXER_PAGES = MixerKind.MLA
"""An indexer's keys are paged like a latent, whatever the kind of the layer: beside a latent they share
its block table (vLLM 0.32 DeepseekV32IndexerCache returns an MLAAttentionSpec)."""

MIXER = Mixer(
    record=a.attention_by(latent_heads),
    assumes="",
    keeps_apart=True,
    reads_images=False,
    divides=True,
    cache=Cache(token=latent, beyond=a.nothing, tokens_held=a.every_token, state=a.nothing),
    pages=replace(a.PAGES, divided=False),
    lora_roots=a.ROOTS | {"indexer"},
)
