"""Recipe and RunFile: every choice that moves a byte, validated.

A field left at None means "whatever the framework does"; planner.run.framework fills it in.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_TOKENS = 2**27
"""134 million tokens: an upper bound that catches typing errors, not a real limit."""

INITS = r"^(default|gaussian|pissa|pissa_niter_[1-9][0-9]{0,2})$"
RUN_FILE_VERSION = 1
"""The newest run.yaml this release reads."""

Count = Annotated[int, Field(ge=1, le=2**20, strict=True)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS, strict=True)]


class Task(StrEnum):
    """What the run does."""

    SFT = "sft"
    GRPO = "grpo"
    DPO = "dpo"
    KTO = "kto"
    ORPO = "orpo"
    SIMPO = "simpo"
    REWARD = "reward"
    PPO = "ppo"
    DISTILL = "distill"
    EMBED = "embed"
    RERANK = "rerank"
    SERVE = "serve"


class Method(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Checkpointing(StrEnum):
    """What is kept of the forward pass."""

    NONE = "none"
    FULL = "full"
    EVERY_K = "every-k"
    """Segments of checkpoint_every layers."""
    SELECTIVE_OP = "selective-op"
    """Layers keep the results of attention and of every second matmul (torchtitan)."""
    SELECTIVE_LAYER = "selective-layer"
    """Every layer number checkpoint_every is checkpointed, the others keep everything."""
    OFFLOAD = "offload"


class Float8(StrEnum):
    """How torchao scales what it casts to float8."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_GW_HP = "rowwise-with-gw-hp"
    """rowwise, and weight gradients in 16 bit."""


class Attention(StrEnum):
    """Attention implementation."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash"


class Loss(StrEnum):
    """How log-probabilities are made of hidden states."""

    FULL = "full"
    CHUNKED = "chunked"


class Reference(StrEnum):
    """Where the reference model lives."""

    NONE = "none"
    ADAPTER_OFF = "adapter-off"
    SEPARATE = "separate"
    OFFLOADED = "offloaded"
    """In host memory, on the GPU for its own pass."""
    PRECOMPUTED = "precomputed"
    """Its log-probabilities were made before training and stored."""


class TeacherPlacement(StrEnum):
    """Where a teacher's weights are."""

    RESIDENT = "resident"
    OFFLOADED = "offloaded"
    """In host memory, on the GPU for its own pass."""
    SERVED = "served"
    """In another process or machine: its log-probabilities of the top tokens come by network."""


class EngineKind(StrEnum):
    """What generates completions."""

    NONE = "none"
    TRANSFORMERS = "transformers"
    VLLM_SHARED = "vllm-shared"
    VLLM_PUSH = "vllm-push"
    VLLM_SERVER = "vllm-server"


VLLM = (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH, EngineKind.VLLM_SERVER)


class Sharding(StrEnum):
    """How training state is divided over GPUs."""

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    FSDP2 = "fsdp2"
    MEGATRON = "megatron"
    """Megatron-Core's distributed optimizer: states divided over all ranks that hold the same weights."""


