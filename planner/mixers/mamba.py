"""Mamba 1 and 2: a convolution's and a selective scan's state, no cache of tokens."""

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer
from planner.mixers.recurrence import recurrent, states

MIXER = Mixer(
    record=recurrent,
    assumes="mamba-ssm and causal-conv1d",
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=states),
    lora_roots=frozenset({"mamba", "mixer"}),
)
