"""adapters: LoRA matrices (and modules_to_save copies)."""

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolve import Resolved
from planner.terms.counts import adapters
from planner.terms.shards import adapter_shard
from planner.terms.term import Term


def lora(model: ModelSpec, r: Resolved) -> Term:
    """Return the adapters' bytes; 0 for full fine-tuning."""
    if r.method is Method.FULL or not r.trains:
        return Term("adapters", 0)
    counts = adapters(model, r)
    width = element_bytes(r.adapter_dtype)
    size = counts.parameters * width + counts.saved * width
    if r.placement.divides_adapters:
        ranks = r.placement.weight_shards
        return Term(
            "adapters",
            adapter_shard(model, r, ranks) * width,
            "{0:,} LoRA parameters of rank {1} in {2} modules x {3} B over {4} ranks, in whole rows",
            (counts.parameters + counts.saved, r.lora_rank, counts.modules, width, ranks),
            "rank x (in + out) for each adapted linear, as PEFT makes them",
        )
    return Term(
        "adapters",
        size,
        "{0:,} LoRA parameters of rank {1} in {2} modules x {3} B",
        (counts.parameters + counts.saved, r.lora_rank, counts.modules, width),
        "rank x (in + out) for each adapted linear, as PEFT makes them",
    )


def trained_parameters(model: ModelSpec, r: Resolved) -> int:
    """Parameters that get gradients."""
    if not r.trains:
        return 0
    if r.method is Method.FULL:
        return model.parameters
    counts = adapters(model, r)
    return counts.parameters + counts.saved
