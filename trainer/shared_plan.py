"""How far a run shares prompts: how large a micro-batch of shared rows may be, and what it holds.

The plan is made for rows of their own. A micro-batch of shared rows has the same token budget, but more
scored tokens among them, keys repeated for every query head (transformers does so beside a mask) and the
mask itself. So its budget is cut until it stays under the plan's own peak: sharing never makes a run
larger than it was planned.
"""

from dataclasses import dataclass, replace

import torch

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.phases import Phase, budget
from planner.plan import Plan
from planner.run.recipe import Attention, Checkpointing, Method
from planner.run.resolved import Resolved
from planner.terms.term import Term
from trainer.batching import ScoredSequence
from trainer.devices import BF16_CAPABILITY
from trainer.shared_prefix import (
    MAX_SHARED_TOKENS,
    MEMORY_EFFICIENT_SLOWDOWN,
    RowCost,
    mask_bytes,
)

FLASH_CAPABILITY = BF16_CAPABILITY
"""torch 2.13 cuda/sdp_utils.cpp, check_flash_attention_hardware_support: sm80 and newer."""
FLASH_HEAD_DIM = 256
PHASES = ("score", "forward", "loss", "backward")
ATTENTION_BACKWARD = 2.5
"""Over its forward: five matrix products instead of two (Dao 2023, FlashAttention-2, section 4.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What a run does about the prompts that its completions have in common."""

    cost: RowCost
    always: bool
    """Share wherever it is possible (train.share_prefix: true), not only where it is cheaper."""
    budget_tokens: int
    """Of one micro-batch of shared rows."""
    row_tokens: int = MAX_SHARED_TOKENS
    """The longest row that can come."""
    phases: tuple[Phase, ...] = ()
    """Those of such a micro-batch at its largest."""

    def worst(
        self, budget_tokens: int, *, prompt: int, generations: int, token: int
    ) -> list[list[ScoredSequence]]:
        """Return the groups of the largest micro-batch within both budgets, all of `token`."""
        budget_tokens = min(self.budget_tokens, budget_tokens)
        rows, alone, width = largest_rows(budget_tokens, self.row_tokens, prompt, generations)
        scored = width - alone + generations  # a completion's last token is not in the row
        lengths = [(scored + number) // generations for number in range(generations)]
        group = [
            ScoredSequence(
                token_ids=(token,) * (alone + length),
                scored=(False,) * alone + (True,) * length,
            )
            for length in lengths
        ]
        return [group] * rows


def plan_sharing(
    spec: ModelSpec, planned: Plan, *, budget_tokens: int, device: torch.device, always: bool
) -> Sharing | None:
    """Return how a GRPO run whose model can share does so; None when no group fits under the plan."""
    r = planned.resolved
    prompt, generations = r.prompt_tokens, r.num_generations
    if prompt < 1 or generations < 2:
        return None
    row_tokens = prompt + generations * (r.completion_tokens - 1)
    if not always:
        row_tokens = min(row_tokens, MAX_SHARED_TOKENS)

    def phases(tokens: int) -> tuple[Phase, ...]:
        rows, alone, width = largest_rows(tokens, row_tokens, prompt, generations)
        return shared_phases(spec, planned, rows=rows, prompt=alone, tokens=width)

    def fits(tokens: int) -> bool:
        return max(phase.total_bytes for phase in phases(tokens)) <= planned.peak_bytes

    low, high = generations + 1, budget_tokens
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return Sharing(
        cost=row_cost(spec, r, device),
        always=always,
        budget_tokens=low,
        row_tokens=row_tokens,
        phases=phases(low),
    )


def largest_rows(
    budget_tokens: int, row_tokens: int, prompt: int, generations: int
) -> tuple[int, int, int]:
    """Return (rows, prompt, tokens of a row): as long as can be, then as many."""
    width = min(row_tokens, budget_tokens)
    return max(1, budget_tokens // width), max(1, min(prompt, width - generations)), width


def shared_phases(
    spec: ModelSpec, planned: Plan, *, rows: int, prompt: int, tokens: int
) -> tuple[Phase, ...]:
    """Return the phases of a step over `rows` shared rows of `tokens`, `prompt` of them not scored."""
    shape = replace(
        planned.resolved,
        sequences=rows,
        prompt_tokens=prompt,
        completion_tokens=tokens - prompt,
        padded=True,  # a mask: keys are repeated for all query heads
    )
    width = element_bytes(shape.compute_dtype)
    mask = Term(
        "activations",
        mask_bytes(rows, tokens, width),
        "mask of {0} shared rows of {1:,} tokens, {2} B a pair",
        (rows, tokens, width),
        "trainer/shared_prefix.py",
    )
    return tuple(
        Phase(phase.name, (*phase.terms, mask), phase.total_bytes + mask.bytes)
        for phase in budget(spec, shape, planned.machine).phases
        if phase.name in PHASES
    )


def row_cost(spec: ModelSpec, r: Resolved, device: torch.device) -> RowCost:
    """Return what a token and a pair of tokens cost in one step: forward, recompute and backward.

    2 FLOPs a weight that a token passes, 2 (d + d_v) a pair and head; a frozen weight's product runs
    backward once (its input's gradient), a trained one's twice.
    """
    layers = sum(layer.count * layer.parameters for layer in spec.layers)
    active = spec.active_parameters - spec.text_parameters + layers
    again = 0 if r.checkpointing is Checkpointing.NONE else 1
    token = 2 * active * (1 + again + (2 if r.method is Method.FULL else 1))
    mixers = [(layer.count, layer.mixer) for layer in spec.layers]
    once = sum(
        2 * count * mixer.num_heads * (mixer.head_dim + (mixer.v_head_dim or mixer.head_dim))
        for count, mixer in mixers
    )
    pair = once * (1 + again + ATTENTION_BACKWARD)
    if r.attention is Attention.EAGER:  # visits and masks all pairs, shared or not
        return RowCost(token=token, pair=2 * pair, masked=0.5)
    widest = max(mixer.head_dim for _, mixer in mixers)
    flash = _has_flash(device) and element_bytes(r.compute_dtype) == 2 and widest <= FLASH_HEAD_DIM
    return RowCost(token=token, pair=pair, masked=MEMORY_EFFICIENT_SLOWDOWN if flash else 1.0)


def _has_flash(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
