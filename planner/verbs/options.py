"""The flags that `plan`, `compare` and `advise` share, and the run they describe."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import UsageError
from planner.names import METHOD_WORDS, OPTIMIZER_WORDS, TASK_WORDS, word_of
from planner.verbs.completed import COMPLETED
from planner.verbs.serving import put_length, with_auto_length
from planner.verbs.typed import count, is_command, is_run_file, own_command, read_input

if TYPE_CHECKING:
    from planner.importers import Imported
    from planner.machines.machine import Machine
    from planner.models.spec import ModelSpec
    from planner.run.recipe import RunFile

_COUNT = "count"
"""A flag that takes 8192, 8,192 and 8k."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RUN_SUFFIXES = (".yaml", ".yml")
_RUN, _SIZE, _HOW, _ENGINE = "Run", "Sizes", "How it is computed", "Generation"
_SPREAD = "Several GPUs"


def print_json(document: Any) -> None:
    """Print one JSON document, indented."""
    typer.echo(json.dumps(document, indent=2))


def _option(annotation: Any, flag: str, text: str, panel: str) -> Any:
    if annotation is _COUNT:
        parsed = typer.Option(
            flag, help=text, rich_help_panel=panel, parser=partial(count, flag), metavar="INTEGER"
        )
        return Annotated[int | None, parsed]
    known = COMPLETED.get(flag)
    return Annotated[
        annotation, typer.Option(flag, help=text, rich_help_panel=panel, autocompletion=known)
    ]


