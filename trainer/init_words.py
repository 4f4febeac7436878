"""What each field of a run file means and may be, for the comments of `vramwise init`."""

from enum import EnumType
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from planner.run.recipe import RunFile
from trainer.config import TrainSection

BEYOND = 2**14
"""Bounds from here on only catch typing errors; a comment need not tell them."""
MEANING: dict[str, str] = {
    "model": "a hub id, or a folder with config, weights and tokenizer",
    "recipe.task": "what the run does",
    "recipe.method": "what is trained: all weights, adapters, or adapters over 4-bit weights",
    "recipe.dtype": "of the weights as they are loaded: bf16, fp16 or fp32",
    "recipe.master_weights": "exact fp32 copies of trained weights live in the optimizer",
    "recipe.tiled_mlp": "MLPs and norms run 2,048 tokens at a time",
    "recipe.checkpointing": "what is kept of the forward pass; offload: the layers' inputs, in host memory",
    "recipe.lora": "adapters",
    "recipe.lora.rank": "their width",
    "recipe.lora.dtype": "of the adapters: bf16, fp16 or fp32",
    "recipe.context": "longest sample in tokens; longer ones are cut",
    "recipe.prompt_length": "longest prompt in tokens; longer ones lose their beginning",
    "recipe.completion_length": "longest completion in tokens",
    "recipe.num_generations": "completions of a prompt, compared with each other",
    "recipe.micro_batch_size": "sequences of one forward pass",
    "recipe.gradient_accumulation": "micro-batches of a step",
    "recipe.engine": "what generates",
    "recipe.engine.kind": "transformers: the policy itself; vllm-shared: vLLM on the policy's own weights",
    "recipe.engine.max_num_seqs": "sequences generated at once",
    "recipe.engine.kv_bytes": "bytes of its KV cache; both left out: as many sequences of a step as have room",
    "recipe.optimizer": "states of 8 bytes a weight (adamw), 2 (8bit) or less",
    "recipe.optimizer_offload": "states wait in host memory",
    "recipe.attention": "None = sdpa",
    "recipe.packing": "several samples in a row of the full length, kept apart",
    "recipe.beta": "weight of the KL term; above 0 a reference is scored",
    "machine.gpu": "the card it is planned for: vramwise gpus lists them",
    "machine.vram": "memory that torch sees, such as 24GiB",
    "machine.host_ram": "host memory, such as 64GiB",
    "train.output": "new folder for log and checkpoints",
    "train.dataset": "a built-in task, a file, a folder or a hub id, and its columns (docs/training.md)",
    "train.dataset.name": "arithmetic, gsm8k, reasoning-gym/TASK, FILE.jsonl, a folder or a hub id",
    "train.rewards": "exact, numeric, format, length, reasoning-gym, or your own: FILE.py:FUNCTION",
    "train.steps": "optimizer steps (GRPO: rollouts)",
    "train.epochs": "passes over the data, instead of steps",
    "train.lr": "learning rate",
    "train.lora_alpha": "scale of the adapters times their rank; None = twice the rank",
    "train.warmup_steps": "steps in which the rate rises to lr",
    "train.schedule": "the rate after that",
    "train.weight_decay": "of matrices; biases and norms have none",
    "train.max_grad_norm": "longer gradients are cut to this length",
    "train.seed": "decides every random number",
    "train.validation": "held-out samples, like dataset; none of them may be trained on",
    "train.eval_every": "steps between evaluations; 0 = at the end alone",
    "train.evaluation": "how held-out samples are judged: save_best, patience, GRPO: generations, k",
    "train.save_every": "steps between checkpoints; 0 = at the end and on SIGTERM alone",
    "train.keep_checkpoints": "the newest so many",
    "train.loss_on": "every turn of the assistant (or the completion), its last turn alone, or every token",
    "train.neftune_alpha": "noise on the embeddings; 5 to 15 are usual",
    "train.padding_free": "samples end to end, nothing padded; None = where attention is flash",
    "train.sampling": "how completions are drawn: temperature, top_p, top_k, stop",
    "train.loss": "type grpo, dr_grpo, bnpo, dapo, cispo or gspo; epsilon, epsilon_high, scale_rewards",
    "train.updates_per_rollout": "optimizer steps on one rollout",
    "train.num_iterations": "passes over one rollout",
    "train.tensorboard": "write events beside metrics.jsonl",
    "train.print_completions": "samples shown on the way",
    "train.preflight": "rehearse the longest lengths before the first step",
}  # fmt: skip
_BOTH = {
    "epochs": 1.0, "lora_alpha": 32.0, "warmup_steps": 10, "schedule": "cosine", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "seed": 0, "save_every": 100, "keep_checkpoints": 2, "tensorboard": False,
    "print_completions": 2, "preflight": True,
}  # fmt: skip
COMMENTED: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "recipe": {"optimizer": "adamw-8bit", "optimizer_offload": True, "attention": "flash", "packing": True},
        "train": {
            **_BOTH,
            "validation": {"name": "trl-lib/Capybara", "split": "test", "limit": 200},
            "eval_every": 100,
            "evaluation": {"save_best": True, "patience": 3},
            "loss_on": "completion", "neftune_alpha": 5.0, "padding_free": True,
        },
    },
    "grpo": {
        "recipe": {"optimizer": "adamw-8bit", "optimizer_offload": True, "attention": "flash", "beta": 0.04},
        "train": {
            **_BOTH,
            "validation": {"name": "gsm8k", "split": "test", "limit": 200},
            "eval_every": 100,
            "evaluation": {"generations": 4, "k": [1, 4], "save_best": True},
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "loss": {"type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
            "updates_per_rollout": 1, "num_iterations": 1,
        },
    },
}  # fmt: skip
"""Fields that a new file holds as comments: their default, or an example."""


NARROWER = {
    "recipe.task": "sft or grpo",
    "recipe.engine.kind": "transformers, vllm-shared, vllm-push, vllm-server",
}
"""What a trained run may be, where a plan may be more."""


def allowed(name: str) -> str:
    """Return what a dotted field of a run file may be, from its type; "" where a sentence is needed."""
    if name in NARROWER:
        return NARROWER[name]
    section: type[BaseModel] = TrainSection if name.startswith("train.") else RunFile
    *path, last = name.removeprefix("train.").split(".")
    for part in path:
        section = _section(section.model_fields[part].annotation)
    info = section.model_fields[last]
    return _words(info.annotation, info.metadata)


def _words(annotation: Any, metadata: Any = ()) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if isinstance(annotation, EnumType):
        members: Any = annotation
        return ", ".join(str(member.value) for member in members)
    if get_origin(annotation) is UnionType or str(get_origin(annotation)) == "typing.Union":
        return next(filter(None, (_words(part) for part in get_args(annotation))), "")
    if hasattr(annotation, "__metadata__"):
        return _words(annotation.__origin__, annotation.__metadata__)
    if annotation is bool:
        return "true or false"
    bounds = [part for item in metadata for part in _parts(item)]
    said = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(
        f"{text} {value:g}"
        for bound in bounds
        for name, text in said.items()
        if (value := getattr(bound, name, None)) is not None and value < BEYOND
    )


def _parts(item: Any) -> list[Any]:
    """Return what pydantic has put into one piece of metadata."""
    return list(getattr(item, "metadata", [item]))


def _section(annotation: Any) -> type[BaseModel]:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    raise KeyError(annotation)
