"""What a traced step is: every choice that changes an allocation."""

from dataclasses import dataclass
from typing import Any

from planner.run.recipe import Attention, Checkpointing, Method, Optimizer
from planner.terms.overhead import BLAS_WORKSPACE_BYTES
from profiler.sharded import Shard


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """One training step of a transformers model."""

    config: dict[str, Any]
    """The model's config.json."""
    head: str = "vocabulary"
    """vocabulary, score (a sequence classifier of one number) or none (the bare decoder)."""
    method: Method = Method.LORA
    dtype: str = "bf16"
    """dtype of the base weights: bf16, fp16, fp32."""
    autocast: str = "none"
    """none, bf16 or fp16 (fp16 brings a gradient scaler)."""
    lora_rank: int = 16
    lora_targets: tuple[str, ...] | str = "all-linear"
    experts: str = ""
    """How fused experts run: grouped_mm, fallback, batched_mm or eager; empty = transformers' choice."""
    imbalance: bool = False
    """In a loop: all tokens choose the same experts."""
    expert_capacity: float = 0.0
    lora_target_parameters: tuple[str, ...] = ()
    """Fused expert tensors adapted beside them, by PEFT's ParamWrapper."""
    lora_dropout: float = 0.0
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    lora_bias: str = "none"
    ties_saved_modules: bool = False
    """A tied head stays tied to an embedding of modules_to_save."""
    adapter_dtype: str = "fp32"
    """PEFT upcasts 16-bit adapters to fp32 unless autocast_adapter_dtype=False."""
    double_quant: bool = True
    prepare_kbit: bool = True
    """QLoRA: prepare_model_for_kbit_training upcasts what stays in 16 bits to fp32."""
    kbit_norms_only: bool = False
    """After that, embeddings and head go back to bf16, as SFTTrainer of TRL 0.13 did."""
    keeps_matmul_input: bool = False
    """4-bit matmuls hold their input until the graph is freed, as bitsandbytes 0.43 did."""
    reentrant: bool = False
    """Checkpointing with use_reentrant, the default of transformers before 5."""
    checkpointing: Checkpointing = Checkpointing.FULL
    checkpoint_every: int = 1
    """selective-layer: every which layer is checkpointed."""
    attention: Attention = Attention.SDPA
    optimizer: Optimizer = Optimizer.ADAMW
    micro_batch: int = 1
    length: int = 512
    """Tokens of one sequence: prompt and completion."""
    padded: bool = False
    """Rows of unequal lengths are filled up: the model gets a mask that is not all ones."""
    completion: int = 0
    """GRPO: scored tokens of one sequence; 0 = all but one."""
    gradient_accumulation: int = 1
    steps: int = 2
    """Optimizer steps: the second sees the optimizer's state."""
    warm_optimizer: bool = False
    """Make the optimizer's state before the first step, so that one step shows the steady state."""
    multimodal: bool = False
    """Build the model with its towers, where transformers has a class of the text alone as well."""
    layers: int | None = None
    """Trace only this many decoder layers."""
    keep_outputs: bool = False
    """Hold the model's outputs through backward, as a hand-written loop does."""
    fp32_outputs: bool | None = None
    """accelerate's conversion of the outputs to fp32; None = with autocast, as accelerate does."""
    transformers: str = ""
    """Release whose causal loss is used ("4.45"); empty = the installed one."""
    sdpa_repeats_kv: bool = False
    """SDPA gets keys and values repeated for every query head, as transformers did before 4.54."""
    eval_batches: int = 0
    """Batches of an evaluation after the steps; 0 = none."""
    eval_rows: int = 1
    """Sequences of one of them."""
    eval_logits: bool = False
    """Their logits are kept for metrics."""
    eval_accumulation: int = 0
    """Batches after which those leave the device; 0 = at the end."""
    max_grad_norm: float = 1.0
    """0 = no clipping."""
    shard: Shard | None = None
    """How the model is divided over ranks."""
    workspace_bytes: int = BLAS_WORKSPACE_BYTES
    """What torch's pool holds for one BLAS handle: planner.terms.overhead.blas_workspace_bytes."""

    @property
    def converts_outputs(self) -> bool:
        """Whether the logits are copied to fp32 on their way out of the model."""
        return self.autocast != "none" if self.fp32_outputs is None else self.fp32_outputs