OPTIONS: dict[str, Any] = {
    "gpu": _option(str | None, "--gpu", "GPU name, for example h100, rtx-4090, a100-40gb.", _RUN),
    "gpus": _option(int | None, "--gpus", "How many of them.", _RUN),
    "nodes": _option(int | None, "--nodes", "Hosts they are in; as few as hold eight each if not said.", _RUN),
    "vram": _option(str | None, "--vram", "Memory torch sees, instead of or on top of --gpu: 24GiB.", _RUN),
    "host_ram": _option(str | None, "--host-ram", "Host memory, for example 64GiB.", _RUN),
    "task": _option(str | None, "--task", "sft, grpo, dpo, kto, orpo, simpo, reward, ppo, distill, embed, rerank or serve.", _RUN),
    "method": _option(str | None, "--method", "full, lora or qlora.", _RUN),
    "framework": _option(str | None, "--framework", "vramwise, trl, trl==1.9, unsloth, hf-trainer ...", _RUN),
    "framework_version": _option(str | None, "--framework-version", "Of the framework: 1.9, 0.18.2.", _RUN),
    "revision": _option(str | None, "--revision", "Revision of a hub model.", _RUN),
    "offline": _option(bool, "--offline", "Read nothing from the network.", _RUN),
    "token": _option(str | None, "--token", "Of the hub, for gated models; HF_TOKEN if not said.", _RUN),
    "tool": _option(str | None, "--tool", "Which tool a config is of, where its content does not tell.", _RUN),
    "tool_version": _option(str | None, "--tool-version", "Version of the tool whose config is given.", _RUN),
    "model": _option(str | None, "--model", "Of a config that does not say it, or whose path is another machine's.", _RUN),
    "variant": _option(str | None, "--variant", "Of a vLLM recipe: name, or name:hardware.", _RUN),
    "launch": _option(Path | None, "--launch", "accelerate or DeepSpeed file of the run.", _RUN),
    "batch_size": _option(int | None, "--batch-size", "Sequences in one forward pass on one GPU.", _SIZE),
    "grad_accum": _option(int | None, "--grad-accum", "Micro-batches before a step.", _SIZE),
    "prompt_length": _option(_COUNT, "--prompt-length", "Tokens of a prompt.", _SIZE),
    "completion_length": _option(_COUNT, "--completion-length", "Tokens of a completion.", _SIZE),
    "context": _option(_COUNT, "--context", "Prompt and completion together.", _SIZE),
    "generations": _option(int | None, "--generations", "Completions for every prompt (GRPO).", _SIZE),
    "images": _option(int | None, "--images", "Images of one sample; their tokens are part of the context.", _SIZE),
    "image_size": _option(str | None, "--image-size", "Width x height: 1024x768; a video's frames too.", _SIZE),
    "image_tokens": _option(_COUNT, "--image-tokens", "Tokens of one image, instead of its size.", _SIZE),
    "videos": _option(int | None, "--videos", "Videos of one sample.", _SIZE),
    "video_frames": _option(int | None, "--video-frames", "Frames of one video.", _SIZE),
    "audio": _option(int | None, "--audio", "Sounds of one sample; their tokens are part of the context.", _SIZE),
    "audio_seconds": _option(float | None, "--audio-seconds", "Length of one sound.", _SIZE),
    "lora_rank": _option(int | None, "--lora-rank", "Rank of the adapters.", _HOW),
    "lora_targets": _option(str | None, "--lora-targets", "all-linear, attention, mlp, or names: q_proj,v_proj.", _HOW),
    "lora_target_parameters": _option(str | None, "--lora-target-parameters", "Fused experts: mlp.experts.gate_up_proj,mlp.experts.down_proj.", _HOW),
    "lora_dtype": _option(str | None, "--lora-dtype", "fp32 or bf16 adapters.", _HOW),
    "lora_from": _option(str | None, "--lora-from", "A folder or hub id with an adapter to go on with.", _HOW),
    "lora_init": _option(str | None, "--lora-init", "default, gaussian, pissa or pissa_niter_N.", _HOW),
    "lora_bias": _option(str | None, "--lora-bias", "Biases trained beside adapters: none, all, lora_only.", _HOW),
    "lora_modules_to_save": _option(str | None, "--lora-modules-to-save", "Modules trained whole: embed_tokens,lm_head.", _HOW),
    "dtype": _option(str | None, "--dtype", "Weights as loaded: bf16, fp16, fp32.", _HOW),
    "mixed_precision": _option(str | None, "--mixed-precision", "Autocast: none, bf16, fp16.", _HOW),
    "quantization": _option(str | None, "--quantization", "nf4, int8, fp8, gptq-4bit, awq-4bit ...", _HOW),
    "optimizer": _option(str | None, "--optimizer", "adamw, adamw-fused, adamw-8bit, lion, sgd ...", _HOW),
    "optimizer_offload": _option(bool | None, "--optimizer-offload/--no-optimizer-offload", "States in host RAM.", _HOW),
    "parameter_offload": _option(bool | None, "--parameter-offload/--no-parameter-offload", "Weights in host RAM: FSDP's cpu_offload, offload_param.", _HOW),
    "offload_device": _option(str | None, "--offload-device", "cpu, or nvme (zero3 swaps to a disk).", _HOW),
    "checkpointing": _option(str | None, "--checkpointing", "none, full, every-k, offload, selective-op or selective-layer.", _HOW),
    "checkpoint_every": _option(int | None, "--checkpoint-every", "Layers of an every-k segment; every which layer of selective-layer.", _HOW),
    "compile": _option(bool | None, "--compile/--no-compile", "torch.compile, as the framework does it.", _HOW),
    "compile_loss": _option(bool | None, "--compile-loss/--no-compile-loss", "The loss too; as the framework does if not said.", _HOW),
    "float8": _option(str | None, "--float8", "Linears in float8 (torchao): tensorwise, rowwise or rowwise-with-gw-hp.", _HOW),
    "float8_all_gather": _option(bool | None, "--float8-all-gather/--no-float8-all-gather", "FSDP gathers weights in float8.", _HOW),
    "attention": _option(str | None, "--attention", "eager, sdpa or flash.", _HOW),
    "experts_implementation": _option(str | None, "--experts-implementation", "grouped_mm, batched_mm or eager (transformers 5).", _HOW),
    "expert_capacity_factor": _option(float | None, "--expert-capacity-factor", "Rows of an expert at most, in even shares: 1.25.", _HOW),
    "loss": _option(str | None, "--loss", "full or chunked logits.", _HOW),
    "entropy": _option(bool | None, "--entropy/--no-entropy", "An entropy of full logits is taken.", _HOW),
    "beta": _option(float | None, "--beta", "KL weight; 0 = no reference.", _HOW),
    "reference": _option(str | None, "--reference", "none, adapter-off, separate, offloaded, precomputed.", _HOW),
    "teacher": _option(str | None, "--teacher", "distill: the teacher's name, folder or hub id.", _HOW),
    "teacher_placement": _option(str | None, "--teacher-placement", "resident, offloaded or served.", _HOW),
    "teacher_top_k": _option(int | None, "--teacher-top-k", "Log-probabilities a token that a served teacher sends.", _HOW),
    "value_model": _option(str | None, "--value-model", "ppo: what the critic starts from.", _HOW),
    "reward_model": _option(str | None, "--reward-model", "ppo: the judge; none = a function.", _HOW),
    "negatives": _option(int | None, "--negatives", "embed, rerank: hard negatives of one sample.", _SIZE),
    "mini_batch": _option(int | None, "--mini-batch", "embed: pairs embedded at once under GradCache.", _SIZE),
    "eval_samples": _option(int | None, "--eval-samples", "Evaluate on so many held-out samples.", _SIZE),
    "eval_batch_size": _option(int | None, "--eval-batch-size", "Samples of one forward of it.", _SIZE),
    "eval_logits": _option(bool | None, "--eval-logits/--no-eval-logits", "Metrics want the logits: gathered and kept.", _SIZE),
    "eval_accumulation_steps": _option(int | None, "--eval-accumulation-steps", "Batches after which they leave the GPU.", _SIZE),
    "save_checkpoint": _option(str | None, "--save-checkpoint", "Plan saving one: whole or sharded.", _HOW),
    "resume": _option(bool | None, "--resume/--no-resume", "Plan the start from a checkpoint.", _HOW),
    "double_quant": _option(bool | None, "--double-quant/--no-double-quant", "QLoRA: the constants are quantised too.", _HOW),
    "tiled_mlp": _option(bool | None, "--tiled-mlp/--no-tiled-mlp", "Layers run in tiles of tokens.", _HOW),
    "packing": _option(bool | None, "--packing/--no-packing", "Sequences joined without padding.", _HOW),
    "shard": _option(str | None, "--shard", "none, ddp, zero1, zero2, zero3, fsdp or fsdp2.", _SPREAD),
    "reshard_after_forward": _option(str | None, "--reshard-after-forward", "fsdp2: true, false, or over how many ranks.", _SPREAD),
    "reduce_dtype": _option(str | None, "--reduce-dtype", "fsdp2: dtype in which gradients are reduced.", _SPREAD),
    "accumulate_sync": _option(bool | None, "--accumulate-sync/--no-accumulate-sync", "Gradients reduced after every micro-batch.", _SPREAD),
    "data_replicate": _option(int | None, "--data-replicate", "Groups that hold the same shards (HSDP); for --task serve, vLLM's engines side by side.", _SPREAD),
    "tensor_parallel": _option(int | None, "--tensor-parallel", "GPUs that share one layer; for --task serve, vLLM's.", _SPREAD),
    "sequence_parallel": _option(bool | None, "--sequence-parallel/--no-sequence-parallel", "They share the tokens of norms and residuals too.", _SPREAD),
    "pipeline_parallel": _option(int | None, "--pipeline-parallel", "Stages of layers, one after another.", _SPREAD),
    "virtual_stages": _option(int | None, "--virtual-stages", "Chunks of layers on one pipeline rank.", _SPREAD),
    "context_parallel": _option(int | None, "--context-parallel", "GPUs that share one sequence's tokens.", _SPREAD),
    "context_kind": _option(str | None, "--context-kind", "ring or ulysses.", _SPREAD),
    "expert_parallel": _option(int | None, "--expert-parallel", "GPUs that share a layer's experts; for --task serve, vLLM's.", _SPREAD),
    "expert_tensor_parallel": _option(int | None, "--expert-tensor-parallel", "GPUs that share one expert.", _SPREAD),
    "bucket_views": _option(bool | None, "--bucket-views/--no-bucket-views", "ddp: gradients are views of its buckets, not beside them.", _SPREAD),
    "engine": _option(str | None, "--engine", "none, transformers, vllm-shared, vllm-push, vllm-server.", _ENGINE),
    "kv_dtype": _option(str | None, "--kv-dtype", "bf16, fp16, fp32 or fp8.", _ENGINE),
    "gpu_memory_utilization": _option(float | None, "--gpu-memory-utilization", "vLLM's share of the GPU.", _ENGINE),
    "max_num_seqs": _option(int | None, "--max-num-seqs", "Sequences vLLM runs at once.", _ENGINE),
    "engine_tensor_parallel": _option(int | None, "--engine-tensor-parallel", "GPUs that share the rollout's vLLM.", _ENGINE),
    "max_model_len": _option(str | None, "--max-model-len", "serve: the longest request, as vLLM reads it: 8192, 8K, auto.", _ENGINE),
    "max_num_batched_tokens": _option(int | None, "--max-num-batched-tokens", "Tokens of one step of vLLM.", _ENGINE),
    "max_loras": _option(int | None, "--max-loras", "serve: adapter slots (--enable-lora).", _ENGINE),
    "max_lora_rank": _option(int | None, "--max-lora-rank", "Rank of the adapter slots.", _ENGINE),
    "prefix_caching": _option(bool | None, "--prefix-caching/--no-prefix-caching", "vLLM keeps prefixes for requests that begin alike.", _ENGINE),
    "cuda_graphs": _option(bool | None, "--cuda-graphs/--no-cuda-graphs", "vLLM's CUDA graphs; without: --enforce-eager.", _ENGINE),
    "cpu_offload_gb": _option(float | None, "--cpu-offload-gb", "serve: GiB of each GPU's weights in host memory.", _ENGINE),
    "sleep_level": _option(int | None, "--sleep-level", "0, 1 or 2: what vLLM gives back while training.", _ENGINE),
}  # fmt: skip
RECIPE_FIELDS = {
    "eval_samples": "evaluation.samples",
    "eval_batch_size": "evaluation.batch_size",
    "eval_logits": "evaluation.logits",
    "eval_accumulation_steps": "evaluation.accumulation_steps",
    "save_checkpoint": "save",
    "batch_size": "micro_batch_size",
    "grad_accum": "gradient_accumulation",
    "generations": "num_generations",
    "shard": "sharding",
    "parameter_offload": "offload.parameters",
    "offload_device": "offload.device",
    "lora_rank": "lora.rank",
    "lora_dtype": "lora.dtype",
    "lora_from": "lora.from",
    "lora_init": "lora.init",
    "lora_bias": "lora.bias",
    "engine": "engine.kind",
    "kv_dtype": "engine.kv_dtype",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_num_seqs": "engine.max_num_seqs",
    "engine_tensor_parallel": "engine.tensor_parallel",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "max_loras": "engine.max_loras",
    "max_lora_rank": "engine.max_lora_rank",
    "prefix_caching": "engine.prefix_caching",
    "cuda_graphs": "engine.cuda_graphs",
    "cpu_offload_gb": "engine.cpu_offload_gib",
    "sleep_level": "engine.sleep_level",
    "data_replicate": "parallel.data_replicate",
    "tensor_parallel": "parallel.tensor",
    "sequence_parallel": "parallel.sequence",
    "pipeline_parallel": "parallel.pipeline",
    "virtual_stages": "parallel.virtual_stages",
    "context_parallel": "parallel.context",
    "context_kind": "parallel.context_kind",
    "expert_parallel": "parallel.expert",
    "expert_tensor_parallel": "parallel.expert_tensor",
}
SERVING_FIELDS = {
    "tensor_parallel": "engine.tensor_parallel",
    "pipeline_parallel": "engine.pipeline_parallel",
    "data_replicate": "engine.data_parallel",
}
"""The same words where nothing is trained."""
MACHINE_FIELDS = ("gpu", "gpus", "nodes", "vram", "host_ram")
OTHER_FIELDS = (
    "token",
    "tool",
    "revision",
    "offline",
    "framework_version",
    "tool_version",
    "variant",
    "launch",
    "model",
    "max_model_len",
)


