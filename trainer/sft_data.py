"""SFT samples as tokens: which of them the loss is on, and what of the data set a run can use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from planner.errors import UsageError
from trainer.batching import ScoredSequence
from trainer.chat import Chat, Message, Span, as_messages, check_settings, read_tools
from trainer.config import DatasetSection
from trainer.data import Sample, Samples
from trainer.say import Say, silent

PROGRESS_ROWS = 5_000
"""Rows between two lines of progress while a data set is tokenised: seconds apart."""
MASKS_AWAY = "its prompt alone fills the length"


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The rows of a data set that can be trained on, tokenised when they are asked for."""

    samples: Samples
    tokenizer: Any
    section: DatasetSection
    loss_on: str
    limit: int
    """Longest sequence in tokens; longer ones are cut at their end."""
    rows: tuple[int, ...] = ()
    """Rows of the data set that have something to learn."""
    lengths: tuple[int, ...] = ()
    """Tokens of each, cut ones included."""
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ScoredSequence:
        sequence, _ = self._tokens(self.rows[index])
        return sequence

    def summary(self) -> str:
        """Return one line: how many rows are used, cut and dropped, and why."""
        parts = [f"{len(self.rows):,} of {len(self.samples):,} rows are used"]
        if self.cut:
            parts.append(f"{self.cut:,} are cut at {self.limit:,} tokens")
        parts += [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        return "; ".join(parts)

    def text_of(self, index: int) -> str:
        """Return an example as text, what the loss is on between brackets."""
        sequence = self[index]
        pieces, inside = [], False
        for token, scored in zip(sequence.token_ids, sequence.scored, strict=True):
            if scored != inside:
                pieces.append("]" if inside else "[")
                inside = scored
            pieces.append(self.tokenizer.decode([token]))
        return "".join(pieces) + ("]" if inside else "")

    def _tokens(self, row: int) -> tuple[ScoredSequence, bool]:
        """Return a row's sequence, and whether it was cut. Errors name the row, counted from 1."""
        try:
            ids, trained = tokenize_example(
                self.samples[row], self.tokenizer, self.section, loss_on=self.loss_on
            )
        except UsageError as error:
            raise UsageError(
                f"train.dataset: row {row + 1}: {error.message.removeprefix('train.dataset: ')}",
                hint=error.hint,
            ) from None
        cut = len(ids) > self.limit
        scored = tuple(bool(flag) for flag in trained[: self.limit])
        return ScoredSequence(token_ids=tuple(ids[: self.limit]), scored=scored), cut


def read_examples(
    samples: Samples,
    tokenizer: Any,
    section: DatasetSection,
    *,
    limit: int,
    loss_on: str,
    say: Say = silent,
) -> Examples:
    """Return the samples that can be trained on: every row is tokenised once, before any weight loads.

    A row that cannot be understood is an error that names it; one that is too long to have anything
    left to learn is dropped and counted. Raises UsageError when nothing is left.
    """
    made = Examples(
        samples=samples, tokenizer=tokenizer, section=section, loss_on=loss_on, limit=limit
    )
    check_settings(tokenizer, section.chat_template_kwargs)
    rows, lengths, cut, dropped = [], [], 0, Counter[str]()
    seen: set[str] = set()
    for row in range(len(samples)):
        if row and row % PROGRESS_ROWS == 0:
            say(f"tokenised {row:,} of {len(samples):,} rows")
        _check_roles(samples[row], tokenizer, section, seen, row)
        sequence, was_cut = made._tokens(row)
        if not any(sequence.scored):
            dropped[MASKS_AWAY if was_cut else "one token: nothing comes before it"] += 1
            continue
        rows.append(row)
        lengths.append(len(sequence.token_ids))
        cut += was_cut
    if not rows:
        reasons = ", ".join(f"{count} rows: {reason}" for reason, count in dropped.items())
        raise UsageError(
            f"train.dataset: no row has anything to learn within {limit} tokens ({reasons})",
            hint="raise recipe.context",
        )
    return Examples(
        samples=samples,
        tokenizer=tokenizer,
        section=section,
        loss_on=loss_on,
        limit=limit,
        rows=tuple(rows),
        lengths=tuple(lengths),
        cut=cut,
        dropped=dropped,
    )


def tokenize_example(
    sample: Sample, tokenizer: Any, section: DatasetSection, *, loss_on: str
) -> tuple[list[int], list[int]]:
    """Return (token ids, 1 where the loss is on) of one sample, whole.

    Messages are tokenised as one text, as TRL does. A prompt and a completion are, too, unless that
    changes the prompt's own tokens: then each is by itself, for that is what the model will be given.
    """
    dialogue = as_dialogue(sample, section)
    if dialogue is not None:
        ids, trained = _tokenize_dialogue(*dialogue, sample, tokenizer, section, loss_on=loss_on)
    elif pair_of(sample, section):
        ids, trained = _tokenize_pair(sample, tokenizer, section, loss_on=loss_on)
    else:
        text = sample.get(section.text_column)
        if not isinstance(text, str) or not text:
            raise UsageError(f"an empty {section.text_column}", hint="drop the row")
        ids = _with_end(tokenizer(text, add_special_tokens=True)["input_ids"], tokenizer)
        trained = [1] * len(ids)
    # the first token is predicted from nothing
    trained[0] = 0
    return ids, trained


def as_dialogue(sample: Sample, section: DatasetSection) -> tuple[list[Message], int] | None:
    """Return (messages, the first one that may be learnt) of a sample; None for plain text."""
    system = section.system_prompt
    if sample.get(section.messages_column) is not None:
        messages = as_messages(sample[section.messages_column], what=section.messages_column)
        return _with_system(messages, system), 0
    prompt, completion = sample.get(section.prompt_column), sample.get(section.completion_column)
    lists = isinstance(prompt, list | tuple) or isinstance(completion, list | tuple)
    if prompt is None or completion is None or not (lists or section.chat or system):
        return None
    first = _turns(prompt, "user", section.prompt_column)
    first = _with_system(first, system)
    return [*first, *_turns(completion, "assistant", section.completion_column)], len(first)


def _turns(value: Any, role: str, what: str) -> list[Message]:
    if isinstance(value, list | tuple):
        return as_messages(value, what=what)
    if not str(value):
        raise UsageError(f"empty {what}", hint="drop the row")
    return [{"role": role, "content": str(value)}]


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Return messages that begin with the system prompt, unless they have one of their own."""
    if not system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def chat_of(sample: Sample, tokenizer: Any, section: DatasetSection) -> Chat:
    """Return the chat template with the tools and settings of a sample: a row's own come first."""
    settings = dict(section.chat_template_kwargs)
    own = sample.get("chat_template_kwargs")
    if isinstance(own, dict):
        settings |= {key: value for key, value in own.items() if value is not None}
    tools = read_tools(sample.get(section.tools_column)) if section.tools_column else None
    if tools:
        check_settings(tokenizer, {}, tools=True)
    return Chat(tokenizer, settings, tools)


def _tokenize_dialogue(
    messages: list[Message],
    first: int,
    sample: Sample,
    tokenizer: Any,
    section: DatasetSection,
    *,
    loss_on: str,
) -> tuple[list[int], list[int]]:
    chat = chat_of(sample, tokenizer, section)
    text, spans = chat.assistant_spans(messages, first=first)
    if loss_on == "last":
        spans = spans[-1:]
    elif loss_on == "all":
        spans = [(0, len(text))]
    return _tokenize_spans(text, spans, tokenizer)


def _tokenize_spans(
    text: str, spans: Sequence[Span], tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Return the tokens of `text`, and 1 for those that reach into one of `spans`."""
    call = partial(tokenizer, add_special_tokens=False)
    if getattr(tokenizer, "is_fast", False):
        made = call(text, return_offsets_mapping=True)
        offsets = made["offset_mapping"]
        flags = [
            int(any(start < high and end > low for low, high in spans)) for start, end in offsets
        ]
        return list(made["input_ids"]), flags
    # without offsets: cut where a span begins or ends, and tokenise the pieces
    ids: list[int] = []
    flags = []
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    for low, high in pairwise(edges):
        piece = call(text[low:high])["input_ids"]
        ids += piece
        flags += [int(any(start <= low and high <= end for start, end in spans))] * len(piece)
    return ids, flags


def pair_of(sample: Sample, section: DatasetSection) -> bool:
    """Return whether a row is a prompt and its completion: both columns are there, and not both empty."""
    names = (section.prompt_column, section.completion_column)
    return all(name in sample for name in names) and any(sample[name] is not None for name in names)


def _tokenize_pair(
    sample: Sample, tokenizer: Any, section: DatasetSection, *, loss_on: str
) -> tuple[list[int], list[int]]:
    for name in (section.prompt_column, section.completion_column):
        if sample.get(name) is None:
            raise UsageError(f"no {name}", hint="drop the row")
    prompt, completion = str(sample[section.prompt_column]), str(sample[section.completion_column])
    if not completion:
        raise UsageError(f"empty {section.completion_column}", hint="drop the row")
    before = list(tokenizer(prompt, add_special_tokens=True)["input_ids"])
    ids = list(tokenizer(prompt + completion, add_special_tokens=True)["input_ids"])
    if before and before[-1] == tokenizer.eos_token_id and ids[: len(before)] != before:
        before.pop()  # a tokenizer that ends every text by itself
    if ids[: len(before)] != before or len(ids) == len(before):
        ids = before + list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    ids = _with_end(ids, tokenizer)
    flag = 1 if loss_on == "all" else 0
    return ids, [flag] * len(before) + [1] * (len(ids) - len(before))


def _with_end(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return `ids` with the end token, once."""
    end = tokenizer.eos_token_id
    return list(ids) if end is None or (ids and ids[-1] == end) else [*ids, end]


def _check_roles(
    sample: Sample, tokenizer: Any, section: DatasetSection, seen: set[str], row: int
) -> None:
    """Raise UsageError, with the row, for a role that the template leaves out."""
    try:
        dialogue = as_dialogue(sample, section)
        if dialogue is None or {str(m["role"]) for m in dialogue[0]} <= seen:
            return
        chat_of(sample, tokenizer, section).check_roles(dialogue[0], seen)
    except UsageError as error:
        raise UsageError(
            f"train.dataset: row {row + 1}: {error.message}", hint=error.hint
        ) from None
