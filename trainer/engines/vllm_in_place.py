"""Weights written straight into vLLM's memory, where it keeps them as transformers does.

vLLM's own way (reload_weights) takes every layer apart, loads it beside the old one, processes it and copies it
back: several passes over each weight. A dense model's weights are plain rows of vLLM's, so one pass does: what
is here is copied there, what is divided over ranks is gathered there, and nothing is whole beside it. vLLM's
reload_weights does the same with is_checkpoint_format=False (model_loader/reload/inplace.py, 0.32).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from planner.errors import UsageError
from trainer.engines.vllm_adapters import merged_weight, served
from trainer.engines.vllm_shared import map_parameters
from trainer.model import Policy
from trainer.parallel.whole import gather_into, whole


@dataclass(frozen=True, slots=True)
class InPlace:
    """Where in vLLM's memory each weight of the policy is."""

    rows: dict[str, Tensor]
    """By PEFT's name of it, or by transformers'."""
    padding: tuple[Tensor, ...]
    """Rows that vLLM has beyond the model's: zero."""

    @torch.no_grad()
    def write(self, policy: Policy) -> None:
        """Make vLLM's weights the policy's, adapters folded in; all ranks call it."""
        for full_name, _, layer, parameter in served(policy):
            if layer is None:
                gather_into(self.rows[full_name], parameter)
            else:
                self.rows[full_name].copy_(merged_weight(layer))
        for rows in self.padding:
            rows.zero_()

    @torch.no_grad()
    def same(self, policy: Policy) -> bool:
        """Return whether what is there is the policy's, bit for bit; all ranks call it."""
        same = not any(bool(rows.any()) for rows in self.padding)
        for full_name, _, layer, parameter in served(policy):
            wanted = whole(parameter) if layer is None else merged_weight(layer)  # collective
            place = self.rows.get(full_name)
            same = same and place is not None and torch.equal(place, wanted)
        return same


def in_place(policy: Policy, model: torch.nn.Module) -> InPlace | None:
    """Return where the policy's weights are in vLLM's `model`, or None where one of them is kept otherwise.

    To be asked when vLLM has just loaded them its own way; all ranks call it.
    """
    places = _mapped(policy, model)
    if not policy.ranks.all(places is not None) or places is None:
        return None
    return places if policy.ranks.all(places.same(policy)) else None


def _mapped(policy: Policy, model: torch.nn.Module) -> InPlace | None:
    try:
        mapping = map_parameters(policy.model, model)
    except UsageError:  # reordered, packed, quantised, or of another dtype
        return None
    theirs = dict(model.named_parameters())
    rows: dict[str, Tensor] = {}
    ends = dict.fromkeys(theirs, 0)
    for name, place in sorted(mapping.items(), key=lambda item: item[1].start):
        end = place.start + place.rows
        if place.start > ends[place.source]:
            return None  # nobody would write the rows before it
        ends[place.source] = max(ends[place.source], end)
        rows[name] = theirs[place.source].data[place.start : end]
    if not all(ends.values()):
        return None
    padding = (theirs[name].data[end:] for name, end in ends.items())
    return InPlace(rows, tuple(rest for rest in padding if len(rest)))
