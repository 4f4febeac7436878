"""What people type after a verb: a pasted command, standard input, counts such as 8k, words of other tools."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from planner.errors import UsageError
from planner.units import parse_count

TOOLS = frozenset({
    "trl", "vllm", "accelerate", "torchrun", "deepspeed", "python", "python3", "axolotl",
    "llamafactory-cli", "swift", "megatron", "unsloth", "tune", "litgpt", "xtuner", "sglang",
    "openrlhf", "uv", "uvx", "bash", "sh", "CUDA_VISIBLE_DEVICES", "vramwise",
})  # fmt: skip
"""First words of command lines that can be read."""
OURS = {
    "--gpu": 1,
    "--vram": 1,
    "--host-ram": 1,
    "--gpus": 1,
    "--nodes": 1,
    "--save": 1,
    "--json": 0,
    "--check": 0,
    "--offline": 0,
}
"""Flags of ours that may follow another tool's command; the number is of their values."""
MAX_INPUT = 1 << 20
SUBJECTS = ("plan", "advise", "compare")


def is_command(text: str) -> bool:
    """Say whether a subject is a command line of another tool, not a name or a file."""
    first = re.split(r"[\s=]", text.strip(), maxsplit=1)[0]
    return bool(re.search(r"\s", text.strip())) and first.rsplit("/", 1)[-1] in TOOLS


def rejoined(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with another tool's command that follows a verb as one of them: plan trl grpo ..."""
    given = list(arguments)
    if (
        len(given) < 3
        or given[0] not in SUBJECTS
        or given[1] not in TOOLS
        or Path(given[1]).exists()
    ):
        return given
    command, ours, rest = [given[1]], [], given[2:]
    while rest:
        word = rest.pop(0)
        flag = word.split("=", 1)[0]
        if flag in OURS:
            count = 0 if "=" in word else OURS[flag]
            ours += [word, *rest[:count]]
            rest = rest[count:]
        else:
            command.append(word)
    return [given[0], shlex.join(command), *ours]


def read_input() -> str:
    """Return what is piped or pasted."""
    if sys.stdin.isatty():
        print("paste a config, a command or a run file, then press Ctrl-D", file=sys.stderr)
    data = sys.stdin.buffer.read(MAX_INPUT + 1)
    if len(data) > MAX_INPUT:
        raise UsageError(
            "subject: more than 1 MiB was piped",
            hint="a config is small; a log goes to `vramwise explain`",
        )
    from planner.importers.pasted import decode

    text = decode(data)
    if not text.strip():
        raise UsageError("subject: nothing was piped", hint="vramwise plan - < config.yaml")
    return text


def own_command(text: str) -> list[str] | None:
    """Return verb and arguments of a command line of ours, as it is copied from a page; None for anything else."""
    from planner.importers.pasted import unwrap

    try:
        words = shlex.split(unwrap(text).replace("\\\n", " "), comments=True)
    except ValueError:  # a quote that does not end: some file
        return None
    if words[:1] == ["uvx"]:
        del words[0]
    return words[1:] if len(words) > 1 and Path(words[0]).name == "vramwise" else None


def is_run_file(text: str) -> bool:
    """Say whether a text is a run.yaml of ours: a model beside a recipe, a machine or a train section."""
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    return "model" in keys and bool(keys & {"recipe", "machine", "train"})


def count(flag: str, value: str | int) -> int:
    """Return a count as people type it, for a flag."""
    return value if isinstance(value, int) else parse_count(value, field=flag.lstrip("-"))
