"""YAML and JSON mappings -> the importer of the tool they belong to."""

from collections.abc import Callable
from typing import Any

from planner.errors import UsageError
from planner.importers import (
    axolotl,
    llamafactory,
    ms_swift,
    policies,
    supervised,
    torchtitan,
    torchtune,
    trl,
    verl,
    vllm,
)
from planner.importers.context import Context, absent
from planner.importers.detect import TOOLS, tool_of_mapping, written_version
from planner.importers.inherited import inherits, whole
from planner.importers.launch import apply_launch, from_accelerate, from_deepspeed, from_words
from planner.importers.loading import flatten
from planner.importers.settings import Imported, Settings

Reader = Callable[[dict[str, Any], dict[str, Any], str | None, Context], Imported]


def unknown(program: str = "") -> UsageError:
    """Return the error for what no importer knows; `program`: what a launcher starts."""
    what = f": {program[:80]}, which this line starts," if program else " as any tool's config"
    return UsageError(
        f"config: not recognised{what}" + (" is of no tool that is known" if program else ""),
        hint=f"these can be read: {', '.join(TOOLS)}; or state the run by flags: vramwise plan MODEL --task ...",
    )


def comments(text: str) -> str:
    """Return a file's comment lines, where commands and counts are told."""
    return "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))[:20_000]


def from_mapping(document: dict[str, Any], text: str, context: Context) -> Imported:
    """Return a mapping as a run; `text` is what stands around it, `context.path` its file."""
    flat = flatten(document)
    kind = context.tool or tool_of_mapping(document, flat, text)
    if kind is None:
        if "architectures" in document and "hidden_size" in flat:
            raise UsageError(
                "config: this is a model's config.json, not a run",
                hint="vramwise plan PATH takes it as the model",
            )
        raise unknown()
    version = context.version or written_version(text) or context.version_of(kind)
    reader = _READERS.get(kind)
    if reader is None:
        raise unknown()
    return reader(document, flat, version, context)


def _trl(
    document: dict[str, Any], flat: dict[str, Any], version: str | None, context: Context
) -> Imported:
    kind = context.tool or tool_of_mapping(document, flat, context.text) or "trl"
    spread = context.launch or from_words(f"{document.get('launch', '')} {comments(context.text)}")
    values = {key: value for key, value in flat.items() if key != "launch"}
    return trl.read(
        values,
        version=version,
        assumed=trl.ASSUMED.get(kind, trl.VERSION),
        tool=kind,
        launch=spread,
        base=context.path,
    )


def _launch(
    document: dict[str, Any], flat: dict[str, Any], version: str | None, context: Context
) -> Imported:
    kind = context.tool or tool_of_mapping(document, flat, context.text) or "accelerate"
    settings = Settings(flat, tool=kind, version=version or "any", assumed=False)
    settings.used.update(flat)
    recipe: dict[str, Any] = {}
    found = from_accelerate(document) if kind == "accelerate" else from_deepspeed(document)
    gpus = apply_launch(settings, recipe, found)
    settings.effect(
        "this file says how a run is spread out, not what runs: give the model and the method beside it"
    )
    return settings.finish("", recipe=recipe, lora={}, engine={}, gpus=gpus)


def _nemo_rl(
    document: dict[str, Any], flat: dict[str, Any], version: str | None, context: Context
) -> Imported:
    if not inherits(document):
        return policies.read_nemo_rl(flat, version=version)
    merged, missing = whole(document, context)
    flat = flatten(merged)
    if missing and not flat.get("policy.model_name") and context.model is None:
        raise absent(missing[0])
    found = policies.read_nemo_rl(flat, version=version)
    found.report.effects += [
        f"defaults: {name} is not here: what it sets is planned by NeMo-RL's own examples"
        for name in missing
    ]
    return found


_READERS: dict[str, Reader] = {
    "axolotl": lambda d, flat, version, c: axolotl.read(
        flat, version=version, base=c.path, text=comments(c.text)
    ),
    "llamafactory": lambda d, flat, version, c: llamafactory.read(
        flat, version=version, base=c.path, text=comments(c.text), launch=c.launch
    ),
    "torchtune": lambda d, flat, version, c: torchtune.read(
        flat, version=version, text=comments(c.text)
    ),
    "ms-swift": lambda d, flat, version, c: ms_swift.read(flat, version=version),
    "verl": lambda d, flat, version, c: verl.read(flat, version=version),
    "vllm": lambda d, flat, version, c: vllm.read(d, version=version),
    "vllm-recipe": lambda d, flat, version, c: vllm.read_recipe(
        d, version=version, variant=c.variant
    ),
    "skyrl": lambda d, flat, version, c: policies.read_skyrl(flat, version=version),
    "nemo-rl": _nemo_rl,
    "areal": lambda d, flat, version, c: policies.read_areal(flat, version=version),
    "roll": lambda d, flat, version, c: policies.read_roll(flat, version=version),
    "litgpt": lambda d, flat, version, c: supervised.read_litgpt(flat, version=version),
    "llm-foundry": lambda d, flat, version, c: supervised.read_llm_foundry(
        flat, version=version, gpus=from_words(comments(c.text)).gpus
    ),
    "prime-rl": lambda d, flat, version, c: supervised.read_prime(flat, version=version),
    "torchtitan": lambda d, flat, version, c: torchtitan.read(flat, version=version),
    **dict.fromkeys(("trl", "alignment-handbook", "open-r1"), _trl),
    **dict.fromkeys(("accelerate", "deepspeed"), _launch),
}
