"""Shell and Python scripts -> the importer of what they start or build."""

import json
import re
from dataclasses import replace

from planner.errors import UnsupportedError
from planner.importers import (
    hf_script,
    megatron_flags,
    megatron_pretrain,
    ms_swift,
    openrlhf,
    policies,
    sglang,
    skyrl_sft,
    supervised,
    trl_script,
    unsloth,
    verl,
    vllm,
)
from planner.importers.commands import (
    Reader,
    hf_command,
    llamafactory_command,
    named_file,
    nested_config,
    trl_command,
)
from planner.importers.context import Context, absent
from planner.importers.keys import shown
from planner.importers.launchers import Started, started
from planner.importers.mappings import from_mapping, unknown
from planner.importers.python_calls import UNKNOWN, Calls, read_calls
from planner.importers.settings import Imported, Settings
from planner.importers.shell import Script, flags, parse_shell


def overrides_command(program: Started, context: Context) -> Imported | None:
    """Return the run of SkyRL's overrides, told by its module or, in a script of one's own, by its keys."""
    values = verl.overrides(program.arguments)
    named = re.match(r"skyrl(?:_train)?\.", program.program) is not None
    if named and {"model.path", "strategy"} & set(values):
        told = policies.VERSIONS["skyrl"]
        return skyrl_sft.read(values, version=context.version_of("skyrl"), assumed=told)
    if not named and "trainer.policy.model.path" not in values:
        return None
    return policies.read_skyrl(values, version=context.version_of("skyrl"))


def litgpt_command(program: Started, context: Context) -> Imported | None:
    """Return the run of `litgpt finetune_lora MODEL --flags` without a config file, or None."""
    words = program.arguments
    if program.name != "litgpt" or not words or not words[0].startswith("finetune"):
        return None
    values = flags(words[1:])
    if "config" in values:
        return None
    verb = words[0] if "_" in words[0] else f"finetune_{words[1]}" if len(words) > 1 else words[0]
    place = next((word for word in words[1:] if not word.startswith("-") and "/" in word), None)
    values.setdefault("checkpoint_dir", place or "")
    if "full" not in verb:
        values.setdefault("lora_r", 8)  # litgpt/finetune/lora.py
    return supervised.read_litgpt(values, version=context.version_of("litgpt"))


_NEMO = re.compile(r"\bllm\.\w+\.(?:finetune|pretrain)_recipe\(")
_COMMANDS: tuple[Reader, ...] = (
    openrlhf.from_command,
    megatron_flags.swift_command,
    megatron_flags.slime_command,
    megatron_pretrain.pretrain_command,
    overrides_command,
    litgpt_command,
    llamafactory_command,
    trl_command,
    hf_command,
)
"""Readers of one command's own flags, the ones that look closest first."""


def from_shell(script: Script, context: Context) -> Imported | None:
    """Return the run that a script starts: of training if there is one, else of serving."""
    found = (
        _training(script, context)
        or vllm.read_script(script, version=context.version_of("vllm"))
        or sglang.read_script(script, version=context.version_of("sglang"))
    )
    if found is None:
        found = _inner(script, context)
    if found is None:
        _ask(script)
    if found is not None and script.cut_off:
        found.report.effects.append(
            "a comment line stands inside a continued command: bash ends the command there, so what follows is "
            f"not passed: {', '.join(script.cut_off[:12])}"
        )
    return found


def _inner(script: Script, context: Context) -> Imported | None:
    """Return the run of a script that this one starts (bash train.sh); raises UsageError where it is not here."""
    for words in script.commands:
        named = words[1:] if words[0] in ("bash", "sh", "source", "sbatch", ".") else words
        if not named or not named[0].endswith((".sh", ".bash", ".slurm", ".sbatch")):
            continue
        there = context.find(named[0])
        if there is None:
            raise absent(named[0])
        text, path = there
        if path is not None and path == context.path:  # it starts itself again
            continue
        inside = replace(context, text=text, path=path)
        if (found := from_shell(parse_shell(text), inside)) is not None:
            if given := named[1:]:
                passed = " ".join(given)
                found.report.effects.append(f"{named[0]} is given {passed[:80]}: not applied to it")
            return found
    return None


def _ask(script: Script) -> None:
    """Raise UsageError for what is started where no reader knows it: by its absent config, or its name."""
    for words, environment in zip(script.commands, script.prefixes, strict=True):
        program = started(words, environment)
        if program is None or not (program.launcher or program.is_module):
            continue
        wanted = named_file(program)
        if wanted is not None and wanted.endswith((".yaml", ".yml", ".toml")):
            raise absent(wanted)
        if program.launcher:
            raise unknown(program.program)


