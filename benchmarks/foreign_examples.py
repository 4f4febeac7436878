"""The examples of data/doctor/config_examples.jsonl, written out as each tool's own file.

The upstream files are not copied: every example is rebuilt from its key settings, in the
format that its tool reads (YAML, shell, Hydra overrides, notebook, command line).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parents[1] / "data" / "doctor"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example config and what is claimed about it."""

    id: str
    tool: str
    path: str
    model: str
    method: str
    settings: dict[str, Any]
    claim: str
    source: str


def load_examples() -> list[Example]:
    """Return all examples in file order."""
    rows = (
        json.loads(line)
        for line in (DATA / "config_examples.jsonl").read_text(encoding="utf-8").splitlines()
    )
    keys = Example.__dataclass_fields__
    return [Example(**{key: row[key] for key in keys}) for row in rows]


def render(example: Example, *, overrides: bool = False) -> tuple[str, str]:
    """Return (file name, text). `overrides`: with the changes that the claim was made for."""
    settings = dict(example.settings)
    changes = settings.pop("claim_overrides", {})
    if overrides:
        settings |= {key: value for key, value in changes.items() if key != "note"}
    if example.tool == "torchtune":
        return "config.yaml", _torchtune(example, settings)
    if example.tool == "ms-swift":
        return "train.sh", _swift(settings)
    if example.tool == "verl":
        return "run.sh", _verl(settings)
    if example.tool == "unsloth":
        return "notebook.ipynb", _notebook(_unsloth(example, settings), settings.get("pins", []))
    if example.tool == "trl":
        return "notebook.ipynb", _notebook(_trl(example, settings), settings.get("pins", []))
    if example.tool == "vllm":
        return "serve.sh", _serve(example, settings)
    return "config.yaml", _yaml(example, settings)


def _yaml(example: Example, settings: dict[str, Any]) -> str:
    launch = settings.pop("launch", "")
    head = ""
    if launch:
        name, _, rest = launch.partition(" ")
        count = rest.strip().removeprefix("--").replace("num_processes", "").strip(" =")
        head = f"# {example.tool}: accelerate launch --config_file recipes/accelerate_configs/{name} --num_processes {count}\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def _torchtune(example: Example, settings: dict[str, Any]) -> str:
    gpus = settings.pop("n_gpus", None)
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    recipe = Path(example.path).stem.split("_", 1)[-1]
    recipe = recipe if "single_device" in recipe else f"{recipe}_finetune_distributed"
    count = f"--nproc_per_node {gpus} " if gpus else ""
    return f"# tune run {count}{recipe} --config {example.path}\n" + yaml.safe_dump(
        nested, sort_keys=False
    )


def _swift(settings: dict[str, Any]) -> str:
    environment = {
        key.removeprefix("env."): value for key, value in settings.items() if key.startswith("env.")
    }
    flags = {key: value for key, value in settings.items() if not key.startswith("env.")}
    lines = [f"{key}={value}" for key, value in environment.items() if key.islower()]
    prefix = [f"{key}={value}" for key, value in environment.items() if not key.islower()]
    verb = "rlhf" if "rlhf_type" in flags else "sft"
    command = [*prefix, f"swift {verb}", *(f"--{key} {value}" for key, value in flags.items())]
    return "\n".join([*lines, " \\\n    ".join(command)]) + "\n"


def _verl(settings: dict[str, Any]) -> str:
    values = {key: str(value).split(" ")[0] for key, value in settings.items()}
    gpus = values.pop("trainer.n_gpus_per_node", "8")
    rest = "\n".join(f"    {key}={value}" for key, value in values.items())
    return (
        "#!/usr/bin/env bash\nset -xeuo pipefail\n"
        f"NGPUS=${{NGPUS_PER_NODE:-{gpus}}}\nARGS=(\n{rest}\n    trainer.n_gpus_per_node=$NGPUS\n)\n"
        'python3 -m verl.trainer.main_ppo "${ARGS[@]}" "$@"\n'
    )


