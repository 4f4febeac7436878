"""The distinct ranks of a run: what each holds of the model, and the run as that rank sees it.

Ranks of one pipeline stage are alike; every stage is one kind of rank.
"""

from dataclasses import dataclass, replace
from typing import Any

from planner.models.rank_part import Cuts, stage_part, tensor_part
from planner.models.spec import ModelSpec
from planner.run.framework_files import common_laws
from planner.run.parallel import Layout
from planner.run.pipeline import Stage, layers_of
from planner.run.resolved import Resolved
from planner.run.switches import Switches
from planner.run.tasks import Head


@dataclass(frozen=True, slots=True)
class RankPeak:
    """One kind of rank and its peak, as its plan has it."""

    rank: int
    """The first of its kind."""
    count: int
    role: str
    peak_bytes: int
    peak_phase: str
    terms: dict[str, int]
    """Bytes alive at its peak."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = ("rank", "count", "role", "peak_bytes", "peak_phase")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class RankRun:
    """One kind of rank."""

    number: int
    """The first rank of its kind."""
    count: int
    """Ranks of its kind."""
    role: str
    model: ModelSpec
    resolved: Resolved


def rank_runs(model: ModelSpec, r: Resolved) -> tuple[RankRun, ...]:
    """Return every distinct rank of a run, the first stage's first."""
    layout = r.layout
    part = tensor_part(model, cuts(layout, r.switches, tied=model.tied))
    stages = layout.pipeline
    if stages == 1:
        return (RankRun(0, layout.gpus, "all alike", part, _shared(r)),)
    each = layout.gpus // stages
    found = []
    for number in range(stages):
        stage = Stage(stages, number, layout.virtual_stages, r.grad_accum)
        own = layers_of(model.num_layers, stages, number, layout.virtual_stages)
        held = stage_part(part, own, first=stage.first, last=stage.last)
        found.append(
            RankRun(number * each, each, _role(stage, len(own)), held, _of_stage(_shared(r), stage))
        )
    return tuple(found)


def cuts(layout: Layout, switches: Switches, *, tied: bool = False) -> Cuts:
    """Return over how many ranks matrices and experts are divided.

    transformers leaves an embedding whole, unless the head has its weights: then both are one divided tensor
    (5.19 configuration_utils.py: embedding_rowwise).
    """
    return Cuts(
        tensor=layout.tensor,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        vocab_padding=switches.vocab_padding,
        whole_embedding=switches.tensor_plan == "transformers" and not tied,
        whole_logits=switches.tensor_plan == "transformers",
    )


def _role(stage: Stage, layers: int) -> str:
    held = ["embeddings"] if stage.first else []
    held += [f"{layers} layers"]
    held += ["head"] if stage.last else []
    return f"stage {stage.number + 1} of {stage.stages}: {', '.join(held)}"


def _of_stage(r: Resolved, stage: Stage) -> Resolved:
    """Return the run of a stage: only the last makes a loss."""
    if stage.last:
        return replace(r, stage=stage)
    return replace(r, stage=stage, law=common_laws()[Head.NONE.value], entropy=False)


def _shared(r: Resolved) -> Resolved:
    """Return the run with one rank's share of every sequence's tokens (context parallelism)."""
    ranks = r.layout.context
    if ranks == 1:
        return r
    whole = r.seq_tokens
    share = -(-whole // ranks)
    answers = -(-r.completion_tokens // ranks)
    return replace(r, prompt_tokens=share - answers, completion_tokens=answers)
