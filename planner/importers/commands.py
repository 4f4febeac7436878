"""Command lines that start a tool: which one it is, its flags, the config it names."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.importers import hf_script, llamafactory, trl
from planner.importers.context import Context, absent
from planner.importers.detect import trl_flavour
from planner.importers.launch import from_accelerate, from_words, read_launch_file
from planner.importers.launchers import Started, slurm_gpus
from planner.importers.loading import flatten, load_json, load_yaml
from planner.importers.settings import Imported
from planner.importers.shell import flags
from planner.importers.spread import Launch
from planner.importers.toml_files import load_toml
from planner.run.recipe import Task

_VERBS = {
    "sft": Task.SFT,
    "grpo": Task.GRPO,
    "dpo": Task.DPO,
    "kto": Task.KTO,
    "orpo": Task.ORPO,
    "cpo": Task.ORPO,
    "reward": Task.REWARD,
    "rloo": Task.GRPO,
    "ppo": Task.PPO,
}
_LAUNCH_ONLY = ("config_file", "num_processes", "accelerate_config", "dataset_name")
_TRL_KEYS = frozenset(
    [
        "num_generations",
        "max_completion_length",
        "max_prompt_length",
        "use_vllm",
        "use_peft",
        "vllm_mode",
        "dataset_mixer",
        "dataset_text_field",
        "packing",
        "reward_funcs",
        "lora_target_modules",
        "max_seq_length",
        "load_in_4bit",
        "beta",
    ]
)
_TRL_MODULE = re.compile(r"^trl\.(?:scripts|cli|experimental)\b|^(?:.*/)?trl/scripts/")


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A config that a command line names, with the overrides that follow it."""

    document: dict[str, Any]
    comment: str
    """The command and its environment, as a comment: GPU counts and recipe names are there."""
    path: Path | None
    python: str = ""
    """Instead: a Python config's source."""


def launch_of(
    started: Started, context: Context, values: dict[str, Any] | None = None
) -> Launch | None:
    """Return how a command spreads its run out: --launch, accelerate's file or flags, counts, SLURM's lines."""
    gpus, asked = started.gpus, slurm_gpus(context.text)
    if asked and (not gpus or (asked > gpus and asked % gpus == 0 and started.nodes == 1)):
        gpus = asked  # the launcher's own count of nodes is a variable of the job's
    if context.launch is not None:
        return context.launch if context.launch.gpus else replace(context.launch, gpus=gpus)
    values = values or {}
    name = str(
        started.config_file or values.get("config_file") or values.get("accelerate_config") or ""
    )
    found = _accelerate_file(name, context) if name else None
    if found is None:
        own = _accelerate_flags(started)
        found = own or from_words(f"{name} num_processes={values.get('num_processes', '')}")
    total = gpus or found.gpus
    found = replace(found, gpus=total)
    return found if found.sharding or found.gpus else None


def _accelerate_file(name: str, context: Context) -> Launch | None:
    found = context.find(name)
    if found is None:
        return None
    text, path = found
    if path is not None and path != context.path:
        return read_launch_file(path)
    document = load_yaml(text)
    return from_accelerate(document) if isinstance(document, dict) else None


def _accelerate_flags(started: Started) -> Launch | None:
    """Return what `accelerate launch --use_fsdp ...` or --zero_stage say, as its file would."""
    given = {key.replace("-", "_"): value for key, value in flags(started.launcher).items()}
    if given.get("use_deepspeed") or "zero_stage" in given:
        kind, section = "DEEPSPEED", "deepspeed_config"
    elif given.get("use_fsdp") or any(key.startswith("fsdp_") for key in given):
        kind, section = "FSDP", "fsdp_config"
    else:
        return None
    return from_accelerate({"distributed_type": kind, section: given, **given})


