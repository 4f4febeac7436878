"""How a run's GPUs divide the work: degrees that multiply to the machine, and the groups they make.

The degrees are recipe.parallel's. Data-parallel ranks have each their own samples; of them data_shard divide
weights, gradients and states as recipe.sharding says, and data_replicate hold the same shard (HSDP, or
every rank under DDP). tensor, context and pipeline ranks work on one sample together. Experts are divided
inside a stage's data, context and tensor ranks, so their degrees don't multiply the GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from planner.errors import UnsupportedError, UsageError
from planner.mixers.registry import mixer_of
from planner.models.spec import MlpKind, ModelSpec
from planner.run.framework import frameworks
from planner.run.framework_files import Framework
from planner.run.recipe import Method, ParallelSection, Recipe, Sharding, Task
from planner.run.switches import Switches

ZERO = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
SHARDS = (*ZERO, Sharding.FSDP, Sharding.FSDP2, Sharding.MEGATRON)
"""Engines that divide something among data-parallel ranks; under the others each holds all of it."""


class Group(NamedTuple):
    """Ranks that talk to each other: a communicator on each of them."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of one run; their product, experts' apart, is its GPUs."""

    data_shard: int = 1
    data_replicate: int = 1
    tensor: int = 1
    sequence: bool = False
    """Norms and residuals are divided over the tensor ranks by tokens."""
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    """Chunks of layers that one pipeline rank holds."""
    context: int = 1
    context_kind: str = "ring"
    expert: int = 1
    expert_tensor: int = 1

    @property
    def gpus(self) -> int:
        """Ranks of the run."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Ranks with samples of their own."""
        return self.data_shard * self.data_replicate

    @property
    def sharers(self) -> int:
        """Ranks that divide what `sharding` divides: those of one sequence's parts hold the same weights too."""
        return self.data_shard * self.context

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.data * self.context * self.tensor // (self.expert * self.expert_tensor)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of more than one rank that a rank belongs to, the whole world first."""
        sizes = {
            "world": self.gpus,
            "shard": self.data_shard if self.data_shard < self.gpus else 1,
            "replicate": self.data_replicate if self.data_replicate < self.gpus else 1,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
        }
        return tuple(Group(name, size) for name, size in sizes.items() if size > 1)

    def __str__(self) -> str:
        said = {
            "shard": self.data_shard,
            "replicate": self.data_replicate,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
        }
        return " x ".join(f"{name} {size}" for name, size in said.items() if size > 1) or "1 GPU"


ALONE = Layout()


def layout_of(model: ModelSpec, recipe: Recipe, gpus: int, plan: str = "") -> Layout:
    """Return the layout that a recipe asks for on `gpus` GPUs; `plan`: the framework's tensor_plan.

    Raises UsageError naming the degree that does not divide what it would divide.
    """
    asked = recipe.parallel
    if recipe.task is Task.SERVE:
        _refuse_in_serving(asked)
        return ALONE
    shard, replicate = _data_degrees(asked, recipe.sharding, gpus)
    routed = any(layer.mlp.num_experts for layer in model.layers)
    experts = asked.expert_tensor or (asked.tensor if routed or asked.expert > 1 else 1)
    layout = Layout(
        data_shard=shard,
        data_replicate=replicate,
        tensor=asked.tensor,
        sequence=asked.sequence or (plan == "torchtitan" and asked.tensor > 1),
        pipeline=asked.pipeline,
        schedule=asked.schedule or ("interleaved" if asked.virtual_stages > 1 else "1f1b"),
        virtual_stages=asked.virtual_stages,
        context=asked.context,
        context_kind=asked.context_kind,
        expert=asked.expert,
        expert_tensor=experts,
    )
    for field, value, why in _faults(model, recipe, layout):
        raise UsageError(f"parallel.{field}: {value} {why}")
    return layout


def _refuse_in_serving(asked: ParallelSection) -> None:
    for field in ("tensor", "pipeline", "context", "expert"):
        if getattr(asked, field) > 1:
            raise UsageError(
                f"parallel.{field}: {getattr(asked, field)} is training's, and nothing is trained",
                hint="engine.tensor_parallel, engine.pipeline_parallel and engine.expert_parallel",
            )


