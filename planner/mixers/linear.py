"""Linear attention: gated delta net, KDA, lightning attention. A state of fixed size, no cache of tokens."""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer
from planner.mixers.recurrence import recurrent, running_and_block_end, states

MIXER = Mixer(
    record=recurrent,
    assumes="flash-linear-attention and causal-conv1d",
    keeps_apart=False,
    reads_images=False,
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=states),
    pages=replace(a.PAGES, states=running_and_block_end),
    lora_roots=a.ROOTS | {"linear_attn"},
)