@dataclass(frozen=True, slots=True)
class Described:
    """What the command line describes."""

    run: "RunFile"
    """With what of its train section moves bytes in its recipe."""
    model: "ModelSpec"
    machine: "Machine"
    imported: "Imported | None" = None
    """Another tool's config, and what became of it."""
    file: "RunFile | None" = None
    """The run as it is to be saved."""


class NoCardError(UsageError):
    """A run is described, and no card for it."""

    def __init__(self, run: "RunFile", model: "ModelSpec") -> None:
        super().__init__("no GPU given", hint="--gpu rtx-4090 or --vram 24GiB")
        self.run = run
        self.model = model


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every shared flag; it receives them as one dict named `flags`."""

    @wraps(command)
    def wrapper(**kwargs: Any) -> None:
        flags = {name: kwargs.pop(name) for name in OPTIONS}
        command(flags=flags, **kwargs)

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name == "offline" else None,
            annotation=annotation,
        )
        for name, annotation in OPTIONS.items()
    ]
    positional = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    keyword = [p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY]
    parameters = [*positional, *keyword, *shared]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def describe(subject: str, flags: dict[str, Any]) -> Described:
    """Return the run that a model name, run.yaml or foreign config and the flags describe; flags win.

    Raises NoCardError with the run where neither a card nor its memory is named.
    """
    from planner.answers.width import with_width
    from planner.importers import import_subject, launch_document, resolve_model
    from planner.importers.typed import typed_model
    from planner.models.hub import find_model
    from planner.run.recipe import RunFile
    from planner.run.runfile import load_run_file, machine_of, parse_yaml, validate
    from planner.run.train_bytes import with_train

    given = read_input() if subject == "-" else subject
    text = given if subject == "-" or is_command(given) else None
    if text is not None and (own := own_command(text)):
        return describe(*_stated(own, flags))
    if text is not None and is_run_file(text):
        found = validate(RunFile, parse_yaml(text, label="standard input"))
        imported, document = None, found.model_dump(exclude_unset=True)
    else:
        imported = import_subject(
            subject if text is None else text,
            text=text is not None,
            tool=flags.get("tool"),
            version=flags.get("tool_version") or flags.get("framework_version"),
            launch=flags.get("launch"),
            variant=flags.get("variant"),
            model=flags.get("model"),
            gpus=flags.get("gpus"),
        )
        if imported is not None:
            document = imported.run.model_dump(exclude_unset=True)
        elif subject.endswith(RUN_SUFFIXES):
            document = load_run_file(Path(subject)).model_dump(exclude_unset=True)
        else:
            document = {"model": subject}
            if flags.get("launch"):
                document |= launch_document(flags["launch"])
    if imported is None and flags.get("model"):
        document |= {"model": flags["model"]}
    run = _with_flags(document, flags, validate)
    for name in (run.recipe.teacher, run.recipe.value_model, run.recipe.reward_model):
        if name not in (None, "", "none") and flags["offline"]:
            find_model(name, offline=True)  # raises unless it is here
    model = resolve_model(run.model) if imported is not None and run.revision is None else None
    if model is None:
        token, offline = flags.get("token"), bool(flags["offline"])
        typed = typed_model(run.model, revision=run.revision, token=token, offline=offline)
        model = typed.model
        if typed.said:
            typer.echo(typed.said, err=True)
            run = run.model_copy(update={"model": model.hub_id or model.name})
    if run.machine.gpu is None and run.machine.vram is None:
        raise NoCardError(with_train(run), model)
    machine = machine_of(run.machine)
    run = with_auto_length(run, model, machine, flags)
    described = with_train(run)
    if imported is None:
        described = with_width(described, model, machine)
    return Described(described, model, machine, imported, run)


READ_BACK: list[Callable[[typer.Typer], None]] = []
"""What registers the verbs whose command lines are read back (planner.verbs.plan)."""


def _stated(own: list[str], flags: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return subject and flags of a command line of ours; `flags` given beside it win."""
    known = typer.Typer()
    for register in READ_BACK:
        register(known)
    verb, command = own[0], typer.main.get_command(known).commands.get(own[0])  # type: ignore[attr-defined]
    if command is None or "subject" not in {each.name for each in command.params}:
        raise UsageError(
            f"subject: vramwise {verb} describes no run",
            hint="a command such as: vramwise plan qwen3-8b --task grpo",
        )
    stated = command.make_context(verb, own[1:]).params
    if stated["subject"] in (None, "-"):
        raise UsageError(
            f"subject: vramwise {verb} without its model or file", hint="the whole command"
        )
    return stated["subject"], {
        name: given if (given := flags.get(name)) else stated.get(name) for name in OPTIONS
    }


