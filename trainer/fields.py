"""Every field of a run file is honoured or refused by name: here are the refusals.

A recipe can say more than this trainer does (it plans other frameworks too). What it does not do, it does
not pass over: one line names the field, its value and what is allowed. tests/trainer/test_fields.py walks
all fields, so that a new one without an effect or a refusal fails.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from planner.errors import UnsupportedError, UsageError
from planner.models.spec import ModelSpec
from planner.run.compiling import SELECTIVE
from planner.run.recipe import (
    VLLM,
    BucketsSection,
    EngineKind,
    Loss,
    Method,
    OffloadSection,
    Optimizer,
    ParallelSection,
    Recipe,
    Reference,
    RunFile,
    Sharding,
    Task,
)
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
from planner.run.unread import unread

LOSSES = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo")
MATRIX = (Optimizer.ADAFACTOR, Optimizer.MUON)
"""Torch's own optimizers: they have neither masters nor state on the host, and betas of their own."""
NO_BETAS = (*MATRIX, Optimizer.SGD)
NO_EPS = (*NO_BETAS, Optimizer.SGD_MOMENTUM, Optimizer.LION, Optimizer.LION_8BIT)
_IN_PROCESS = ("kv_bytes", "max_num_seqs", "max_num_batched_tokens", "sleep_level", "cuda_graphs", "timeout_s", "kv_dtype", "block_size", "prefix_caching")  # fmt: skip
ENGINE_FIELDS: dict[EngineKind, tuple[str, ...]] = {
    EngineKind.TRANSFORMERS: ("max_num_seqs", "max_num_batched_tokens"),
    EngineKind.VLLM_SHARED: _IN_PROCESS,
    EngineKind.VLLM_PUSH: (*_IN_PROCESS, "tensor_parallel"),
    EngineKind.VLLM_SERVER: ("url", "timeout_s", "transfer"),
    EngineKind.NONE: (),
}
"""What each engine reads beside its kind."""
ENGINE_HINTS = {
    "gpu_memory_utilization": "leave it out: the KV cache is as large as the plan says, or kv_bytes",
    "kv_dtype": "leave it out: the cache has the policy's dtype (fp8: engine kinds vllm-shared, vllm-push)",
    "tensor_parallel": "1, or engine kind vllm-push: there as many neighbouring ranks are one engine",
    "pipeline_parallel": "1: the trainer generates on its own device",
    "data_parallel": "1: the trainer generates on its own device",
    "sync": "leave it out: weights go to the engine a layer at a time",
}
ONLY_GRPO = (
    "rewards", "sampling", "loss", "updates_per_rollout", "num_iterations", "share_prefix"
)  # fmt: skip
ONLY_SFT = ("loss_on", "padding_free", "neftune_alpha", "router_aux_loss_coef")
SFT_COLUMNS = ("completion_column", "messages_column", "text_column")
OTHER_DEGREES = ("tensor", "sequence", "pipeline", "schedule", "virtual_stages", "context", "context_kind", "expert", "expert_tensor")  # fmt: skip
SHARDED = (Sharding.NONE, Sharding.DDP, Sharding.FSDP2)
OTHER_TASKS = (
    "teacher", "teacher_placement", "teacher_top_k", "value_model", "reward_model", "negatives",
    "mini_batch",
)  # fmt: skip
"""Recipe fields of tasks that are planned and not trained here."""
DIFFERENCES = (
    "dtype", "autocast", "quantization", "master_weights", "adapter_dtype", "optimizer",
    "prompt_tokens", "completion_tokens", "sequences", "num_generations", "checkpointing", "attention",
    "loss", "tiled_mlp", "beta", "engine",
)  # fmt: skip
"""What decides memory and arithmetic, in Resolved's words."""


def refuse_unhonoured(run: RunFile, train: BaseModel) -> None:
    """Raise UnsupportedError or UsageError for the first field that the trainer would not act on."""
    recipe = run.recipe
    for name, value, allowed in _recipe(recipe):
        # no value of a field that the trainer never reads can be trained
        why = allowed.removeprefix("leave it out: ")
        hint = f"use {allowed}" if why == allowed else f"leave it out: {why}"
        raise UnsupportedError(f"{name}: {value} cannot be trained", hint=hint)
    if recipe.task is Task.GRPO or recipe.engine != type(recipe.engine)():
        _refuse_engine(recipe)
    _refuse_train(recipe, train)


