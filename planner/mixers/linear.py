"""Linear attention: gated delta net, KDA, lightning attention. A state of fixed size, no cache of tokens."""

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer
from planner.mixers.recurrence import recurrent, states

MIXER = Mixer(
    record=recurrent,
    assumes="flash-linear-attention and causal-conv1d",
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=states),
    lora_roots=a.ROOTS | {"linear_attn"},
)
