"""Recipe + framework defaults -> Resolved: every choice made, nothing left at None."""

from dataclasses import dataclass, replace
from typing import Any

from planner.dtypes import TRAIN_DTYPES, normal_dtype
from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.mixers.registry import mixer_of
from planner.models.spec import ModelSpec
from planner.quant.table import BITSANDBYTES
from planner.run.base_scheme import base_scheme
from planner.run.companions import Companion, companions
from planner.run.compiling import compile_fields, compiled_law
from planner.run.engine_choices import choose, engine_fields, engine_kind, four_bit_refusal
from planner.run.experts import expert_fields
from planner.run.framework import fallback_note, pick
from planner.run.framework_files import Framework, common_laws
from planner.run.image_fields import image_fields, image_notes, sees_images_whole
from planner.run.logits_law import LogitsLaw
from planner.run.lora_fields import lora_fields, with_start
from planner.run.parallel import Layout, layout_of, refuse_unplanned
from planner.run.pipeline import Stage
from planner.run.placement import Placement, offloaded, place
from planner.run.positions import context_notes
from planner.run.recipe import (
    Attention,
    BucketsSection,
    Checkpointing,
    EngineKind,
    Float8,
    Loss,
    Method,
    OffloadSection,
    Optimizer,
    Recipe,
    Reference,
    Sharding,
    Task,
)
from planner.run.switches import Switches
from planner.run.task_fields import (
    Column,
    lifecycle_fields,
    pair_fields,
    refuse_foreign,
    sequences_of,
)
from planner.run.tasks import DEFAULT_BETA, TASKS, Head, planned_task
from planner.run.train_bytes import beside
from planner.run.unread import unread
from planner.run.zero import STAGES, Zero, check, zero


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
    expert_parallel: bool
    engine_offload_bytes: int
    """Of one GPU's weights, in host memory."""
    max_loras: int
    max_lora_rank: int
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
    def compute_dtype(self) -> str:
        """dtype inside linears and attention."""
        return self.autocast or self.dtype


def _padded(recipe: Recipe, switches: Switches, sequences: int) -> bool:
    """Return whether a mask goes to attention beside the tokens."""
    if switches.mask == "padding":
        return sequences > 1 and not recipe.packing
    if switches.mask == "packed":
        return bool(recipe.packing)
    return switches.mask == "always"


def _tiled(recipe: Recipe, switches: Switches, defaults: dict[str, Any]) -> bool:
    """Return whether layers run in tiles of tokens; some frameworks do beside checkpointing."""
    if recipe.tiled_mlp is not None:
        return recipe.tiled_mlp
    checkpointing = choose(recipe.checkpointing, defaults, "checkpointing", "none")
    return switches.tiles_by_default and checkpointing != "none"