def _data_degrees(asked: ParallelSection, sharding: Sharding, gpus: int) -> tuple[int, int]:
    """Return data_shard and data_replicate; what is not said is the rest of the GPUs."""
    inner = asked.tensor * asked.pipeline * asked.context
    said = " x ".join(
        f"{name} {getattr(asked, name)}"
        for name in ("tensor", "pipeline", "context", "data_replicate", "data_shard")
        if getattr(asked, name) not in (None, 1, -1)
    )
    shard = asked.data_shard if asked.data_shard not in (None, -1) else 0
    if sharding not in SHARDS:
        if shard > 1:
            raise UsageError(
                f"parallel.data_shard: {shard}, but sharding {sharding.value} divides nothing",
                hint="--shard fsdp2, fsdp, zero1, zero2 or zero3",
            )
        shard = 1
    if sharding in ZERO and (asked.data_replicate or 1) > 1:
        raise UsageError(
            f"parallel.data_replicate: {asked.data_replicate} groups, but {sharding.value} divides over "
            "all ranks",
            hint="--shard fsdp2 or fsdp",
        )
    replicate = asked.data_replicate or (0 if shard and sharding not in SHARDS else 1)
    known = inner * (shard or 1) * (replicate or 1)
    if gpus % known or (shard and replicate and known != gpus):
        raise UsageError(
            f"parallel: {said} = {known} ranks, not the {gpus} of machine.gpus",
            hint="degrees multiply to the GPUs; data_shard -1 takes the rest",
        )
    rest = gpus // known
    return shard or rest, replicate or rest


def _faults(model: ModelSpec, recipe: Recipe, layout: Layout) -> Iterator[tuple[str, object, str]]:
    """Yield each degree that does not divide what it should: field, value, why."""
    mixers = {mixer for layer in model.layers for mixer in layer.mixers}
    heads = sorted({mixer.num_heads for mixer in mixers} - {0})
    kv_heads = sorted({mixer.num_kv_heads for mixer in mixers} - {0})
    for count in heads:
        if count % layout.tensor:
            yield "tensor", layout.tensor, f"does not divide the {count} attention heads"
        if layout.context_kind == "ulysses" and count % (layout.context * layout.tensor):
            yield (
                "context",
                layout.context,
                f"(ulysses) does not divide the {count} attention heads",
            )
    for count in kv_heads:
        if count % layout.tensor:
            yield "tensor", layout.tensor, f"does not divide the {count} key-value heads"
    if layout.sequence and layout.tensor == 1:
        yield "sequence", True, "needs tensor ranks to divide the tokens over"
    stages = layout.pipeline * layout.virtual_stages
    if layout.virtual_stages > 1 and layout.pipeline == 1:
        yield "virtual_stages", layout.virtual_stages, "needs pipeline above 1"
    if (layout.virtual_stages > 1) != (layout.schedule == "interleaved"):
        yield "schedule", layout.schedule, f"contradicts virtual_stages {layout.virtual_stages}"
    if stages > model.num_layers:
        yield "pipeline", layout.pipeline, f"makes {stages} stages of {model.num_layers} layers"
    elif not divides_layers(model.num_layers, stages):
        yield (
            "pipeline",
            layout.pipeline,
            f"does not divide the {model.num_layers} layers into {stages} stages, nor with the embedding "
            "and the head counted as layers",
        )
    experts = sorted({layer.mlp.num_experts for layer in model.layers} - {0})
    if layout.expert > 1 and not experts:
        yield "expert", layout.expert, f"divides experts, and {model.name or 'the model'} is dense"
    for count in experts:
        if count % layout.expert:
            yield "expert", layout.expert, f"does not divide the {count} experts"
    inside, share = (
        layout.data * layout.context * layout.tensor,
        layout.expert * layout.expert_tensor,
    )
    if inside % share:
        yield (
            "expert",
            layout.expert,
            f"x expert_tensor {layout.expert_tensor} does not divide the {inside} ranks of a stage",
        )
    kept = recipe.reshard_after_forward
    if not isinstance(kept, bool) and kept is not None and layout.data_shard % kept:
        raise UsageError(
            f"reshard_after_forward: {kept} does not divide the {layout.data_shard} ranks that shard"
        )


def divides_layers(layers: int, stages: int) -> bool:
    """Return whether stages are equal, embedding and head counted as a layer each if they must be.

    Megatron-core's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split;
    Llama-3.1-405B's 126 layers are made for it: 128 of 8 or 16 stages.
    """
    return layers % stages == 0 or (layers + 2) % stages == 0