class Optimizer(StrEnum):
    """Optimizers by memory behaviour."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw-fused"
    ADAMW_8BIT = "adamw-8bit"
    PAGED_ADAMW = "paged-adamw"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    ADAFACTOR = "adafactor"
    LION = "lion"
    LION_8BIT = "lion-8bit"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    MUON = "muon"


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraSection(Section):
    """Adapters."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    start_from: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, alias="from"
    )
    """A folder or hub id with an adapter to go on with; its rank and targets hold."""
    rank: Annotated[int, Field(ge=1, le=2**14, strict=True)] = 16
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear, attention, mlp, or module names such as ("q_proj", "v_proj")."""
    target_parameters: tuple[str, ...] = ()
    """Fused expert tensors adapted beside them, as PEFT names them: "mlp.experts.gate_up_proj"."""
    dtype: str | None = None
    """Adapter dtype; None = the framework's (PEFT upcasts bf16 to fp32)."""
    dora: bool = False
    use_rslora: bool = False
    """Adapters act at alpha / sqrt(rank) instead of alpha / rank."""
    init: Annotated[str, Field(pattern=INITS)] = "default"
    """default (B is zero), gaussian, or pissa, pissa_niter_N: the base's first singular vectors."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """The base's biases are trained too: all, or those of adapted modules."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a copy is trained whole: embed_tokens, lm_head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class EngineSection(Section):
    """Generation engine."""

    kind: EngineKind | None = None
    kv_dtype: str | None = None
    kv_bytes: Annotated[int, Field(ge=1, strict=True)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Tokens | None = None
    block_size: Annotated[int, Field(ge=1, le=4096, strict=True)] = 16
    sleep_level: Annotated[int, Field(ge=0, le=2, strict=True)] | None = None
    cuda_graphs: bool | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    data_parallel: Count = 1
    """Engines side by side, each with its own attention weights and KV pool; they share the experts."""
    expert_parallel: bool = False
    """Experts are divided whole among tensor and data parallel ranks (--enable-expert-parallel)."""
    cpu_offload_gib: Annotated[float, Field(ge=0, le=2**20)] = 0.0
    """serve: GiB of each GPU's weights that vLLM keeps in host memory (--cpu-offload-gb)."""
    sync: Literal["tensor", "layer", "model"] | Count | None = None
    """What of divided weights is whole at once while they are pushed to the engine; a number: the layers go
    in so many parts (ms-swift's move_model_batches). None = the framework's way."""
    offline: bool = False
    """LLM() in a script instead of a server: its default batches are larger."""
    max_loras: Count | None = None
    """Adapter slots (--enable-lora); None = none while serving, one for the policy while training."""
    max_lora_rank: Annotated[int, Field(ge=1, le=2**14, strict=True)] | None = None
    prefix_caching: bool | None = None
    """Blocks of a prefix are kept for requests that begin alike; recurrent layers hold more states for it.
    None = the release's own."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=500)] = (
        "http://127.0.0.1:8000"
    )
    """vllm-server: where `vllm serve` listens."""
    transfer: Literal["folder", "nccl", "ipc"] = "folder"
    """vllm-server: adapters, or all weights, through a folder that both sides see; or all weights, adapters folded
    in, by vLLM's own weight transfer: nccl to other GPUs and hosts, ipc on the same GPUs."""
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 1800.0
    """A rollout that takes longer is aborted."""


class OffloadSection(Section):
    """What waits in host memory or on a disk beside `optimizer_offload`, and how."""

    parameters: bool = False
    """Weights too, between uses: FSDP's cpu_offload (with gradients and states) or offload_param."""
    device: Literal["cpu", "nvme"] = "cpu"
    """nvme: DeepSpeed swaps the offloaded to a disk through buffers in host memory (stage 3)."""
    pinned: bool | None = None
    """Buffers are page-locked, each rounded up to a power of two. Default: FSDP's are, DeepSpeed's
    are where its config says pin_memory."""


Elements = Annotated[int, Field(ge=0, le=2**50, strict=True)]


class BucketsSection(Section):
    """DeepSpeed's buffers, in elements; None = the framework's config, else DeepSpeed's own default.

    "auto": as transformers' Trainer and accelerate fill it in from the hidden size.
    """

    reduce: Elements | Literal["auto"] | None = None
    """Gradients reduced at once (reduce_bucket_size)."""
    allgather: Elements | None = None
    """Weights gathered at once after a step; torch gathers them in place, without a buffer."""
    prefetch: Elements | Literal["auto"] | None = None
    """zero3: weights asked for ahead at once (stage3_prefetch_bucket_size)."""
    live: Elements | None = None
    """zero3: weights that are whole at most (stage3_max_live_parameters)."""
    reuse: Elements | None = None
    """zero3: weights needed again within so many elements stay whole (stage3_max_reuse_distance)."""
    persistence: Elements | Literal["auto"] | None = None
    """zero3: tensors of at most so many elements stay whole (stage3_param_persistence_threshold)."""
    sub_group: Elements | None = None
    """zero3: elements of the shard stepped at once (sub_group_size); 0 = a tensor's."""
    overlap: bool | None = None
    """Reduction beside the backward (overlap_comm): stages 1 and 2 have a second bucket for it."""
    contiguous: bool | None = None
    """Gradients are copied into a buffer of the bucket's size (contiguous_gradients)."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Gradients are reduced in this dtype (communication_data_type); None = the weights'."""


class ParallelSection(Section):
    """How the GPUs of a training run divide the work (planner/run/parallel.py)."""

    data_shard: Annotated[int, Field(ge=-1, le=2**20, strict=True)] | None = None
    """Ranks over which `sharding` divides; None or -1 = the rest of the GPUs."""
    data_replicate: Count | None = None
    """Copies of such a group (HSDP); None = 1, the rest of the GPUs where nothing is divided."""
    tensor: Count = 1
    sequence: bool = False
    """Norms and residuals divided over the tensor ranks by tokens."""
    pipeline: Count = 1
    schedule: Literal["1f1b", "interleaved"] | None = None
    virtual_stages: Count = 1
    """Chunks of layers that one pipeline rank holds (interleaved)."""
    context: Count = 1
    """Ranks that share one sequence's tokens."""
    context_kind: Literal["ring", "ulysses"] = "ring"
    expert: Count = 1
    expert_tensor: Count | None = None
    """Ranks that share one expert; None = tensor."""

    @field_validator("data_shard")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("a count, or -1 for the rest of the GPUs")
        return value


class EvaluationSection(Section):
    """Evaluation while a run goes on, as the HF Trainer does it."""

    samples: Annotated[int, Field(ge=0, le=2**31, strict=True)] = 0
    """Held-out samples; 0 = no evaluation."""
    batch_size: Count | None = None
    """Samples of one forward on one GPU (per_device_eval_batch_size)."""
    logits: bool = False
    """Metrics want the logits (compute_metrics), which are gathered from all GPUs and kept."""
    accumulation_steps: Count | None = None
    """Batches after which kept logits move to the host (eval_accumulation_steps); None = at the end."""


class Recipe(Section):
    """Every choice that moves a byte. None = the framework's default."""

    task: Task = Task.SFT
    algorithm: str | None = None
    """Relative of the task with the same tensors: dr_grpo, dapo, gspo, rloo, orpo, kto, simpo ..."""
    method: Method = Method.LORA
    framework: str = "vramwise"
    lora: LoraSection = LoraSection()
    engine: EngineSection = EngineSection()

    dtype: str | None = None
    """dtype of the base weights: bf16, fp16, fp32."""
    mixed_precision: str | None = None
    """none, bf16 or fp16: autocast dtype."""
    quantization: str | None = None
    """Base weights: none, nf4, fp4, int8, fp8, gptq-4bit, awq-4bit, mxfp4."""
    double_quant: bool | None = None
    master_weights: bool | None = None
    """An fp32 copy of the trained weights lives in the optimizer."""
    gradient_dtype: str | None = None

    optimizer: Optimizer | None = None
    optimizer_offload: bool = False
    offload: OffloadSection = OffloadSection()
    optimizer_in_backward: bool = False
    """Each parameter is stepped as soon as its gradient exists (torchtune's optimizer_in_bwd)."""

    micro_batch_size: Count | None = None
    """Sequences in one forward pass on one GPU."""
    gradient_accumulation: Count = 1
    prompt_length: Tokens | None = None
    completion_length: Tokens | None = None
    context: Tokens | None = None
    """prompt + completion; give this or the two lengths."""
    num_generations: Count | None = None
    images: Annotated[int, Field(ge=0, le=10_000, strict=True)] = 0
    """Images of one sample; their tokens are part of its length."""
    image_size: str | None = None
    """Width x height of an image or of a video's frames: 1024x768."""
    image_tokens: Tokens | None = None
    """Tokens of one image, instead of a size."""
    videos: Annotated[int, Field(ge=0, le=1_000, strict=True)] = 0
    video_frames: Count | None = None
    """Frames of one video."""
    audio: Annotated[int, Field(ge=0, le=1_000, strict=True)] = 0
    """Sounds of one sample; their tokens are part of its length."""
    audio_seconds: Annotated[float, Field(gt=0)] | None = None
    """Length of one sound."""
    packing: bool | None = None

    checkpointing: Checkpointing | None = None
    checkpoint_every: Count = 1
    offload_keep_layers: Annotated[int, Field(ge=0, le=4096, strict=True)] = 1
    attention: Attention | None = None
    loss: Loss | None = None
    loss_chunk_rows: Count | None = None
    entropy: bool = False
    """The loss takes an entropy of full logits, as a term or a figure to log."""
    tiled_mlp: bool | None = None
    neftune: bool = False
    """SFT: noise on the embeddings; run files say it in train.neftune_alpha."""
    router_loss: bool | None = None
    """SFT of a mixture: the loss that balances its experts; run files say it in train.router_aux_loss_coef.
    None: as the model's config has it."""
    beta: Annotated[float, Field(ge=0)] | None = None
    reference: Reference | None = None
    teacher: str | None = None
    """distill: the teacher, a catalogue name, folder or hub id."""
    teacher_placement: TeacherPlacement | None = None
    teacher_top_k: Count | None = None
    """distill: log-probabilities per token that a served teacher sends."""
    value_model: str | None = None
    """ppo: what the critic starts from; None = the policy's own kind."""
    reward_model: str | None = None
    """ppo: the model that judges; None = the policy's own kind, "none" = a function."""
    negatives: Annotated[int, Field(ge=0, le=4096, strict=True)] | None = None
    """embed: hard negatives of one pair; rerank: negative documents of one query."""
    mini_batch: Count | None = None
    """embed: pairs embedded at once under GradCache; None = all of the batch with their graphs."""
    evaluation: EvaluationSection = EvaluationSection()
    save: Literal["none", "whole", "sharded"] = "none"
    """Plan the saving of a checkpoint: gathered on rank 0, or each rank its own shard."""
    resume: bool = False
    """Plan the start from a checkpoint."""
    sharding: Sharding = Sharding.NONE
    buckets: BucketsSection = BucketsSection()
    loads: Literal["full", "rank0", "sharded"] | None = None
    """How ranks get their shards of the weights: each reads all of them and divides then, the first reads and
    broadcasts, or each reads its own (zero.Init, meta). None = the framework's way, not counted but litgpt's."""
    parallel: ParallelSection = ParallelSection()
    reshard_after_forward: bool | Annotated[int, Field(ge=2, le=2**20, strict=True)] | None = None
    """fsdp2: what a layer is divided over between forward and backward: true = all ranks, false = it stays
    whole, a number = that many ranks."""
    reduce_dtype: str | None = None
    """fsdp2: dtype in which gradients are reduced; None = the one they are computed in."""
    accumulate_sync: bool | None = None
    """Gradients are reduced after every micro-batch; None = the framework's habit."""
    bucket_views: bool = False
    """ddp: gradients are views of its buckets (gradient_as_bucket_view); torch's default doubles them."""
    compile: bool = False
    """torch.compile of the layers or the model, as the framework does it."""
    compile_loss: bool | None = None
    """The loss too; None: what the framework compiles with the layers."""
    float8: Float8 | None = None
    """Linears multiply in float8 (torchao), by this scaling."""
    float8_all_gather: bool = False
    """FSDP gathers weights in float8."""
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] | None = None
    """How transformers 5 runs fused experts; None = its own choice, grouped_mm."""
    expert_capacity_factor: Annotated[float, Field(ge=1)] | None = None
    """Rows that an expert in a loop takes at most, in even shares; the others are dropped."""


class MachineSection(Section):
    """The machine as a run file names it."""

    gpu: str | None = None
    gpus: Count = 1
    nodes: Count | None = None
    """Hosts that the GPUs are in; None = as few as hold eight each."""
    vram: str | None = None
    """Instead of a GPU: memory that torch sees, for example 24GiB."""
    host_ram: str | None = None


class RunFile(Section):
    """run.yaml: model + recipe + machine (+ train, validated by trainer.config)."""

    schema_version: Annotated[int, Field(ge=1, le=RUN_FILE_VERSION, strict=True)] = RUN_FILE_VERSION
    """Of the run file; older ones are read, newer ones refused."""
    model: str
    revision: str | None = None
    recipe: Recipe = Recipe()
    machine: MachineSection = MachineSection()
    train: dict[str, Any] = Field(default_factory=dict)