def resolve(model: ModelSpec, recipe: Recipe, machine: Machine) -> Resolved:
    """Return the recipe with the framework's defaults filled in.

    Raises UsageError for contradictions, UnsupportedError for what the model cannot express.
    """
    task = planned_task(recipe)
    if task is not recipe.task:
        recipe = recipe.model_copy(update={"task": task})
    refuse_foreign(recipe, task)
    recipe, started = with_start(model, recipe)
    framework = _on_card(pick(recipe.framework), machine)
    switches = framework.switches_of(task.value)
    defaults = framework.task_defaults(task.value)
    notes = [*filter(None, [fallback_note(framework, recipe.framework)]), *started]
    trains = task is not Task.SERVE
    layout = layout_of(model, recipe, machine.num_gpus, switches.tensor_plan)
    refuse_unplanned(model, recipe, layout, framework)
    dtype, autocast = _dtypes(model, recipe, defaults)
    deepspeed = _by_deepspeed(recipe, machine)
    if deepspeed:  # its engine casts the module, and nothing runs in autocast
        dtype, autocast = autocast or dtype, ""
    quantization = base_scheme(model, recipe, framework, trains=trains, notes=notes)
    prompt, completion = _lengths(model, recipe, defaults, notes)
    generations = choose(recipe.num_generations, defaults, "num_generations", 1)
    batch = _batch(recipe, framework, defaults, generations, notes)
    pairs = pair_fields(recipe, task, batch, prompt, completion)
    sequences = sequences_of(task, pairs["at_once"], pairs["negatives"])
    if pairs["columns"]:
        prompt, completion = 0, max(column.tokens for column in pairs["columns"])
    loss = Loss(choose(recipe.loss, defaults, "loss", "full"))
    compiled = compile_fields(recipe, framework, machine)
    engine = engine_kind(recipe, defaults)
    pictures = image_fields(model, recipe)
    notes.extend(image_notes(model, pictures, prompt + completion))
    notes.extend(context_notes(model, prompt + completion, engine))
    if task is Task.GRPO and not switches.generates_quantized:
        refused = four_bit_refusal(engine, recipe.method)
        notes.extend([f"{framework.title} refuses this run: {refused}"] if refused else [])
    beta = float(choose(recipe.beta, defaults, "beta", DEFAULT_BETA.get(task, 0.0)))
    reference = _reference(recipe, task, beta)
    if trains:
        if layout.data_replicate == machine.num_gpus > 1 and recipe.sharding is Sharding.NONE:
            notes.append(
                f"{machine.num_gpus} GPUs without --shard: a whole copy on each, nothing is divided; "
                "--shard fsdp2 divides weights, gradients and states"
            )
        notes.extend(_kernel_notes(model))
        if quantization in BITSANDBYTES and model.model_type in OWN_LINEAR:
            notes.append(
                f"{model.model_type}: counted as quantised; transformers 5 quantises nn.Linear only, "
                "not this model's own class, and then keeps these weights at full width"
            )
    if recipe.neftune and task is Task.SFT:
        notes.append(
            "neftune: its noise lives before the first layer, most often below the largest layer"
        )
    # torchtitan's apply_fsdp with pp_enabled: units stay gathered, and torch's stage reduces once a step
    staged = layout.pipeline > 1 and recipe.sharding is Sharding.FSDP2
    resolved = Resolved(
        task=task,
        algorithm=recipe.algorithm or task.value,
        method=recipe.method,
        framework=framework,
        framework_asked=recipe.framework,
        switches=switches,
        trains=trains,
        dtype=dtype,
        autocast=autocast if trains else "",
        quantization=quantization,
        double_quant=bool(choose(recipe.double_quant, defaults, "double_quant", True)),
        master_weights=_master(recipe, switches, dtype, deepspeed=deepspeed),
        gradient_dtype=normal_dtype(
            recipe.gradient_dtype or ("fp32" if switches.gradient_buffers else dtype),
            field="gradient_dtype",
        ),
        **lora_fields(recipe, switches, quantization, dtype, reference),
        **expert_fields(model, machine, recipe, framework, notes),
        optimizer=Optimizer(choose(recipe.optimizer, defaults, "optimizer", "adamw")),
        optimizer_offload=recipe.optimizer_offload,
        offload=_offload(recipe, trains),
        optimizer_in_backward=recipe.optimizer_in_backward,
        sequences=sequences,
        **pairs,
        **lifecycle_fields(recipe, defaults, trains=trains),
        companions=companions(model, recipe, task, reference),
        # GradCache adds up the gradients of its mini-batches
        grad_accum=recipe.gradient_accumulation * -(-batch // pairs["at_once"]),
        prompt_tokens=prompt,
        completion_tokens=completion,
        num_generations=generations,
        **pictures,
        packing=bool(recipe.packing),
        padded=trains
        and (_padded(recipe, switches, sequences) or sees_images_whole(model, recipe)),
        checkpointing=Checkpointing(
            choose(recipe.checkpointing, defaults, "checkpointing", "none")
        ),
        checkpoint_every=recipe.checkpoint_every,
        keep_layers=recipe.offload_keep_layers,
        attention=_attention(model, recipe, defaults, notes),
        loss=loss,
        law=_law(
            framework,
            task,
            loss,
            autocast,
            compiled=compiled["compiled_loss"],
            parallel=layout.tensor > 1,
        ),
        loss_chunk_rows=recipe.loss_chunk_rows or 0,
        entropy=bool(recipe.entropy) and trains,
        tiled_mlp=_tiled(recipe, switches, defaults),
        **beside(model, recipe, switches),
        beta=beta,
        reference=reference,
        sharding=recipe.sharding,
        loads=recipe.loads or "",
        zero=_zero(model, recipe, framework),
        layout=layout,
        reshard_after_forward=not staged
        if recipe.reshard_after_forward is None
        else recipe.reshard_after_forward,
        reduce_dtype=_reduced(recipe, defaults),
        accumulate_sync=recipe.accumulate_sync
        if recipe.accumulate_sync is not None
        else not (switches.skips_sync or staged),
        bucket_views=recipe.bucket_views,
        gpus=machine.num_gpus,
        node_gpus=machine.node_gpus,
        stage=Stage(),
        **compiled,
        engine=engine,
        **engine_fields(
            model,
            machine,
            recipe,
            framework,
            dtype,
            engine,
            most=max(sequences, generations),
            max_len=prompt + completion,
        ),
        assumptions=tuple(notes),
    )
    ignored = unread(recipe, resolved)
    return replace(resolved, assumptions=(*notes, *ignored)) if ignored else resolved


NO_SDPA = frozenset({"gpt_oss", "deepseek_v4"})
"""Families that transformers runs in eager attention when SDPA is asked for (_supports_sdpa = False)."""


def _attention(
    model: ModelSpec, recipe: Recipe, defaults: dict[str, Any], notes: list[str]
) -> Attention:
    """Return the attention that runs."""
    asked = Attention(choose(recipe.attention, defaults, "attention", "sdpa"))
    trains = recipe.task is not Task.SERVE
    if asked is Attention.SDPA and trains and model.model_type in NO_SDPA:
        notes.append(f"transformers has no SDPA for {model.model_type}: planned in eager attention")
        return Attention.EAGER
    return asked


OWN_LINEAR = frozenset({"falcon"})
"""Families whose linears are a subclass: integrations/bitsandbytes.py compares the exact type."""


def _kernel_notes(model: ModelSpec) -> list[str]:
    """Return what the plan takes for granted of recurrent layers, and which way it errs if not."""
    assumed = {mixer_of(mixer).assumes for layer in model.layers for mixer in layer.mixers}
    return [
        f"recurrent layers run with the fused kernels of {packages}; without them the reference "
        "code keeps several times the activations, and this plan is too low"
        for packages in sorted(assumed - {""}, reverse=True)
    ]


def _reduced(recipe: Recipe, defaults: dict[str, Any]) -> str:
    """Return the dtype in which FSDP2 reduces gradients; empty: their own."""
    name = choose(recipe.reduce_dtype, defaults, "reduce_dtype", "")
    found = normal_dtype(name, field="reduce_dtype") if name else ""
    if found not in ("", "fp32", "bf16", "fp16"):
        raise UsageError(f"reduce_dtype: {name!r}", hint="fp32, bf16 or fp16")
    return found


def _offload(recipe: Recipe, trains: bool) -> OffloadSection:
    """Return what is offloaded; raises UsageError for what no engine does."""
    asked, sharding = recipe.offload, recipe.sharding
    if not trains:
        return OffloadSection()
    if asked.parameters and sharding not in (Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP2):
        raise UsageError(
            f"offload.parameters: {sharding.value} does not offload weights",
            hint="zero3, fsdp or fsdp2",
        )
    moved = recipe.optimizer_offload or asked.parameters
    if asked.device == "nvme" and moved and sharding is not Sharding.ZERO3:
        raise UsageError(
            f"offload.device: {sharding.value} does not swap to nvme", hint="zero3, or cpu"
        )
    return asked


def _zero(model: ModelSpec, recipe: Recipe, framework: Framework) -> Zero | None:
    """Return DeepSpeed's buffers; raises UsageError for buckets of a scheme without them."""
    check(recipe.sharding, recipe.buckets)
    sharding = recipe.sharding
    if framework.switches.offloads_by == "deepspeed" and recipe.optimizer_offload:
        sharding = sharding if sharding in STAGES else Sharding.ZERO2  # one GPU, offloaded by ZeRO
    preset = framework.deepspeed.get(sharding.value, BucketsSection())
    return zero(sharding, recipe.buckets, preset, model.hidden)


def _by_deepspeed(recipe: Recipe, machine: Machine) -> bool:
    """Return whether DeepSpeed runs the step, with 16-bit weights and fp32 copies of its own."""
    return recipe.sharding in STAGES and machine.num_gpus > 1 and recipe.task is not Task.SERVE


def _master(recipe: Recipe, switches: Switches, dtype: str, *, deepspeed: bool) -> bool:
    """Return whether the optimizer keeps an fp32 copy of what is trained."""
    if recipe.master_weights is not None:
        return recipe.master_weights
    if deepspeed:
        return True
    if recipe.task is Task.SERVE or not switches.master_weights:
        return False
    if recipe.method is Method.FULL and dtype == "bf16":
        # our own trainer rounds bf16 weights stochastically instead of keeping a master
        return switches.master_weights_full_bf16
    return True


def _on_card(framework: Framework, machine: Machine) -> Framework:
    """Return the law that runs on this card: some releases have another engine for old ones."""
    major = machine.gpu.compute_capability.partition(".")[0] if machine.gpu else ""
    fallback = framework.engine.before_ampere
    older = major.isdigit() and int(major) < AMPERE
    return pick(fallback) if fallback and older else framework


AMPERE = 8
"""Compute capability of the first Ampere cards."""


def _dtypes(model: ModelSpec, recipe: Recipe, defaults: dict[str, Any]) -> tuple[str, str]:
    name = choose(recipe.dtype, defaults, "dtype", "bf16")
    dtype = normal_dtype(model.checkpoint_dtype if name == "checkpoint" else name)
    if name == "checkpoint" and dtype == "fp32" and recipe.task is Task.SERVE:
        dtype = "bf16"  # vLLM's dtype "auto" loads fp32 checkpoints in 16 bit (config/model.py)
    if dtype not in TRAIN_DTYPES:
        if recipe.dtype is not None:
            raise UsageError(
                f"dtype: {recipe.dtype!r} is not a dtype weights are computed in",
                hint=f"one of {', '.join(TRAIN_DTYPES)}; quantised bases go in quantization",
            )
        dtype = "bf16"
    mixed = choose(recipe.mixed_precision, defaults, "mixed_precision", "none")
    autocast = "" if mixed in ("none", "no", "") else normal_dtype(mixed, field="mixed_precision")
    if autocast not in ("", "bf16", "fp16"):
        raise UsageError(f"mixed_precision: {mixed!r}", hint="none, bf16 or fp16")
    return dtype, autocast


def _lengths(
    model: ModelSpec, recipe: Recipe, defaults: dict[str, Any], notes: list[str]
) -> tuple[int, int]:
    prompt, completion, context = recipe.prompt_length, recipe.completion_length, recipe.context
    if recipe.task is Task.EMBED:  # a query and a document, each a text of its own
        usual = context or completion or prompt or int(defaults.get("context", 512))
        return prompt or 0, completion or usual
    if context is not None:
        if prompt is not None and completion is not None and prompt + completion != context:
            raise UsageError(
                f"context: {context} is not prompt_length {prompt} + completion_length {completion}",
                hint="give context or the two lengths",
            )
        if prompt is not None:
            if prompt >= context:
                raise UsageError(
                    f"prompt_length: {prompt} leaves no completion in context {context}"
                )
            return prompt, context - prompt
        if completion is not None:
            if completion > context:
                raise UsageError(f"completion_length: {completion} is more than context {context}")
            return context - completion, completion
        if TASKS[recipe.task].reference or recipe.task in (Task.ORPO, Task.SIMPO):
            notes.append("all of the context counts as completion: the worst case for the loss")
        return 0, context
    if prompt is None and completion is None:
        if "context" in defaults:
            usual = int(defaults["context"])
            if usual <= (model.longest or usual):
                return 0, usual
            notes.append(
                f"context: {model.longest:,}, all that {model.name or 'the model'} was made for"
            )
            return 0, model.longest
        return int(defaults.get("prompt_length", 512)), int(defaults.get("completion_length", 512))
    one_text = (Task.SFT, Task.DISTILL, Task.RERANK, Task.REWARD)
    if recipe.task in one_text and (prompt is None or completion is None):
        return prompt or 0, completion or 0 if completion else (0 if prompt else 1024)
    return (
        prompt if prompt is not None else int(defaults.get("prompt_length", 512)),
        completion if completion is not None else int(defaults.get("completion_length", 512)),
    )


def _batch(
    recipe: Recipe,
    framework: Framework,
    defaults: dict[str, Any],
    generations: int,
    notes: list[str],
) -> int:
    rows: int = choose(recipe.micro_batch_size, defaults, "micro_batch_size", 1)
    switches = framework.switches_of(recipe.task.value)
    if recipe.task is Task.GRPO and switches.raise_batch_to_generations and rows % generations:
        notes.append(f"{framework.name} raises the batch from {rows} to {generations} generations")
        return generations
    return rows


def _reference(recipe: Recipe, task: Task, beta: float) -> Reference:
    if not TASKS[task].reference:
        return Reference.NONE
    if recipe.reference is not None:
        return recipe.reference
    if beta == 0:
        return Reference.NONE
    return Reference.SEPARATE if recipe.method is Method.FULL else Reference.ADAPTER_OFF


PARALLEL = "parallel"
"""What a framework's law of a loss over divided columns adds to its name."""


def _law(
    framework: Framework,
    task: Task,
    loss: Loss,
    autocast: str,
    *,
    compiled: bool,
    parallel: bool,
) -> LogitsLaw:
    head = TASKS[task].head
    if head is not Head.VOCABULARY:
        return common_laws()[head.value]
    kind, switches = loss.value, framework.switches_of(task.value)
    if compiled:
        return compiled_law(framework, task, kind)
    if parallel and f"{kind}-{PARALLEL}" in framework.logits:
        return framework.logits[f"{kind}-{PARALLEL}"]
    if autocast and switches.fp32_outputs and loss is Loss.FULL:
        kind = "full-fp32"
    return framework.law(task.value, kind)