def _plans(switches: Switches, field: str, layout: Layout) -> bool:
    """Return whether a law's code divides by that degree, and the plan knows how."""
    return {
        "tensor": switches.tensor_plan != "none",
        "pipeline": switches.pipelines != "none",
        "context": layout.context_kind in switches.contexts,
        "expert": switches.expert_parallel,
    }[field]


MEGATRON = {
    "method": ("full",),
    "checkpointing": ("none", "full", "every-k"),
    "loss": ("full",),
    "optimizer": ("adamw", "adamw-fused", "sgd", "sgd-momentum"),
}
"""What is planned of Megatron-LM's arguments: --recompute-granularity full, --optimizer adam and sgd."""


WHOLE_EXPERTS = (
    *("cohere2_moe", "ernie4_5_vl_moe", "exaone_moe", "glm4v_moe", "llama4", "qwen2_moe"),
    *("qwen3_omni_moe", "qwen3_vl_moe"),
)
"""Families whose base_model_tp_plan names no experts (transformers 5.19 models/*/configuration_*.py)."""


def refuse_unplanned(model: ModelSpec, recipe: Recipe, layout: Layout, law: Framework) -> None:
    """Raise UsageError or UnsupportedError for what the framework's code, or the plan, does not divide."""
    switches, sharding = law.switches, recipe.sharding
    for field in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(layout, field)
        if degree > 1 and not _plans(switches, field, layout):
            able = {
                each.family
                for each in frameworks().values()
                if _plans(each.switches, field, layout)
            }
            raise UnsupportedError(
                f"parallel.{field}: {degree} cannot be planned under {law.title} yet",
                hint=f"--framework {' or '.join(sorted(able))}" if able else "",
            )
    if (sharding is Sharding.MEGATRON) != (switches.layers == "megatron") and (
        sharding not in (Sharding.NONE, Sharding.DDP)
    ):
        raise UsageError(
            f"sharding: {sharding.value} is not what {law.title} divides by",
            hint="--framework megatron goes with --shard megatron, ddp or none",
        )
    if layout.sequence and switches.tensor_plan == "transformers":
        raise UnsupportedError(
            "parallel.sequence: transformers' tp_plan divides no tokens", hint="leave it out"
        )
    if layout.tensor > 1 and recipe.method is Method.QLORA:
        raise UnsupportedError(
            f"parallel.tensor: {layout.tensor}, but bitsandbytes' packed weights are not divided by tensor",
            hint="--shard fsdp2 divides them",
        )
    for field, known in MEGATRON.items() if switches.layers == "megatron" else ():
        value = getattr(recipe, field)
        if value is not None and value.value not in known:
            raise UnsupportedError(
                f"{field}: {value.value} cannot be planned under {law.title} yet",
                hint=", ".join(known),
            )
    if switches.layers == "megatron" and any(
        layer.mlp.kind is MlpKind.NONE
        or mixer_of(layer.mixer).record is None
        or len(layer.mixers) != 1
        for layer in model.layers
    ):
        raise UnsupportedError(
            f"framework: {law.title} cannot be planned for {model.name} yet: its layers are not one "
            "token mixer and one MLP",
            hint="--framework hf-trainer or vramwise",
        )
    several = layout.tensor * layout.pipeline * layout.context * layout.expert > 1
    if several and recipe.task is not Task.SFT:
        raise UnsupportedError(
            f"parallel: {layout} cannot be planned for {recipe.task.value} yet", hint="--task sft"
        )
    experts = any(layer.mlp.num_experts for layer in model.layers)
    theirs = layout.tensor > 1 and switches.tensor_plan == "transformers"
    if theirs and experts and model.model_type.startswith(WHOLE_EXPERTS):
        raise UnsupportedError(
            f"parallel.tensor: {layout.tensor}, but transformers' tp_plan of {model.model_type} names no "
            "experts: whole ones on every rank are not planned",
            hint="--shard fsdp2 divides them",
        )
    if switches.layers == "megatron" and experts and layout.tensor > 1 and not layout.sequence:
        raise UsageError(
            f"parallel.sequence: false, but Megatron-LM trains experts over {layout.tensor} tensor ranks "
            "with sequence parallelism only",
            hint="--sequence-parallel",
        )
