"""Samples: from built-in tasks, local files or the hub to tokenised prompts in a fixed order."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import MissingExtraError, UsageError, VramwiseError
from trainer.chat import Chat, as_messages, read_tools
from trainer.config import DatasetSection
from trainer.tasks import gsm8k
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.reasoning_gym import PREFIX as REASONING_GYM
from trainer.tasks.reasoning_gym import ReasoningGymTask

FILE_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
Sample = dict[str, Any]


class Samples:
    """Raw samples (column -> value), each with at least the columns the task needs."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        source: str,
        convert: Any = dict,
        limit: int | None = None,
    ) -> None:
        self._rows = rows
        self._limit = limit
        self._convert = convert
        self.source = source

    def __len__(self) -> int:
        return len(self._rows) if self._limit is None else min(self._limit, len(self._rows))

    def __getitem__(self, index: int) -> Sample:
        return self._convert(self._rows[index])


def load_samples(section: DatasetSection, *, root: Path) -> Samples:
    """Return the samples that `section` names, the first `limit` of them; relative paths count from `root`."""
    name, limit = section.name, section.limit
    path = Path(name).expanduser()
    path = path if path.is_absolute() else root / path
    if name == "arithmetic":
        return Samples(ArithmeticTask(**section.options), source=name, limit=limit)  # type: ignore[arg-type]
    if name.startswith(REASONING_GYM):
        task = ReasoningGymTask(name.removeprefix(REASONING_GYM), **section.options)
        return Samples(task, source=name, limit=limit)  # type: ignore[arg-type]
    if section.options:
        raise UsageError(
            f"train.dataset.options: {name!r} takes none", hint="only built-in tasks have options"
        )
    if name == "gsm8k":
        rows = _from_hub(
            gsm8k.HUB_ID, config=section.config or gsm8k.HUB_CONFIG, split=section.split
        )
        return Samples(rows, source=name, convert=gsm8k.to_sample, limit=limit)
    if path.suffix in FILE_LOADERS or path.exists():
        return Samples(_from_path(path, split=section.split), source=str(name), limit=limit)
    rows = _from_hub(name, config=section.config, split=section.split)
    return Samples(rows, source=name, limit=limit)


def check_columns(samples: Samples, section: DatasetSection, *, task: str) -> None:
    """Raise UsageError when the first sample lacks what `task` (grpo or sft) needs."""
    if not len(samples):
        raise UsageError(f"train.dataset: {samples.source} has no samples")
    columns = samples[0]
    if task == "grpo":
        needed = [{section.prompt_column}]
    else:
        needed = [
            {section.prompt_column, section.completion_column},
            {section.messages_column},
            {section.text_column},
        ]
    if not any(group <= set(columns) for group in needed):
        wanted = " or ".join(" + ".join(sorted(group)) for group in needed)
        raise UsageError(
            f"train.dataset: {samples.source} has the columns {', '.join(sorted(columns))}; "
            f"{task} needs {wanted}",
            hint="name yours with prompt_column, completion_column, messages_column or text_column",
        )


@dataclass
class Order:
    """Which sample comes next: a new permutation every epoch; its state is three integers."""

    size: int
    seed: int
    shuffle: bool = True
    epoch: int = 0
    position: int = 0
    _order: list[int] = field(default_factory=list, repr=False)

    def take(self, count: int) -> list[int]:
        """Return the next `count` sample indices, over the end of an epoch if need be."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._order:
                self._order = list(range(self.size))
                if self.shuffle:
                    random.Random(f"{self.seed}/{self.epoch}").shuffle(self._order)
            part = self._order[self.position : self.position + count - len(taken)]
            taken += part
            self.position += len(part)
            if self.position >= self.size:
                self.epoch, self.position, self._order = self.epoch + 1, 0, []
        return taken

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {key: value for key, value in asdict(self).items() if key != "_order"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; refuses another data set size."""
        if state["size"] != self.size:
            raise UsageError(
                f"train.dataset: has {self.size} samples, the checkpoint was made with {state['size']}"
            )
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        self.epoch, self.position, self._order = state["epoch"], state["position"], []


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One tokenised prompt and its sample."""

    token_ids: tuple[int, ...]
    text: str
    sample: Sample
    conversational: bool
    messages: list[dict[str, Any]] | None = None
    """What the text was rendered from, the system prompt included; None = a plain prompt."""


def tokenize_prompt(
    sample: Sample, tokenizer: Any, section: DatasetSection, *, limit: int
) -> Prompt:
    """Return the prompt of `sample`; a prompt over `limit` tokens keeps its last ones."""
    prompt = sample[section.prompt_column]
    messages = _messages(prompt, section)
    chat = Chat(tokenizer, section.chat_template_kwargs, _tools(sample, section))
    if messages is None:
        text = str(prompt)
        ids = tokenizer(text, add_special_tokens=True)["input_ids"]
        if not ids:
            raise UsageError(
                f"train.dataset: an empty {section.prompt_column}", hint="drop the row"
            )
    else:
        text = chat.render(messages, generate=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(
        token_ids=tuple(ids[-limit:]),
        text=text,
        sample=sample,
        conversational=messages is not None,
        messages=messages,
    )


def _messages(prompt: Any, section: DatasetSection) -> list[dict[str, Any]] | None:
    system = [{"role": "system", "content": section.system_prompt}] if section.system_prompt else []
    if isinstance(prompt, list | tuple):
        messages = as_messages(prompt, what=section.prompt_column)
        return (
            messages if messages[:1] and messages[0]["role"] == "system" else [*system, *messages]
        )
    if not section.chat and section.system_prompt is None:
        return None
    return [*system, {"role": "user", "content": str(prompt)}]


def _tools(sample: Sample, section: DatasetSection) -> list[Any] | None:
    return read_tools(sample.get(section.tools_column)) if section.tools_column else None


def _from_path(path: Path, *, split: str) -> Any:
    """Return the rows of a local file, or of a folder that holds data files."""
    if not path.exists():
        raise UsageError(f"train.dataset: no such file: {path}")
    # JSON lines are read here: a machine without `datasets` can train on them
    datasets: Any = None if path.suffix == ".jsonl" else _datasets()
    try:
        if path.is_dir() and (path / "dataset_info.json").exists():
            return datasets.load_from_disk(str(path))
        if path.is_dir():
            return datasets.load_dataset(str(path), split=split)
        if path.suffix == ".jsonl":
            return _read_jsonl(path)
        loader = FILE_LOADERS.get(path.suffix)
        if loader is None:
            raise UsageError(
                f"train.dataset: cannot read {path.name}", hint=f"one of {', '.join(FILE_LOADERS)}"
            )
        return datasets.load_dataset(loader, data_files=str(path), split="train")
    except VramwiseError:
        raise
    except Exception as error:  # the readers raise whatever their parsers raise
        raise UsageError(f"train.dataset: cannot read {path}: {_first_line(error)}") from None


def _read_jsonl(path: Path) -> list[Sample]:
    rows: list[Sample] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"train.dataset: {path.name} line {number}: {error.msg}") from None
        if not isinstance(row, dict):
            raise UsageError(f"train.dataset: {path.name} line {number}: expected an object")
        rows.append(row)
    return rows


def _from_hub(name: str, *, config: str | None, split: str) -> Any:
    datasets = _datasets()
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # hub, network, parser: all mean that this data set is not to be had
        raise UsageError(
            f"train.dataset: cannot load {name!r}: {_first_line(error)}",
            hint="a built-in task (arithmetic, gsm8k), reasoning-gym/TASK, a file or a hub id",
        ) from None


def _datasets() -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise MissingExtraError("this data set", "train") from None
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
