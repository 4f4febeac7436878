"""The state of torch's generators that one rank draws from: the CPU's, and its device's."""

from collections.abc import Mapping

import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the CPU's generator and of `device`'s, uint8 on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put generators back to what `random_states` returned; what is not in `states` stays."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