def unread_notes(asked: Recipe, planned: Resolved) -> list[str]:
    """Return a line for the fields that a recipe sets and its run has no use for, such as lora.rank with method full.

    `asked`: as the file has it; what the trainer itself has settled since is nobody's wish.
    """
    notes = [note for note in planned.assumptions if note.startswith("lora.from")]
    return [f"recipe: {note}" for note in (*unread(asked, planned), *notes)]


def machine_note(run: RunFile, found: str) -> str:
    """Return a line when the run file names another machine than the one that it runs on; "" if none."""
    named = run.machine.gpu or run.machine.vram
    if named is None:
        return ""
    return f"machine: the file names {named}; this run is planned for what is here, {found}"


def loss_type(recipe: Recipe, asked: str, *, said: bool) -> str:
    """Return the policy loss of a run: `recipe.algorithm` names one too. Raises UsageError for two."""
    named = (recipe.algorithm or "").lower()
    if recipe.task is not Task.GRPO or named in ("", "grpo"):
        return asked
    if said and asked != named:
        raise UsageError(
            f"recipe.algorithm: {recipe.algorithm} and train.loss.type: {asked} contradict each other",
            hint="give one of them",
        )
    return named


def other_framework(spec: ModelSpec, recipe: Recipe, ours: Recipe, machine: Any) -> str:
    """Return what differs from the framework that the recipe names; "" where it is this one."""
    if recipe.framework.partition("==")[0] == "vramwise":
        return ""
    theirs, own = resolve(spec, recipe, machine), resolve(spec, ours, machine)
    different = [
        f"{name} {_word(getattr(theirs, name))} -> {_word(getattr(own, name))}"
        for name in DIFFERENCES
        if getattr(theirs, name) != getattr(own, name)
    ]
    return (
        f"framework {recipe.framework}: vramwise's own trainer runs, not {theirs.framework.name}; "
        f"what differs: {', '.join(different) or 'nothing that decides memory'}"
    )


def _recipe(recipe: Recipe) -> Iterator[tuple[str, Any, str]]:
    trained = recipe.dtype or "bf16"
    if recipe.method is not Method.FULL:
        trained = recipe.lora.dtype or trained
    algorithms = ("grpo", *LOSSES) if recipe.task is Task.GRPO else ("sft",)
    matrix = recipe.optimizer in MATRIX
    rules: tuple[tuple[str, bool, str], ...] = (
        ("algorithm", (recipe.algorithm or algorithms[0]).lower() not in algorithms, ", ".join(dict.fromkeys(algorithms))),
        ("quantization", recipe.method is not Method.QLORA and recipe.quantization not in (None, "none"), f"none with method {recipe.method}, or method qlora (nf4 or fp4)"),
        ("offload", recipe.offload != OffloadSection(), "leave it out: the trainer offloads layer inputs, and states by optimizer_offload"),
        ("entropy", recipe.entropy, "false: the trainer's entropy comes with its log-probabilities, without copies of logits"),
        ("images", recipe.images > 0, "0: the trainer trains on text alone"),
        ("videos", recipe.videos > 0, "0: the trainer trains on text alone"),
        ("image_size", recipe.image_size is not None, "leave it out: the trainer trains on text alone"),
        ("image_tokens", recipe.image_tokens is not None, "leave it out: the trainer trains on text alone"),
        ("video_frames", recipe.video_frames is not None, "leave it out: the trainer trains on text alone"),
        ("audio", recipe.audio > 0, "0: the trainer trains on text alone"),
        ("audio_seconds", recipe.audio_seconds is not None, "leave it out: the trainer trains on text alone"),
        ("loads", recipe.loads is not None, "leave it out: how ranks read weights is the trainer's own"),
        ("sharding", recipe.sharding not in SHARDED, "none, ddp or fsdp2: several GPUs are FSDP2's, each with all of the weights or a part"),
        *((f"parallel.{name}", getattr(recipe.parallel, name) != ParallelSection.model_fields[name].default, "leave it out: the trainer divides samples, weights and states over its ranks, by data_shard and data_replicate") for name in OTHER_DEGREES),
        ("accumulate_sync", recipe.accumulate_sync is False, "true: gradients are summed over ranks after every micro-batch"),
        ("bucket_views", recipe.bucket_views, "false: replicas are FSDP2's, without buckets"),
        ("buckets", recipe.buckets != BucketsSection(), "leave it out: the trainer does not run DeepSpeed"),
        ("mixed_precision", recipe.mixed_precision not in (None, "none"), "none: set dtype instead"),
        ("gradient_dtype", recipe.gradient_dtype not in (None, trained), f"{trained}: a gradient has its weight's dtype"),
        ("optimizer_in_backward", recipe.optimizer_in_backward, "false: the norm of all gradients is clipped before the step"),
        ("optimizer_offload", recipe.optimizer_offload and matrix, "false with adafactor and muon, or adamw"),
        ("master_weights", bool(recipe.master_weights) and (matrix or trained == "fp32"), "false: fp32 weights are their own masters"),
        ("loss", recipe.loss is Loss.FULL, "chunked: the trainer never makes full logits"),
        ("compile", recipe.compile, "false"),
        ("evaluation", recipe.evaluation != type(recipe.evaluation)(), "leave it out: train.validation says when and on what"),
        *((name, getattr(recipe, name) is not None, "leave it out: other tasks have it") for name in OTHER_TASKS),
        ("save", recipe.save != "none", "none: train.save_every writes checkpoints"),
        ("resume", recipe.resume, "false: vramwise train RUN.yaml --resume goes on with one"),
        ("compile_loss", bool(recipe.compile_loss), "false"),
        ("float8", recipe.float8 is not None, "leave it out: the trainer multiplies in 16 or 32 bits"),
        ("float8_all_gather", recipe.float8_all_gather, "false"),
        ("checkpointing", recipe.checkpointing in SELECTIVE, "none, full, every-k or offload"),
        ("experts_implementation", recipe.experts_implementation not in (None, "grouped_mm"), "grouped_mm, transformers' own choice"),
        ("expert_capacity_factor", recipe.expert_capacity_factor is not None, "leave it out: the experts take all tokens"),
        ("reference", recipe.reference not in (None, Reference.NONE, Reference.ADAPTER_OFF), "adapter-off"),
        ("reference", bool(recipe.beta) and recipe.reference is Reference.NONE, "adapter-off, or beta: 0"),
        ("beta", bool(recipe.beta) and recipe.method is Method.FULL, "0 with method full: its reference would be a second copy; adapters need none"),
    )  # fmt: skip
    for name, wrong, allowed in rules:
        if wrong:
            yield f"recipe.{name}", attrgetter(name)(recipe), allowed
    if recipe.method is not Method.FULL:
        yield from _lora(recipe)