def _with_flags(
    document: dict[str, Any], flags: dict[str, Any], validate: Callable[..., Any]
) -> "RunFile":
    from planner.run.recipe import RunFile, Task

    recipe = dict(document.get("recipe") or {})
    machine = dict(document.get("machine") or {})
    asked = flags.get("task")
    task = word_of("task", asked, *_words("task")) if asked else recipe.get("task")
    serves = task == Task.SERVE
    fields = RECIPE_FIELDS
    if serves:
        fields = {**RECIPE_FIELDS, **SERVING_FIELDS, "expert_parallel": "expert_parallel"}
    for name, value in flags.items():
        if value is None or (name in OTHER_FIELDS and name != "revision"):
            continue
        if name == "revision":
            document["revision"] = value
        elif name in MACHINE_FIELDS:
            machine[name] = value
        elif name in WORDS:
            recipe[name] = word_of(name, value, *_words(name))
        elif name == "lora_targets":
            _nest(recipe, "lora.targets", _targets(value))
        elif name in ("lora_target_parameters", "lora_modules_to_save"):
            _nest(recipe, f"lora.{name.removeprefix('lora_')}", _names(value))
        elif name == "reshard_after_forward":
            recipe[name] = _reshard(value)
        else:
            _nest(recipe, fields.get(name, name), value)
    if serves and flags.get("expert_parallel") is not None:
        _serve_experts(recipe, recipe.pop("expert_parallel"))
    if flags.get("framework_version") is not None:
        recipe["framework"] = _versioned(recipe.get("framework"), flags["framework_version"])
    put_length(recipe, flags, serves=serves)
    if "framework" not in recipe:
        if serves:
            recipe["framework"] = "vllm"
        else:
            _framework_of_degrees(recipe, flags)
    if flags.get("context") is not None:  # a new context replaces the lengths it summed up
        for length in ("prompt_length", "completion_length"):
            if flags.get(length) is None:
                recipe.pop(length, None)
    run: RunFile = validate(RunFile, {**document, "recipe": recipe, "machine": machine})
    return run


