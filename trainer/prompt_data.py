"""The prompts of a GRPO run: which rows can be used, said before a weight is loaded."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import UsageError
from trainer.chat import Chat
from trainer.config import DatasetSection, RewardSection
from trainer.data import Order, Prompt, Samples, tokenize_prompt
from trainer.reward_functions import NEEDED_COLUMNS

CHECKED_ROWS = 20_000
"""Rows that are tokenised before the run; the others are looked at when their turn comes."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The rows of a data set as prompts of at most `limit` tokens."""

    samples: Samples
    tokenizer: Any
    section: DatasetSection
    limit: int
    needed: tuple[str, ...] = ()
    """Columns that built-in rewards read."""
    checked: int = 0
    used: int = 0
    cut: int = 0
    """Prompts over the limit: they lose their first tokens."""
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason, with the first row that it holds for -> rows."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Prompt:
        """Return row `index`; raises UsageError, with the row counted from 1, where it cannot be used."""
        try:
            return self._read(index, self.limit)
        except UsageError as error:
            reason = error.message.removeprefix("train.dataset: ")
            raise UsageError(f"train.dataset: row {index + 1}: {reason}", hint=error.hint) from None

    def _read(self, index: int, limit: int) -> Prompt:
        sample = self.samples[index]
        for column in (self.section.prompt_column, *self.needed):
            if sample.get(column) is None:
                raise UsageError(f"no {column}")
        return tokenize_prompt(sample, self.tokenizer, self.section, limit=limit)

    def summary(self) -> str:
        """Return one line: how many rows are used, cut and dropped, and why."""
        of = "" if self.checked == len(self) else f" looked at, of {len(self):,}"
        parts = [f"{self.used:,} of {self.checked:,} rows{of} are used"]
        if self.cut:
            parts.append(
                f"{self.cut:,} prompts lose their beginning: over {self.limit:,} tokens "
                f"(recipe.prompt_length), the longest has {self.longest:,}"
            )
        parts += [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        return "; ".join(parts)

    def take(self, order: Order, count: int) -> list[Prompt]:
        """Return the next `count` prompts in `order`; rows that cannot be used are passed over."""
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < count:
            (index,) = order.take(1)
            try:
                prompts.append(self[index])
            except UsageError:
                refused += 1
                if refused > len(self) and not prompts:
                    raise
        return prompts


def read_prompts(
    samples: Samples,
    tokenizer: Any,
    section: DatasetSection,
    *,
    limit: int,
    rewards: Sequence[RewardSection] = (),
) -> Prompts:
    """Return the prompts of `samples`, looked through; raises UsageError where none can be used."""
    needed = tuple(
        reward.options.get("column", NEEDED_COLUMNS[reward.name])
        for reward in rewards
        if reward.name in NEEDED_COLUMNS
    )
    prompts = Prompts(
        samples=samples, tokenizer=tokenizer, section=section, limit=limit, needed=needed
    )
    checked = min(len(samples), CHECKED_ROWS)
    cut = longest = 0
    dropped: Counter[str] = Counter()
    first: dict[str, int] = {}
    hint = None
    roles: set[str] = set()
    for index in range(checked):
        try:
            prompt = prompts._read(index, 10**9)
            length = len(prompt.token_ids)
        except UsageError as error:
            reason = error.message.removeprefix("train.dataset: ")
            hint = hint or error.hint
            first.setdefault(reason, index + 1)
            dropped[reason] += 1
            continue
        _check_roles(prompt, prompts, roles, index)
        cut += length > limit
        longest = max(longest, length)
    reasons = Counter(
        {f"{reason} (row {first[reason]})": count for reason, count in dropped.items()}
    )
    used = checked - sum(dropped.values())
    if not used and len(dropped) == 1:
        (reason,) = dropped
        raise UsageError(f"train.dataset: {reason} in any of {checked:,} rows", hint=hint)
    if not used:
        said = "; ".join(f"{count:,} rows: {reason}" for reason, count in reasons.items())
        raise UsageError(f"train.dataset: no row can be used: {said}", hint=hint)
    if cut == used:
        raise UsageError(
            f"train.dataset: every prompt is longer than {limit:,} tokens (the longest {longest:,}): all "
            "would lose their beginning",
            hint=f"recipe.prompt_length: {longest}, or a model with a longer context",
        )
    return Prompts(
        samples=samples,
        tokenizer=tokenizer,
        section=section,
        limit=limit,
        needed=needed,
        checked=checked,
        used=used,
        cut=cut,
        longest=longest,
        dropped=reasons,
    )


def _check_roles(prompt: Prompt, prompts: Prompts, seen: set[str], row: int) -> None:
    """Raise UsageError, with the row, for a role that the template leaves out."""
    if prompt.messages is None or {str(m["role"]) for m in prompt.messages} <= seen:
        return
    chat = Chat(prompts.tokenizer, prompts.section.chat_template_kwargs, None)
    try:
        chat.check_roles(prompt.messages, seen)
    except UsageError as error:
        raise UsageError(
            f"train.dataset: row {row + 1}: {error.message}", hint=error.hint
        ) from None
