"""The text that harm is measured on, as rows of tokens: a file, a task's prompts, or a run's own data set."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.errors import UsageError
from trainer.chat import Chat, as_messages
from trainer.config import DatasetSection
from trainer.data import FILE_LOADERS, Sample, load_samples, tokenize_prompt

ROW_TOKENS = 256
LONGEST = 1 << 20
"""Tokens of one prompt; longer ones lose their beginning."""
HELD_EVERY = 5
"""Of five rows one is kept for the check: text of the same kind that no code has seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Rows of token ids."""

    source: str
    rows: Tensor
    """[R, T], measured on."""
    held: Tensor
    """[R', T], kept for the check."""


def read_calibration(
    tokenizer: Any, section: DatasetSection, *, root: Path, tokens: int
) -> Calibration:
    """Return about `tokens` tokens of a text file, or of the samples that `section` names, and a fourth more.

    Samples are texts, prompts or messages, in their own order. Raises UsageError where there are too few.
    """
    count = -(-tokens // ROW_TOKENS)
    held = -(-count // (HELD_EVERY - 1))
    needed = (count + held) * ROW_TOKENS
    ids: list[int] = []
    for piece in _pieces(tokenizer, section, root):
        ids += piece
        if len(ids) >= needed:
            break
    if len(ids) < needed:
        fewer = (len(ids) // ROW_TOKENS) * (HELD_EVERY - 1) // HELD_EVERY * ROW_TOKENS
        raise UsageError(
            f"calibration: {section.name} has {len(ids):,} tokens, {needed:,} are needed ({tokens:,} to measure "
            f"on, the others for the check)",
            hint=f"--tokens {fewer}, or more text" if fewer else "give more text",
        )
    rows = torch.tensor(ids[:needed]).view(-1, ROW_TOKENS)
    apart = torch.arange(len(rows)) % HELD_EVERY == HELD_EVERY - 1
    apart[-1] = True  # where the rows are no whole fives, the last one
    return Calibration(source=section.name, rows=rows[~apart], held=rows[apart])


def _pieces(tokenizer: Any, section: DatasetSection, root: Path) -> Iterator[list[int]]:
    path = Path(section.name).expanduser()
    path = path if path.is_absolute() else root / path
    if path.is_file() and path.suffix not in FILE_LOADERS:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"calibration: cannot read {path}: {str(error)[:120]}") from None
        yield list(tokenizer(text, add_special_tokens=True)["input_ids"])
        return
    samples = load_samples(section, root=root)
    end = tokenizer.eos_token_id
    for index in range(len(samples)):
        yield _sample(samples[index], tokenizer, section)
        if end is not None:
            yield [end]


def _sample(sample: Sample, tokenizer: Any, section: DatasetSection) -> list[int]:
    """Return one sample's tokens: its messages, else its prompt as a run is given it, else its text."""
    messages = sample.get(section.messages_column)
    if messages is not None:
        chat = Chat(tokenizer, section.chat_template_kwargs)
        text = chat.render(as_messages(messages, what=section.messages_column))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if sample.get(section.prompt_column) is not None:
        return list(tokenize_prompt(sample, tokenizer, section, limit=LONGEST).token_ids)
    if sample.get(section.text_column) is not None:
        return list(tokenizer(str(sample[section.text_column]))["input_ids"])
    raise UsageError(
        f"calibration: {section.name} has the columns {', '.join(sorted(sample))[:120]}",
        hint=f"{section.text_column}, {section.prompt_column} or {section.messages_column} is read",
    )
