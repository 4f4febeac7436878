"""Switches: what a framework's code does with memory, typed; data/frameworks/*.json sets them.

A switch is for what no recipe field says because nobody chooses it: the code simply does it. An
unknown switch or a value of another type is an error. The default is what plain torch, transformers
and PEFT of today do; a file states only what differs.
"""

from typing import Annotated, Literal

from pydantic import Field

from planner.run.recipe import Section

Flag = Annotated[bool, Field(strict=True)]
AdapterDtype = Literal["fp32", "bf16", "fp16", "weights"]
"""weights: the dtype of the base."""
KbitUpcast = Literal["none", "norms", "all"]
Temperature = Literal["none", "in-place", "copy"]
TraceStep = Literal["none", "own", "trl", "trl-full", "hf", "hf-full"]
Mask = Literal["never", "padding", "packed", "always"]
Kernel = Literal["rmsnorm", "swiglu", "rope", "lora", "qlora"]
RopeTables = Literal["none", "model", "layers"]
Warmup = Literal["none", "half", "stored"]


class Switches(Section):
    """What one implementation does with memory."""

    # adapters
    adapter_dtype: AdapterDtype = "fp32"
    """dtype of LoRA matrices on a 16-bit base: PEFT's autocast_adapter_dtype makes them fp32."""
    adapter_dtype_quantized: AdapterDtype = "fp32"
    """The same on a quantised base; TRL from 1.0 on casts them to bf16."""
    ties_saved_modules: Flag = False
    """A tied head stays tied to an embedding of modules_to_save (PEFT's ensure_weight_tying)."""

    # optimizer
    master_weights: Flag = False
    """The optimizer keeps an fp32 copy of 16-bit trained weights, 4 bytes a parameter."""
    master_weights_full_bf16: Flag = True
    """With `master_weights`: also when all of a bf16 model is trained (else it rounds stochastically)."""
    fp32_optimizer_state: Flag = False
    """States are fp32 whatever the parameter's dtype; torch makes them as wide as the parameter."""
    offloads_by: Literal["own", "deepspeed"] = "own"
    """Whose code keeps optimizer states on the host: the framework's own, or DeepSpeed, the only way
    of those built on transformers' Trainer."""
    offloads_between_phases: Flag = False
    """What is offloaded waits on the host between phases alone: weights during the rollout, states until
    the step, for which they come back (verl workers/fsdp_workers.py: load_fsdp_optimizer)."""
    skips_sync: Flag = False
    """FSDP reduces gradients after the last micro-batch alone, so that until then all of them are
    whole on every rank (transformers trainer.py: accelerator.no_sync for all but the last)."""
    replicates_by_fsdp2: Flag = False
    """Data parallel ranks are replicas of FSDP2 (a mesh of N x 1): units are copied before they run and
    reduced through its buffers, and no DistributedDataParallel is made."""
    fp32_weights_for_fp16: Flag = False
    """A model of which all is trained, on a card without bf16 or with fp16 asked for, has fp32 weights under
    fp16 autocast (unsloth models/vision.py: "Float16 full finetuning uses more memory")."""
    divides_packed_bytes: Flag = False
    """4-bit weights are divided as the bytes they are. Elsewhere they must be stored as a float dtype
    (bnb_4bit_quant_storage): uint8, the default, stays whole on every rank (accelerate 1.15
    utils/fsdp_utils.py, fsdp2_prepare_model: ignored_params)."""
    step_scratch_bytes: Annotated[int, Field(ge=0, strict=True)] = 0
    """The step works bundle by bundle, each of at most this many bytes in six fp32 numbers an element; 0: all
    tensors at once, as torch's foreach."""
    embeddings_32bit_state: Flag = False
    """8-bit optimizers keep the embeddings' states in 32 bit (bitsandbytes GlobalOptimManager)."""
    logits_beside_scores: Flag = False
    """A reward model keeps the vocabulary's head and returns its logits, in fp32 too (trl
    AutoModelForCausalLMWithValueHead): they are there when the forward ends, and in no gradient."""

    # quantised bases
    kbit_upcast: KbitUpcast = "none"
    """What k-bit preparation leaves in fp32 beside the quantised linears, and the residual with it.

    all: embeddings, head and norms (peft prepare_model_for_kbit_training); norms: only those
    (TRL until 0.13 casts the rest back, peft_module_casting_to_bf16).
    """
    gptq_touches_every_gpu: Flag = False
    """A GPTQ base is loaded by device_map "auto", which makes every process a context on every GPU."""
    experts: Literal["grouped_mm", "modules"] = "grouped_mm"
    """How fused experts run: torch's grouped matmul (transformers 5: integrations/moe.py, the default of
    get_correct_experts_implementation); modules: a list of MLPs, one after another (transformers 4)."""
    expert_capacity: Flag = False
    """An expert can drop tokens beyond a capacity: a loop of one's own may (Megatron, DeepSpeed's MoE)."""
    linear_experts: Flag = False
    """Each expert is a linear of its own, which bitsandbytes quantises; fused ones stay 16-bit."""
    linear_expert_models: frozenset[str] = frozenset()
    """Model types of which that is so where it is not so of all (unsloth_zoo's GptOssExperts)."""
    quantized_head: Flag = False
    """The LM head is quantised too, and dequantised to fp32 for its matmul (litgpt)."""
    saved_input: Annotated[int, Field(ge=0, le=8, strict=True)] = 0
    """Bytes an element of the input that a quantised matmul's node holds until backward."""
    saved_output: Flag = False
    """A linear's output is kept for what scales it afterwards (litgpt's adapter v2)."""

    # loading
    prequantized: Flag = False
    """A 4-bit base is downloaded as one: no tensor is on the card in 16 bits while it is quantised."""
    warmup: Warmup = "none"
    """What transformers asks of the allocator before it loads, to fill it then: nothing (< 4.50), the
    model's bytes, of a quantised model half of those it would have in 16 bits (4.50 to 4.57), or as
    stored (5); never more than the card less 1.2 GiB (modeling_utils.py: caching_allocator_warmup)."""
    rope_tables: RopeTables = "none"
    """Cosines and sines of up to 32,768 positions are kept, once a model or once in every layer."""
    rope_table_models: frozenset[str] = frozenset()
    """Model types with them: those whose attention the framework replaces."""

    expandable_segments: Flag = False
    """The framework sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch starts."""
    roundup_power2: Annotated[str, Field(pattern=r"^(\[(\d+:\d+,)*(>|\d+):\d+\])?$")] = ""
    """Its roundup_power2_divisions there, which round blocks up: divisions of a power of two by size in MiB."""

    # parallel training code of its own
    layers: Literal["transformers", "megatron"] = "transformers"
    """Whose layers run: transformers' (and what keeps the same), or Megatron-Core's."""
    gradient_buffers: Flag = False
    """Gradients have places in one buffer from the start, as wide as `gradient_dtype`, fp32 if none is
    asked for (Megatron-Core's ParamAndGradBuffer)."""
    fused_weight_gradients: Flag = False
    """Matrix products add weights' gradients to that buffer: no tensor of their own."""
    tensor_plan: Literal["none", "megatron", "torchtitan", "transformers"] = "none"
    """How tensor-parallel ranks divide the model: none do; megatron: embedding, head and loss by rows of the
    vocabulary; torchtitan: the same by DTensor, norms by tokens; transformers: embedding whole, logits gathered."""
    pipelines: Literal["none", "megatron", "torch"] = "none"
    """Whose code divides layers into pipeline stages: Megatron-Core's, or torch.distributed.pipelining."""
    contexts: frozenset[Literal["ring", "ulysses"]] = frozenset()
    """How one sequence can be divided over ranks."""
    expert_parallel: Flag = False
    """Experts can be divided over ranks."""
    vocab_padding: Annotated[int, Field(ge=1, strict=True)] = 1
    """Rows of the vocabulary are padded to a multiple of this on every tensor parallel rank."""
    gathers_to_experts: Flag = False
    """Every rank gathers all expert ranks' tokens, into a buffer that stays (Megatron-Core's dispatcher
    "allgather", its default); otherwise rows travel to their experts (alltoall)."""
    overlaps_experts: Flag = False
    """All-to-all runs beside another micro-batch's layers, each part of a layer a graph of its own
    (--overlap-moe-expert-parallel-comm)."""
    keeps_batches: Flag = False
    """A step's micro-batches stay on the GPU of the rank that read them (Megatron-LM 0.18)."""
    kept_scores_buffer: Flag = False
    """One buffer of a layer's attention scores stays for good: what baddbmm takes and does not read."""
    grouped_workspaces: Annotated[int, Field(ge=0, strict=True)] = 0
    """As many more where experts run in one grouped product over streams."""
    library_workspaces: Annotated[int, Field(ge=0, strict=True)] = 0
    """Workspaces of Transformer Engine beside torch's two, each as large as one of those."""

    # layers
    mask: Mask = "never"
    """When SDPA gets a mask of [sequences, 1, T, T], for which transformers repeats keys and values.

    padding: rows are filled up to the longest of a micro-batch, so with several rows, not packed.
    packed: with packing, one of the stream's dtype for all layers (trainer/packing.py).
    always: also where no mask is passed (transformers 4.53 to 4.57 take every batch for packed).
    """
    idle_windows_mask: Flag = False
    """SDPA gets an additive mask of [T, T] from the length of a sliding window on that no layer uses
    (transformers 4.49 to 4.52: _update_causal_mask asks config.sliding_window alone)."""
    repeat_kv: frozenset[str] = frozenset()
    """Model types whose keys and values are repeated for every query head before attention."""
    sdpa_repeats_kv: Flag = False
    """SDPA gets keys and values repeated for every query head, mask or none (transformers before 4.54:
    integrations/sdpa_attention.py; since then enable_gqa where there is no mask)."""
    fused: frozenset[Kernel] = frozenset()
    """Kernels that keep fewer tensors than torch's operations: rmsnorm, swiglu, rope, lora (without
    dropout), qlora (adapters of quantised linears, dropout inside: fms-acceleration)."""
    tiled_norms: Flag = False
    """Norms run in the tiles of a tiled MLP."""
    tiles_by_default: Flag = False
    """The MLP is tiled whenever layers are checkpointed, unless the recipe says no."""
    tiles_experts: Flag = False
    """A tiled MLP wraps mixtures of experts as well (unsloth_zoo tiled_mlp.py patches every MLP)."""
    tiled_mlp_available: Flag = False
    """The framework has a tiled MLP to offer as advice."""

    # checkpointing
    reentrant: Flag = False
    """Checkpoints reentrantly (transformers < 5): the recomputed output lives through backward."""
    frozen_embedding_leaf: Flag = True
    """A frozen embedding's output is made a leaf (enable_input_require_grads), which its node holds."""
    hooks_towers: Flag = True
    """With checkpoints and adapters, frozen towers' embeddings are made to need a gradient too, so a
    graph of the tower is kept and run backward (transformers 5 enable_input_require_grads)."""
    exact_host_slab: Flag = False
    """Offloaded inputs go to one registered slab; torch's pinned blocks round up to a power of two."""

    # torch.compile and float8
    compiles: Literal["none", "layer", "model"] = "model"
    """What `compile` hands to torch.compile: each decoder layer, or the model with its loss."""
    compiles_loss: Flag = True
    """`compile` compiles the loss as well."""
    float8: Flag = False
    """Linears can be trained in float8 (torchao)."""
    selective: Flag = False
    """Checkpointing can keep the results of chosen operations, or of layers."""

    # loss and outputs
    fp32_outputs: Flag = False
    """Outputs become fp32 under mixed precision (accelerate's ConvertOutputsToFp32)."""
    keeps_outputs: Flag = False
    """The training loop holds the model's outputs, logits included, through backward."""
    transformers: Annotated[str, Field(pattern=r"^(\d+\.\d+)?$")] = ""
    """Release of transformers whose loss code runs, like 4.48; empty: 4.49 or newer."""

    reference_first: Flag = False
    """Pairs and distillation: the reference or teacher runs before the policy's forward. Others, TRL and
    what is built on it, run it after, while the policy's graph waits for its loss."""
    critic_apart: Flag = False
    """PPO's critic has an optimizer and a backward of its own (verl's critic worker)."""
    keeps_rollout_logits: Flag = False
    """PPO: the scores of every generated token stay on the GPU until the rollout is scored (TRL)."""
    grpo_temperature: Temperature = "none"
    """How full logits are divided by the sampling temperature: in-place on a slice, whose CopySlices
    node copies the gradient of all logits, or as a copy."""
    trace_step: TraceStep = "none"
    """Which step of profiler/subjects runs the same code, for a trace.

    own: this project's trainer. trl: its fused head. trl-full: its GRPO with full logits, and the HF
    Trainer's SFT. hf: the HF Trainer's SFT; hf-full: that too, unless a fused loss is asked for.
    """

    # rollout and start
    raise_batch_to_generations: Flag = False
    """GRPO's micro-batch is raised to a multiple of the generations."""
    generates_quantized: Flag = True
    """vLLM inside the trainer's process generates with a 4-bit policy."""
    sync_unit: Literal["tensor", "layer", "model"] = "tensor"
    """What of divided weights is whole at once on every rank while they are pushed to the engine."""
    merges_whole: Flag = False
    """Under ZeRO-3 adapters are merged into a model that is gathered all at once, and pushed then."""
    generates_gathered: Flag = False
    """Under ZeRO-3 all of the model is whole while transformers generate (ds3_gather_for_generation)."""
    syncs_adapters_alone: Flag = False
    """An engine that has the base gets nothing but adapters."""
    sync_bucket_bytes: Annotated[int, Field(ge=0, strict=True)] = 0
    """Bytes of a buffer that weights go to the engine through."""
    drops_renewed_weights: Flag = False
    """A pushed copy whose weights all come anew gives them back asleep (level 2), not into host memory."""
    generates_in_place: Flag = False
    """Generation by transformers has room for all tokens of its sequences from the start and writes each where it
    stays; elsewhere every layer's keys and values are copied to one token more (DynamicLayer.update)."""
    prefill_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """The transformers engine reads every prompt once, so many tokens at a time (trainer/engines/
    transformers.py); 0: `generate` reads the prompt of every completion, all of it at once."""
    generates_whole_batch: Flag = False
    """All sequences of a step are generated at once, those of gradient accumulation too."""
    generates_unfused: Flag = False
    """`fused` kernels are the training forward's: `generate` runs operation by operation (unsloth models/llama.py:
    LlamaModel_fast_forward_inference; models/vision.py: transformers' own modules)."""
    fsdp_keeps_dtype: Flag = False
    """FSDP holds trained weights in the dtype they were loaded in (verl's model_dtype); accelerate
    makes them fp32 under mixed precision."""
    fsdp2_first_pass_loads: Flag = False
    """FSDP2's root unit is gathered once while the model is loaded; a quantised base is whole on every GPU
    until then."""
    fsdp_loads_full: Flag = False
    """Under FSDP every rank loads the whole model before it is sharded."""