def trl_command(started: Started, context: Context) -> Imported | None:
    """Return the run of a `trl sft` line or of any script with TRL's flags, or None for another command."""
    arguments = started.arguments
    if started.name == "trl":
        if not arguments or arguments[0] not in _VERBS:
            return None
        task: Task | None = _VERBS[arguments[0]]
        arguments = arguments[1:]
    else:
        task = _task_of_name(started)
    values = {key.replace("-", "_"): value for key, value in flags(arguments).items()}
    ours = _OPEN_INSTRUCT & set(values) or "open_instruct" in started.program
    if ours:
        values = _as_trl(values)
    config = values.get("config") or (
        arguments[0] if arguments and _is_yaml(arguments[0]) else None
    )
    by_name = (
        bool(_TRL_MODULE.match(started.program)) or started.name == "trl" or _is_script(started)
    )
    known = bool(_TRL_KEYS & set(values)) and not hf_script.KEYS & set(values) - {"do_train"}
    if not (by_name or known) or not ("model_name_or_path" in values or config):
        return None
    spread = launch_of(started, context, values)
    path = context.path
    if isinstance(config, str) and (by_name or known or _is_yaml(config)):
        values.pop("config", None)
        found = context.mapping(config)
        if found is None and "model_name_or_path" not in values:
            raise absent(config)
        if found is not None:
            values = {**found[0], **values}
            path = found[2]
    read = {key: value for key, value in values.items() if key not in _LAUNCH_ONLY}
    flavour = trl_flavour(
        set(values), f"{started.program} {' '.join(started.launcher)}", flags=True
    )
    result = trl.read(
        read,
        task=task,
        version=context.version_of("trl"),
        assumed=trl.ASSUMED.get(flavour, trl.VERSION),
        tool=flavour,
        launch=spread,
        base=path,
    )
    if ours:
        result.report.effects.append("open-instruct's flags, planned as TRL's of the same meaning")
    named = {key: values[key] for key in ("dataset_name",) if key in values}
    return replace(result, values={**result.values, **named})


_OPEN_INSTRUCT = frozenset(("num_samples_per_prompt_rollout", "max_prompt_token_length"))
_ITS_NAMES = {
    "response_length": "max_completion_length",
    "max_prompt_token_length": "max_prompt_length",
    "num_samples_per_prompt_rollout": "num_generations",
    "max_seq_length": "max_length",
    "use_lora": "use_peft",
    "lora_rank": "lora_r",
}


def _as_trl(values: dict[str, Any]) -> dict[str, Any]:
    """Return open-instruct's flags (finetune, dpo_tune_cache, grpo_fast) by TRL's names."""
    found = {_ITS_NAMES.get(key, key): value for key, value in values.items()}
    if (stage := found.pop("deepspeed_stage", None)) is not None:
        found.setdefault("deepspeed", f"zero{stage}")
    if "num_generations" in found:  # engines on GPUs of their own, but for a test's single one
        together = found.pop("single_gpu_mode", None)
        found |= {"use_vllm": True, "vllm_mode": "colocate" if together else "server"}
    return found


def _is_yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _is_script(started: Started) -> bool:
    """Return whether the program is a script of TRL's examples by its name."""
    return bool(
        re.fullmatch(
            r"(?:run_)?(?:sft|grpo|dpo|kto|orpo|cpo|rloo|reward_modeling)\w*\.py", started.name
        )
    )


def _task_of_name(started: Started) -> Task | None:
    leaf = started.program.rsplit(".", 1)[-1] if started.is_module else Path(started.program).stem
    for word in re.split(r"[_\W]+", leaf.lower()):
        if word in _VERBS:
            return _VERBS[word]
    return None


def llamafactory_command(started: Started, context: Context) -> Imported | None:
    """Return the run of LLaMA-Factory's own flags, whatever starts them, or None."""
    values = flags(started.arguments)
    names = {
        "llamafactory-cli",
        "lmf",
        "train_bash.py",
        "llamafactory.cli",
        "llamafactory.launcher",
    }
    own = {
        "finetuning_type",
        "stage",
        "template",
        "cutoff_len",
        "lora_target",
        "dataset_dir",
    } & set(values)
    told = "finetuning_type" in own or (
        "model_name_or_path" in values and (started.name in names or len(own) >= 2)
    )
    if not told:
        return None
    spread = launch_of(started, context)
    environment = " ".join(f"{key}={value}" for key, value in started.environment.items())
    return llamafactory.read(
        values,
        version=context.version_of("llamafactory"),
        base=context.path,
        text=environment,
        launch=spread,
    )


def hf_command(started: Started, context: Context) -> Imported | None:
    """Return the run of a script whose flags are a transformers Trainer's, or None."""
    values = {key.replace("-", "_"): value for key, value in flags(started.arguments).items()}
    if not started.program.endswith(".py") and not started.is_module:
        return None
    if not hf_script.is_hugging_face(values):
        return None
    return hf_script.read(
        values,
        version=context.version_of("hf-trainer"),
        launch=launch_of(started, context, values),
        base=context.path,
        script=started.name,
    )


