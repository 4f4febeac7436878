"""Resolved: a recipe with every choice made; what the terms read."""

from dataclasses import dataclass
from typing import Literal

from planner.run.companions import Companion
from planner.run.framework_files import Framework
from planner.run.logits_law import LogitsLaw
from planner.run.parallel import Layout
from planner.run.pipeline import Stage
from planner.run.placement import Placement, offloaded, place
from planner.run.recipe import (
    Attention,
    Checkpointing,
    EngineKind,
    Float8,
    Loss,
    Method,
    OffloadSection,
    Optimizer,
    Reference,
    Sharding,
    Task,
)
from planner.run.switches import Switches
from planner.run.task_fields import (
    Column,
)
from planner.run.tasks import TASKS
from planner.run.zero import Zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A recipe with every default filled in; what the terms read."""

    task: Task
    algorithm: str
    method: Method
    framework: Framework
    framework_asked: str
    """The framework as the recipe spells it, like trl==1.9.0."""
    switches: Switches
    """What the framework's code does with memory in this task."""
    trains: bool
    dtype: str
    """Base weights as loaded."""
    autocast: str
    """Autocast dtype, "" when off."""
    quantization: str
    double_quant: bool
    master_weights: bool
    gradient_dtype: str
    adapter_dtype: str
    experts: str
    """grouped_mm, fallback, batched_mm, eager or modules (planner/run/experts.py); "": no experts train."""
    expert_capacity: float
    """Rows an expert takes at most, in even shares; 0 = all."""
    linear_experts: bool
    """Each expert is a linear of its own, which bitsandbytes quantises."""
    lora_rank: int
    lora_targets: str | tuple[str, ...]
    target_parameters: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    lora_bias: str
    lora_init: str
    keeps_start: bool
    """What is trained stays once more as it was at the start: the reference of a policy that was another
    than its base from the first step."""
    started: bool
    """The adapter was there before: its rank and targets are fixed."""
    dora: bool
    lora_dropout: float
    optimizer: Optimizer
    optimizer_offload: bool
    offload: OffloadSection
    optimizer_in_backward: bool
    sequences: int
    """Sequences whose graph is held at once (DPO: chosen and rejected; embed: all texts)."""
    batch: int
    """Samples of one micro-batch: sequences, pairs or queries."""
    negatives: int
    at_once: int
    """embed: pairs whose graphs are held at once; fewer than `batch` under GradCache."""
    cached: bool
    """embed: GradCache, which embeds without a graph first and a mini-batch with one after another."""
    columns: tuple[Column, ...]
    """embed: the forwards of one micro-batch."""
    companions: tuple[Companion, ...]
    """Models beside the trained one."""
    teacher_top_k: int
    eval_samples: int
    eval_batch: int
    eval_logits: bool
    eval_accumulation: int
    """Batches after which kept logits leave the GPU; 0 = at the end."""
    save: str
    resume: bool
    grad_accum: int
    prompt_tokens: int
    completion_tokens: int
    num_generations: int
    images: int
    image_size: tuple[int, int] | None
    image_tokens: int
    videos: int
    video_frames: int
    audio: int
    audio_seconds: float
    packing: bool
    padded: bool
    """A mask goes to attention, so SDPA's keys and values are repeated for all query heads."""
    checkpointing: Checkpointing
    checkpoint_every: int
    keep_layers: int
    attention: Attention
    loss: Loss
    law: LogitsLaw
    loss_chunk_rows: int
    entropy: bool
    """Full logits are copied for an entropy."""
    tiled_mlp: bool
    neftune: bool
    router_loss: bool
    beta: float
    reference: Reference
    sharding: Sharding
    loads: str
    """full, rank0 or sharded; "" = nobody says."""
    zero: Zero | None
    """DeepSpeed's buffers, if it divides or offloads."""
    layout: Layout
    """How the run's GPUs divide the work."""
    reshard_after_forward: bool | int
    reduce_dtype: str
    """Of FSDP2's reductions; "" = the gradient's own."""
    accumulate_sync: bool
    """Gradients are reduced after every micro-batch, not only after the last."""
    bucket_views: bool
    gpus: int
    node_gpus: int
    """Of one host."""
    cpu: bool
    """No GPU: torch's CPU kernels run."""
    stage: Stage
    """Whose rank this is of a pipeline."""
    compile: bool
    compiled: str
    """What torch.compile compiles at once: layer, model; empty: nothing."""
    compiled_loss: bool
    float8: Float8 | None
    float8_all_gather: bool
    engine: EngineKind
    kv_dtype: str
    kv_bytes: int
    utilization: float
    """vLLM's share of the GPU; 0 = the KV pool is as large as the rollout needs."""
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    sleep_level: int
    cuda_graphs: bool
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    sync: str | int
    """What is whole at once while weights are pushed: tensor, layer, model, or a part of so many."""
    transfer: Literal["folder", "nccl", "ipc"]
    """How weights reach a server."""
    folds_adapters: bool
    """Adapters are folded into whole weights on their way to the engine."""
    expert_parallel: bool
    engine_offload_bytes: int
    """Of one GPU's weights, in host memory."""
    max_loras: int
    max_lora_rank: int
    prefix_caching: bool
    assumptions: tuple[str, ...] = ()
    imbalance: bool = False
    """Planned for a router that sends every token to the same experts: the upper end of a plan."""

    @property
    def seq_tokens(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens(self) -> int:
        """Tokens whose graph is held at once on one GPU."""
        if self.columns:
            return sum(column.sequences * column.tokens for column in self.columns)
        return self.sequences * self.seq_tokens

    def companion(self, role: str) -> Companion | None:
        """Return the model of a role, if the run has one."""
        return next((each for each in self.companions if each.role == role), None)

    @property
    def pushes(self) -> bool:
        """Several ranks hand weights to an engine that has its own copy."""
        own = self.engine in (EngineKind.VLLM_PUSH, EngineKind.VLLM_SERVER)
        return own and TASKS[self.task].generates and self.placement.ranks > 1

    @property
    def accumulates_whole(self) -> bool:
        """Gradients stay whole until the last micro-batch, whatever FSDP divides; under DDP with bucket
        views they are beside the buckets until then."""
        fsdp = self.sharding in (Sharding.FSDP, Sharding.FSDP2) and self.placement.ranks > 1
        divided = fsdp or self.placement.bucket_views
        return divided and self.grad_accum > 1 and not self.accumulate_sync

    @property
    def copies_into_buckets(self) -> bool:
        """A gradient is copied into DDP's bucket as soon as it is there, and becomes a view of it."""
        return self.placement.bucket_views and not self.accumulates_whole

    @property
    def placement(self) -> Placement:
        """What each rank holds."""
        between = self.switches.offloads_between_phases
        return place(
            self.sharding,
            self.layout.data * self.layout.context,
            shards=self.layout.sharers,
            replicas=self.layout.data_replicate,
            reshard=self.reshard_after_forward,
            method=self.method,
            quantized=bool(self.quantization),
            autocast=bool(self.autocast) and not self.switches.fsdp_keeps_dtype,
            loads_whole=self.switches.fsdp_loads_full,
            bucket_views=self.bucket_views,
            replicates_by_fsdp2=self.switches.replicates_by_fsdp2,
            offload=offloaded(
                self.sharding,
                optimizer=self.optimizer_offload and not between,
                parameters=self.offload.parameters and not between,
                quantized=bool(self.quantization),
                by=self.switches.offloads_by,
            ),
            zero=self.zero,
        )

    @property
    def micro_batches(self) -> int:
        """Batches whose losses a step adds up; under GradCache each of them has several backwards."""
        return self.grad_accum // -(-self.batch // self.at_once)

    @property
    def compute_dtype(self) -> str:
        """dtype inside linears and attention."""
        return self.autocast or self.dtype