def _lora(recipe: Recipe) -> Iterator[tuple[str, Any, str]]:
    """Kinds of adapters that don't go together, or not with an engine."""
    lora, kind = recipe.lora, recipe.engine.kind
    pissa, shared = lora.init.startswith("pissa"), kind is EngineKind.VLLM_SHARED
    bias = lora.bias != "none"
    rules: tuple[tuple[str, bool, str], ...] = (
        ("init", pissa and recipe.method is Method.QLORA, "default with qlora: PiSSA starts from the singular vectors of weights that are not quantised yet; or method: lora"),
        ("init", pissa and lora.dora, "default with dora"),
        ("init", pissa and bool(lora.target_parameters), "default with target_parameters: PiSSA decomposes linear layers"),
        ("init", pissa and shared, "engine kind vllm-push or transformers: PiSSA changes the base's weights, which vllm-shared loads later"),
        ("modules_to_save", bool(lora.modules_to_save) and shared, "engine kind vllm-push or transformers: whole modules are trained beside the shared weights"),
        ("target_parameters", bool(lora.target_parameters) and kind in VLLM, "engine kind transformers: vLLM lays experts out its own way"),
        ("target_parameters", bool(lora.target_parameters) and lora.dropout > 0, "dropout: 0 with target_parameters: PEFT adds the adapters to the weights"),
        ("bias", bias and shared and bool(recipe.beta), "beta: 0 with vllm-shared, or engine kind vllm-push: its reference would need the biases as they were"),
    )  # fmt: skip
    for name, wrong, allowed in rules:
        if wrong:
            value = getattr(lora, name)
            yield (
                f"recipe.lora.{name}",
                ", ".join(value) if isinstance(value, tuple) else value,
                allowed,
            )


def _refuse_engine(recipe: Recipe) -> None:
    """Raise UnsupportedError for an engine setting that the engine of the run would not see."""
    engine = recipe.engine
    kind = engine.kind or EngineKind.TRANSFORMERS
    if recipe.task is Task.SFT:
        kind = EngineKind.NONE
        if engine.kind not in (None, EngineKind.NONE):
            raise UnsupportedError(
                f"recipe.engine.kind: {engine.kind} has no part in sft", hint="leave it out"
            )
    for name in _changed(engine):
        value = getattr(engine, name)
        own_dtype = name == "kv_dtype" and value == (recipe.dtype or "bf16")
        if (
            name == "kind"
            or name in ENGINE_FIELDS[kind]
            or (own_dtype and recipe.task is Task.GRPO)
        ):
            continue
        raise UnsupportedError(
            f"recipe.engine.{name}: {value} has no effect with "
            f"{'task sft' if recipe.task is Task.SFT else f'engine kind {kind}'}",
            hint=ENGINE_HINTS.get(
                name,
                "set it where the server is started"
                if kind is EngineKind.VLLM_SERVER
                else "leave it out",
            ),
        )