_YAML_TOOLS = frozenset(
    (
        "llamafactory-cli",
        "lmf",
        "axolotl",
        "tune",
        "swift",
        "litgpt",
        "xtuner",
        "composer",
        "rl",
        "sft",
        "trainer",
    )
)
"""Programs whose first file is their config, so that it is asked for where it is not here."""
_RUNNERS = re.compile(
    r"^(?:run_(?:grpo|sft|dpo|rm|distillation)\w*|start_\w+_pipeline|gsm8k_\w+|train)\.py$|^(?:axolotl|llamafactory|areal|torchtitan|litgpt|prime_rl)\."
)
_FILES = (".yaml", ".yml", ".json", ".toml")


def nested_config(started: Started, context: Context) -> Nested | None:
    """Return the config that a launcher's command names, overrides applied, or None.

    Raises UsageError where the file is not here.
    """
    words = started.arguments
    names = {started.name, *(Path(word).name for word in started.launcher)}
    known = bool(_YAML_TOOLS & names) or bool(
        _RUNNERS.match(started.name) or _RUNNERS.match(started.program)
    )
    wanted = named_file(started)
    if wanted is None:
        return None
    if started.name == "tune" and not wanted.endswith(_FILES):
        raise absent(wanted, what=" (a recipe of the torchtune package: `tune cp` copies it)")
    found = context.find(wanted)
    if found is None and started.name == "xtuner" and not wanted.endswith(_FILES):
        raise absent(wanted, what=" (a config of the xtuner package: `xtuner copy-cfg` copies it)")
    if found is None:
        if known:
            raise absent(wanted)
        return None
    text, path = found
    if wanted.endswith(".py"):
        return Nested(document={}, comment="", path=path, python=text)
    document = _document(text, wanted)
    if document is None:
        return None
    after = words[words.index(wanted) + 1 :] if wanted in words else words
    overrides: dict[str, Any] = {}
    for word in after:
        key, equals, value = word.partition("=")
        if equals and not key.startswith("-"):
            overrides[key.lstrip("+")] = load_yaml(value)
    before = words[: words.index(wanted)][1:] if wanted in words else []
    flagged = flags([*before, *after])
    dropped = (
        "config",
        "config_name",
        "config_path",
        "config-path",
        "config-name",
        "job.config_file",
    )
    overrides |= {
        key.replace("__", "."): value for key, value in flagged.items() if key not in dropped
    }
    heads = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    told = " ".join(f"{key}={value}" for key, value in started.environment.items())
    count = f"num_processes={started.gpus}" if started.gpus else ""
    comment = f"# {' '.join([*started.launcher, started.program, *words])} {told} {count}\n{heads}"
    return Nested(document={**flatten(document), **overrides}, comment=comment[:20_000], path=path)


def _document(text: str, name: str) -> dict[str, Any] | None:
    if name.endswith(".toml"):
        return load_toml(text, named=True)
    document = load_json(text) if text.lstrip().startswith("{") else load_yaml(text)
    return document if isinstance(document, dict) else None


def named_file(started: Started) -> str | None:
    """Return the config that a command names: by --config or --config_path and _name, @ FILE, or the first file."""
    given = {key.replace("-", "_"): value for key, value in flags(started.arguments).items()}
    folder, name = given.get("config_path"), given.get("config_name")
    if isinstance(name, str):
        joined = f"{folder}/{name}" if isinstance(folder, str) else name
        return joined if joined.endswith(_FILES) else f"{joined}.yaml"
    for key in ("config", "job.config_file"):
        if isinstance(given.get(key), str):
            return str(given[key])
        listed = given.get(key)
        if isinstance(listed, list):
            return str(listed[0])
    words = started.arguments
    if "@" in words[:-1]:
        return words[words.index("@") + 1]
    files = [word for word in words if word.endswith(_FILES) and not word.startswith("-")]
    scripts = (
        [word for word in words[1:] if word.endswith(".py")] if started.name == "xtuner" else []
    )
    if started.name == "xtuner" and words[:1] == ["train"] and not scripts:
        scripts = [word for word in words[1:2] if not word.startswith("-")]
    data = [value for key, value in given.items() if key in ("deepspeed", "dataset", "data_path")]
    flagged = {name for value in data for name in (value if isinstance(value, list) else [value])}
    return next((word for word in (*scripts, *files) if word not in flagged), None)


Reader = Callable[[Started, Context], Imported | None]