def _notebook(source: str, pins: list[str]) -> str:
    install = "!pip install " + " ".join(pins or ["trl"])
    cells = [
        {"cell_type": "code", "source": [install]},
        {"cell_type": "code", "source": source.splitlines(keepends=True)},
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


_SOURCE_KEYS = (
    "target_modules",
    "lora_alpha",
    "max_lora_rank",
    "max_completion_length",
    "max_prompt_length",
    "r",
)


def _literal(key: str, value: Any) -> str:
    text = str(value)
    try:
        compile(text, "value", "eval")
        names = {"True", "False", "None"}
        if text.isidentifier() and text not in names and key not in _SOURCE_KEYS:
            return repr(value)
        return text
    except SyntaxError:
        return repr(value)


def _call(name: str, settings: dict[str, Any], keys: tuple[str, ...], first: str = "") -> str:
    arguments = [first] if first else []
    arguments += [f"{key}={_literal(key, settings[key])}" for key in keys if key in settings]
    return f"{name}(\n    " + ",\n    ".join(arguments) + ",\n)\n"


_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "packing",
    "num_generations",
    "max_completion_length",
    "max_prompt_length",
    "max_length",
    "use_liger_kernel",
    "gradient_checkpointing",
)


def _unsloth(example: Example, settings: dict[str, Any]) -> str:
    grpo = example.method.startswith("grpo")
    load = (
        "max_seq_length",
        "dtype",
        "load_in_4bit",
        "load_in_8bit",
        "full_finetuning",
        "fast_inference",
        "max_lora_rank",
        "gpu_memory_utilization",
    )
    adapt = ("r", "target_modules", "lora_alpha", "use_gradient_checkpointing")
    config = "GRPOConfig" if grpo else "SFTConfig"
    lines = ["import torch", "from unsloth import FastLanguageModel", "max_seq_length = 2048"]
    if "lora_rank" in settings:
        lines.append(f"lora_rank = {settings['lora_rank']}")
    return (
        "\n".join(lines)
        + "\n"
        + "model, tokenizer = "
        + _call(
            "FastLanguageModel.from_pretrained", settings, load, f'model_name="{example.model}"'
        )
        + ("model = " + _call("FastLanguageModel.get_peft_model", settings, adapt, "model"))
        + "maximum_length = len(tokenizer)\nmax_prompt_length = maximum_length + 1\nmax_completion_length = max_seq_length - max_prompt_length\n"
        + (f"args = {_call(config, settings, _ARGUMENTS, 'learning_rate=2e-4')}")
    )


def _trl(example: Example, settings: dict[str, Any]) -> str:
    grpo = example.method.startswith("grpo")
    loader = _call(
        "AutoModelForCausalLM.from_pretrained",
        settings,
        ("attn_implementation", "dtype"),
        "model_id",
    )
    if "load_in_4bit" in settings:
        bits = _call(
            "BitsAndBytesConfig",
            settings,
            (
                "load_in_4bit",
                "bnb_4bit_quant_type",
                "bnb_4bit_use_double_quant",
                "bnb_4bit_compute_dtype",
            ),
        )
        loader = loader.replace("\n)\n", f"\n    quantization_config={bits.strip()},\n)\n")
    return (
        f'import torch\nfrom trl import SFTConfig, GRPOConfig\nmodel_id = "{example.model}"\nmodel = {loader}'
        f"peft_config = {_call('LoraConfig', settings, ('r', 'lora_alpha', 'target_modules'))}"
        f"training_args = {_call('GRPOConfig' if grpo else 'SFTConfig', settings, _ARGUMENTS, 'learning_rate=2e-4')}"
    )


def _serve(example: Example, settings: dict[str, Any]) -> str:
    command = settings["command"]
    if command.startswith(("vllm serve", "python -m")) and "(" not in command:
        text = command
        for bare in ("Yi-1.5-34B-Chat",):
            text = text.replace(f"--model {bare}", f"--model {example.model}")
        return (
            text.replace(
                "Qwen2.5-72B-AWQ --max-num-seqs 256, context 4096",
                f"{example.model} --max-num-seqs 256 --max-model-len 4096",
            )
            + "\n"
        )
    return _described(example, command)


def _described(example: Example, command: str) -> str:
    """Write the few settings that a report describes in words as a command."""
    import re

    flags = []
    for key, flag in (
        ("max_model_len", "--max-model-len"),
        ("max-model-len", "--max-model-len"),
        ("gpu_memory_utilization", "--gpu-memory-utilization"),
    ):
        if match := re.search(rf"{key}[ =]+([\d.]+)", command):
            flags.append(f"{flag} {match.group(1).rstrip('.')}")
    if "enforce_eager=True" in command:
        flags.append("--enforce-eager")
    if "float16" in command:
        flags.append("--dtype float16")
    if "FP8 KV" in command:
        flags.append("--kv-cache-dtype fp8")
    model = (
        example.model.replace(" ", "-").removeprefix("unsloth-")
        if " " in example.model
        else example.model
    )
    return f"vllm serve {model} {' '.join(dict.fromkeys(flags))}\n"