def _refuse_train(recipe: Recipe, train: Any) -> None:
    task = recipe.task
    for name, said in (("neftune", "neftune_alpha"), ("router_loss", "router_aux_loss_coef")):
        wanted, value = getattr(recipe, name), getattr(train, said)
        if name in recipe.model_fields_set and wanted is not None and wanted != bool(value):
            raise UsageError(
                f"recipe.{name}: {str(wanted).lower()}, but train.{said} is {value}",
                hint=f"set train.{said} and leave recipe.{name} out",
            )
    useless = ONLY_GRPO if task is Task.SFT else ONLY_SFT
    for name in _changed(train):
        if name in useless and getattr(train, name):
            raise UsageError(f"train.{name}: has no effect with task {task}", hint="leave it out")
    dataset = train.dataset
    for name in _changed(dataset):
        if task is Task.GRPO and name in SFT_COLUMNS:
            raise UsageError(
                f"train.dataset.{name}: has no effect with task {task}", hint="leave it out"
            )
        file = dataset.name.endswith((".jsonl", ".json", ".csv", ".parquet"))
        if name in ("split", "config") and (file or dataset.name == "arithmetic"):
            raise UsageError(
                f"train.dataset.{name}: {getattr(dataset, name)!r} has no effect on {dataset.name}",
                hint="leave it out: only hub data sets and folders have one",
            )
    kind = recipe.optimizer
    for name, without in (("adam_betas", NO_BETAS), ("adam_eps", NO_EPS)):
        if name in _changed(train) and kind in without:
            raise UsageError(
                f"train.{name}: {getattr(train, name)} has no effect with optimizer {kind}",
                hint="leave it out",
            )
    if train.lora_alpha is not None and recipe.lora.start_from is not None:
        raise UsageError(
            f"train.lora_alpha: {train.lora_alpha:g} has no effect with recipe.lora.from: the adapter has "
            "its own",
            hint="leave it out",
        )
    if train.lora_alpha is not None and recipe.method is Method.FULL:
        raise UsageError(
            f"train.lora_alpha: {train.lora_alpha:g} has no effect with method full",
            hint="leave it out",
        )
    if task is not Task.GRPO:
        return
    loss = train.loss
    own = recipe.engine.kind in (None, EngineKind.TRANSFORMERS)
    for name, section in (
        ("sampling", train.sampling),
        ("evaluation.sampling", train.evaluation.sampling),
    ):
        if section is not None:
            _refuse_sampling(f"train.{name}", section, own=own)
    own = own and not train.sampling.off_policy
    for name in _changed(loss):
        useless_here = (
            (own and name in ("is_correction", "is_mode", "is_cap"), "the policy itself samples"),
            (name == "delta" and loss.type == "cispo", "type is cispo"),
            (name == "epsilon" and loss.type == "cispo", "type is cispo: epsilon_high is its cap"),
        )
        for useless_now, why in useless_here:
            if useless_now:
                raise UsageError(
                    f"train.loss.{name}: {getattr(loss, name)} has no effect: {why}",
                    hint="leave it out",
                )


def _refuse_sampling(path: str, section: Any, *, own: bool) -> None:
    """Refuse a grammar that the engine has not, and two of them."""
    if section.guided_regex is not None and section.guided_json is not None:
        raise UsageError(
            f"{path}.guided_regex: {section.guided_regex!r} and guided_json contradict each other",
            hint="give one of them",
        )
    name = "guided_regex" if section.guided_regex is not None else "guided_json"
    if own and section.guided:
        raise UnsupportedError(
            f"{path}.{name}: {getattr(section, name)!r} has no effect with engine kind transformers",
            hint="engine kind vllm-push, vllm-shared or vllm-server",
        )


def _changed(section: BaseModel) -> list[str]:
    """Return the fields that somebody set to something else than their default, in order."""
    fields = type(section).model_fields
    return [
        name
        for name in fields
        if name in section.model_fields_set
        and getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def _word(value: Any) -> str:
    return str(value) if value not in ("", None) else "none"