def _training(script: Script, context: Context) -> Imported | None:
    if any(words[:2] == ["nemo", "llm"] for words in script.commands):
        raise UnsupportedError(
            "config: this line starts a NeMo 2 recipe, which is not read",
            hint="state the run by flags: vramwise plan MODEL --task sft --framework megatron --tensor-parallel N",
        )
    for tool, reader in (("ms-swift", ms_swift.read_script), ("verl", verl.read_script)):
        if (found := reader(script, version=context.version_of(tool))) is not None:
            return found
    programs = [
        program
        for words, environment in zip(script.commands, script.prefixes, strict=True)
        if (program := started(words, environment)) is not None
    ]
    runs = [run for program in programs if (run := _of_command(program, context)) is not None]
    if len(runs) > 1:
        runs[0].report.effects.append(f"the file starts {len(runs)} runs: the first is planned")
    return runs[0] if runs else None


def _of_command(program: Started, context: Context) -> Imported | None:
    for reader in _COMMANDS:
        if (found := reader(program, context)) is not None:
            return found
    nested = nested_config(program, context)
    if nested is None:
        return None
    if nested.python:
        found = from_python(nested.python, replace(context, path=nested.path, text=nested.python))
        return _with_preset(found, program)
    inside = replace(context, path=nested.path, text=nested.comment, tool=None)
    return from_mapping(nested.document, nested.comment, inside)


def _with_preset(found: Imported, program: Started) -> Imported:
    name = flags(program.arguments).get("deepspeed")
    return supervised.with_deepspeed(found, name) if isinstance(name, str) else found


def from_python(source: str, context: Context) -> Imported:
    """Return the run that a Python source builds."""
    calls = read_calls(source, gpus=context.gpus)
    if isinstance(model := calls.names.get("model"), dict) and "llm" in model:
        return supervised.read_xtuner(calls, calls.names, version=context.version_of("xtuner"))
    if calls.has(*unsloth.LOADERS):
        return unsloth.read(calls, version=context.version_of("unsloth"))
    if calls.has("LLM") and not calls.has("GRPOTrainer", "SFTTrainer"):
        values = trl_script.constants(calls.last("LLM"))
        unknown_keys = [
            key
            for key, value in (calls.last("LLM") or {}).items()
            if value is UNKNOWN and key != "*0"
        ]
        if isinstance(model := (calls.last("LLM") or {}).get("*0"), str):
            values.setdefault("model", model)
        served = vllm.read(values, version=context.version_of("vllm"), is_call=True)
        for key in unknown_keys:
            Settings.note_unknown(served.report, key)
        if "tensor_parallel_size" in unknown_keys and context.gpus is None:
            served.report.effects.append(
                "tensor_parallel_size is what the machine has: planned on 1 GPU, say --gpus N"
            )
        return served
    if _has_trl(calls):
        return trl_script.read(calls, version=context.version_of("trl"))
    if calls.has("TrainingArguments", "Seq2SeqTrainingArguments"):
        return hf_script.from_calls(calls, version=context.version_of("hf-trainer"))
    shell = "\n".join(
        re.sub(r"^[#!%\s]+", "", line)
        for line in text_lines(source)
        if re.match(r"\s*[#!%]*\s*[!%]", line) or "vllm serve" in line or "swift " in line
    )
    if nemo := _NEMO.search(source):
        raise UnsupportedError(
            f"config: this is a NeMo 2 recipe ({shown('recipe', nemo.group().strip('( '))}), which is not read",
            hint="state the run by flags: vramwise plan MODEL --task sft --framework megatron --tensor-parallel N",
        )
    inside = replace(context, written={**_dumped(calls, shell), **context.written})
    if shell and (found := from_shell(parse_shell(shell), inside)) is not None:
        return found
    raise unknown()


def _dumped(calls: Calls, shell: str) -> dict[str, str]:
    """Return the config files that a notebook writes by json.dump or yaml.dump, as LLaMA-Factory's does."""
    if not calls.has("json.dump", "yaml.dump", "yaml.safe_dump"):
        return {}
    marks = {"model_name_or_path", "base_model", "finetuning_type"}
    given = [
        value for value in calls.names.values() if isinstance(value, dict) and marks & set(value)
    ]
    files = re.findall(r"[\w./-]+\.(?:json|ya?ml)", shell)
    if len(given) != 1 or not files:
        return {}
    kept = {key: value for key, value in given[0].items() if value is not UNKNOWN}
    return {files[0]: json.dumps(kept, default=str)}


def text_lines(source: str) -> list[str]:
    """Return a source's lines, continued ones joined, so that a cell's command is whole."""
    joined = re.sub(r"\\\n\s*#?(?:\s*!)?", " ", source)
    return joined.split("\n")


def _has_trl(calls: Calls) -> bool:
    return calls.has(*(name for names, _ in trl_script.TRAINERS for name in names))
