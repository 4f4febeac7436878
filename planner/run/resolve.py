"""Recipe + framework defaults -> Resolved: every choice made, nothing left at None."""

from dataclasses import replace

from planner.dtypes import normal_dtype
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.quant.table import BITSANDBYTES
from planner.run.base_scheme import base_scheme
from planner.run.choices import (
    OWN_LINEAR,
    attention_of,
    batch_of,
    by_deepspeed,
    checkpointing_of,
    dtypes,
    has_master,
    kernel_notes,
    law_of,
    lengths,
    offload_of,
    on_card,
    padded,
    reduced,
    reference_of,
    tiled,
    zero_of,
)
from planner.run.companions import companions
from planner.run.compiling import compile_fields
from planner.run.engine_choices import choose, engine_fields, engine_kind, four_bit_refusal
from planner.run.experts import expert_fields
from planner.run.framework import fallback_note, pick, without_task
from planner.run.image_fields import image_fields, image_notes, sees_images_whole
from planner.run.lora_fields import lora_fields, with_start
from planner.run.parallel import layout_of, refuse_unplanned
from planner.run.pipeline import Stage
from planner.run.positions import context_notes
from planner.run.recipe import (
    Loss,
    Optimizer,
    Recipe,
    Sharding,
    Task,
)
from planner.run.resolved import Resolved
from planner.run.task_fields import (
    lifecycle_fields,
    pair_fields,
    refuse_foreign,
    sequences_of,
)
from planner.run.tasks import DEFAULT_BETA, planned_task
from planner.run.train_bytes import beside
from planner.run.unread import unread


def resolve(model: ModelSpec, recipe: Recipe, machine: Machine) -> Resolved:
    """Return the recipe with the framework's defaults filled in.

    Raises UsageError for contradictions, UnsupportedError for what the model cannot express.
    """
    task = planned_task(recipe)
    if task is not recipe.task:
        recipe = recipe.model_copy(update={"task": task})
    refuse_foreign(recipe, task)
    recipe, started = with_start(model, recipe)
    framework = on_card(pick(recipe.framework), machine)
    switches = framework.switches_of(task.value)
    defaults = framework.task_defaults(task.value)
    said = (fallback_note(framework, recipe.framework), without_task(framework, task))
    notes = [*filter(None, said), *started]
    trains = task is not Task.SERVE
    layout = layout_of(model, recipe, machine.num_gpus, switches.tensor_plan)
    refuse_unplanned(model, recipe, layout, framework)
    dtype, autocast = dtypes(model, recipe, framework, machine)
    deepspeed = by_deepspeed(recipe, machine)
    if deepspeed:  # its engine casts the module, and nothing runs in autocast
        dtype, autocast = autocast or dtype, ""
    quantization = base_scheme(model, recipe, framework, trains=trains, notes=notes)
    prompt, completion = lengths(model, recipe, defaults, notes)
    generations = choose(recipe.num_generations, defaults, "num_generations", 1)
    batch = batch_of(recipe, framework, defaults, generations, notes)
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
    reference = reference_of(recipe, task, beta)
    if trains:
        if layout.data_replicate == machine.num_gpus > 1 and recipe.sharding is Sharding.NONE:
            notes.append(
                f"{machine.num_gpus} GPUs without --shard: a whole copy on each, nothing is divided; "
                "--shard fsdp2 divides weights, gradients and states"
            )
        if layout.pipeline > recipe.gradient_accumulation:
            notes.append(
                f"{layout.pipeline} pipeline stages wait for each other at {recipe.gradient_accumulation} "
                "micro-batch(es) a step (--grad-accum); more of them are in flight at once, and held, up to "
                f"{layout.pipeline} on the first stage"
            )
        notes.extend(kernel_notes(model))
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
        master_weights=has_master(recipe, switches, dtype, deepspeed=deepspeed),
        gradient_dtype=normal_dtype(
            recipe.gradient_dtype or ("fp32" if switches.gradient_buffers else dtype),
            field="gradient_dtype",
        ),
        **lora_fields(recipe, switches, quantization, dtype, reference),
        **expert_fields(model, machine, recipe, framework, notes),
        optimizer=Optimizer(choose(recipe.optimizer, defaults, "optimizer", "adamw")),
        optimizer_offload=recipe.optimizer_offload and not machine.cpu,
        offload=offload_of(recipe, trains),
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
        padded=trains and (padded(recipe, switches, sequences) or sees_images_whole(model, recipe)),
        checkpointing=checkpointing_of(recipe, defaults, machine),
        checkpoint_every=recipe.checkpoint_every,
        keep_layers=recipe.offload_keep_layers,
        attention=attention_of(model, recipe, defaults, notes),
        loss=loss,
        law=law_of(
            framework,
            task,
            loss,
            autocast,
            compiled=compiled["compiled_loss"],
            parallel=layout.tensor > 1,
        ),
        loss_chunk_rows=recipe.loss_chunk_rows or 0,
        entropy=bool(recipe.entropy) and trains,
        tiled_mlp=tiled(recipe, switches, defaults),
        **beside(model, recipe, switches),
        beta=beta,
        reference=reference,
        sharding=recipe.sharding,
        loads=recipe.loads or "",
        zero=zero_of(model, recipe, framework),
        layout=layout,
        reshard_after_forward=not staged
        if recipe.reshard_after_forward is None
        else recipe.reshard_after_forward,
        reduce_dtype=reduced(recipe, defaults),
        accumulate_sync=recipe.accumulate_sync
        if recipe.accumulate_sync is not None
        else not (switches.skips_sync or staged),
        bucket_views=recipe.bucket_views,
        gpus=machine.num_gpus,
        node_gpus=machine.node_gpus,
        cpu=machine.cpu,
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