WORDS = {"task": TASK_WORDS, "method": METHOD_WORDS, "optimizer": OPTIMIZER_WORDS}
"""Flags whose words other trainers have others for."""


def _words(name: str) -> tuple[list[str], dict[str, str]]:
    from planner.run.recipe import Method, Optimizer, Task

    kinds = {"task": Task, "method": Method, "optimizer": Optimizer}
    return [each.value for each in kinds[name]], WORDS[name]


def _versioned(framework: str | None, version: str) -> str:
    """Return framework==version; a version that the name holds already must be the same."""
    from planner.run.framework import pick, spelled
    from planner.run.recipe import Recipe

    name = framework or Recipe().framework
    asked = spelled(name)
    if asked.version != version:
        pick(name, version)  # raises when the two contradict, or no law covers the version
    return name if asked.version else f"{asked.name}=={version}"


DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


def _framework_of_degrees(recipe: dict[str, Any], flags: dict[str, Any]) -> None:
    """Choose who divides a layer, a pipeline or a sequence where nobody is named, and say so."""
    asked = [name for name in DEGREES if (flags.get(name) or 1) > 1]
    if not asked:
        return
    if recipe.get("method", "lora") != "full":
        name = "hf-trainer"
    elif recipe.get("sharding") == "fsdp2":
        name = "torchtitan"
    else:
        name = "megatron"
        recipe.setdefault("sharding", name)
    recipe["framework"] = name
    flag = "--" + asked[0].replace("_", "-")
    shard = f" --shard {recipe['sharding']}" if "sharding" in recipe else ""
    typer.echo(
        f"planned with --framework {name}{shard}: vramwise's own trainer has no {flag}", err=True
    )


def _reshard(text: str) -> bool | int | str:
    """Return true, false or a count; anything else stays as it is, for the field's own error."""
    words = {"true": True, "false": False}
    return int(text) if text.isdigit() else words.get(text.lower(), text)


def _serve_experts(recipe: dict[str, Any], ranks: int) -> None:
    """Say vLLM's --enable-expert-parallel, whose ranks are all tensor and data parallel ones."""
    engine = recipe.get("engine") or {}
    tensor = engine.get("tensor_parallel", 1)
    data = engine.get("data_parallel", 1)
    if ranks not in (1, tensor * data):
        raise UsageError(
            f"expert-parallel: {ranks}, but vLLM divides experts over all of its {tensor} tensor x {data} "
            "data parallel GPUs"
        )
    recipe["engine"] = {**engine, "expert_parallel": ranks > 1}


def _targets(text: str) -> str | tuple[str, ...]:
    if text in ("all-linear", "attention", "mlp"):
        return text
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _nest(recipe: dict[str, Any], name: str, value: Any) -> None:
    if "." not in name:
        recipe[name] = value
        return
    section, field = name.split(".", 1)
    recipe[section] = {**(recipe.get(section) or {}), field: value}
