"""Mamba 1 and 2: a convolution's and a selective scan's state, no cache of tokens."""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer
from planner.mixers.recurrence import recurrent, running_and_block_end, states
from planner.models.spec import MixerSpec


def states_held(mixer: MixerSpec) -> int:
    """Return the states of a sequence: Mamba-2 (state [heads, head_dim, d_state]) also keeps a
    checkpoint inside a prefill."""
    mamba2 = len(mixer.state_shapes[-1]) == 3
    return running_and_block_end(mixer) + mamba2


MIXER = Mixer(
    record=recurrent,
    assumes="mamba-ssm and causal-conv1d",
    keeps_apart=False,
    reads_images=False,
    cache=Cache(token=a.nothing, beyond=a.nothing, tokens_held=a.every_token, state=states),
    pages=replace(a.PAGES, states=states_held),
    lora_roots=frozenset({"mamba", "mixer"}),
)
