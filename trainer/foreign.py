"""TRL's configs trained as they are: `vramwise train trl.yaml`, and what differs, a line a field."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers import import_config, looks_foreign
from planner.importers.trl_training import Converted, Difference, convert, resolve_shares
from planner.importers.trl_values import put
from planner.run.recipe import RunFile, Task
from trainer.config import DatasetSection, TrainSection, parse_run, read_run
from trainer.data import Samples, load_samples, tokenize_prompt
from trainer.prompt_data import CHECKED_ROWS


@dataclass(frozen=True, kw_only=True)
class Given:
    """What `vramwise train` was given: a run file, or another tool's config as one."""

    run: RunFile
    train: TrainSection
    root: Path
    """Where its relative paths count from: the file's folder; as in TRL, the current one for its configs."""
    title: str = ""
    """Tool and version of a foreign config."""
    differences: tuple[Difference, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Return what became of each field of a foreign config."""
        if not self.title:
            return []
        return [f"{self.title}: vramwise's own trainer runs", *(d.line for d in self.differences)]


def read_given(path: Path) -> Given:
    """Return the run that a file holds; raises VramwiseError naming the field that cannot be trained."""
    if not looks_foreign(path):
        run, train = read_run(path)
        return Given(run=run, train=train, root=path.parent)
    imported = import_config(path)
    converted = convert(imported)
    root = Path.cwd()
    differences = [*converted.differences, *_from_data(converted, root=root)]
    run, train = parse_run(converted.document, root=root)
    return Given(
        run=run,
        train=train,
        root=root,
        title=f"{imported.tool} {imported.version}",
        differences=tuple(differences),
    )


def _from_data(converted: Converted, *, root: Path) -> list[Difference]:
    """Settle what only the data decides: the loss of dialogues, the longest prompt, shares of all steps."""
    document = converted.document
    recipe, train = document["recipe"], document["train"]
    grpo = recipe.get("task") == Task.GRPO.value
    lengths = grpo and "prompt_length" not in recipe
    if not (converted.dialogues_in_full or lengths or converted.shares):
        return []
    section = DatasetSection(**train["dataset"])
    samples = load_samples(section, root=root)
    found: list[Difference] = []
    if converted.dialogues_in_full and len(samples) and section.messages_column in samples[0]:
        put(document, "train.loss_on", "all")
        found.append(_said("assistant_only_loss", "False", "train.loss_on all: a dialogue's every token, as in TRL"))  # fmt: skip
    if lengths:
        longest = _longest_prompt(document, samples, section)
        put(document, "recipe.prompt_length", longest)
        found.append(_said("prompts", "never cut", f"recipe.prompt_length {longest}, the longest of the data"))  # fmt: skip
    if converted.shares:
        steps = _steps(train, recipe, len(samples), grpo=grpo)
        resolve_shares(converted, steps=steps)
        for name in converted.shares:
            field = name.removeprefix("train.")
            found.append(_said(f"share of {steps} steps", f"{converted.shares[name]:g}", f"{name} {train[field]}"))  # fmt: skip
    return found


def _steps(train: dict[str, Any], recipe: dict[str, Any], rows: int, *, grpo: bool) -> int:
    if recipe.get("packing"):
        raise UsageError(
            "warmup_steps, eval_steps or save_steps is a share of the run's steps, which packing decides",
            hint="give it as a number of steps, or max_steps",
        )
    each = train.get("prompts_per_step") or recipe.get("micro_batch_size", 1) * recipe.get(
        "gradient_accumulation", 1
    )
    return max(1, math.ceil(train["epochs"] * rows / each))


def _longest_prompt(document: dict[str, Any], samples: Samples, section: DatasetSection) -> int:
    from trainer.model import load_tokenizer

    tokenizer = load_tokenizer(document["model"], revision=document.get("revision"))
    longest = 1
    for row in range(min(len(samples), CHECKED_ROWS)):
        if samples[row].get(section.prompt_column) is None:
            continue
        prompt = tokenize_prompt(samples[row], tokenizer, section, limit=10**9)
        longest = max(longest, len(prompt.token_ids))
    return longest


def _said(field: str, value: str, ours: str) -> Difference:
    return Difference(field=field, value=value, kind="same", ours=ours)
