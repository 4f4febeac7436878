"""Dialogues by the model's chat template: the text, and which characters of it the assistant wrote.

A template with generation marks ({% generation %}) says so itself. Without them a dialogue is rendered
turn by turn: what a turn adds to the turns before it is that turn's. A template that renders an earlier
turn otherwise than a last one (it drops its reasoning, say) is asked where the turn's content went, by
putting another text in its place. The loss is then on what the model writes there: the content and what
ends the turn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from planner.errors import UsageError

Message = dict[str, Any]
Span = tuple[int, int]
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Of {"from", "value"} messages (ShareGPT)."""
OURS = ("tools", "chat_template", "tokenize", "add_generation_prompt", "messages", "conversation")
"""What a chat template is given by the trainer itself."""
STAND_IN = "\ue000vramwise\ue001"
"""Stands for a content; its ends are characters that no text has."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A tokenizer's chat template with what it is given beside the messages."""

    tokenizer: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Such as enable_thinking."""
    tools: Sequence[Any] | None = None

    def render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return the text of `messages`; `generate` ends it where the assistant would begin."""
        check_chat_template(self.tokenizer)
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(self.tools) if self.tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self.settings,
            )
        except Exception as error:  # a template raises what it likes, and so does jinja
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise UsageError(f"the chat template refuses the messages: {reason}") from None
        return text

    def assistant_spans(
        self, messages: Sequence[Message], *, first: int = 0
    ) -> tuple[str, list[Span]]:
        """Return the whole text, and what of it the assistant's turns from message `first` on are."""
        text = self.render(messages)
        turns = [
            index
            for index, message in enumerate(messages)
            if index >= first and message.get("role") == "assistant"
        ]
        if not turns:
            raise UsageError("a dialogue without an assistant turn: there is nothing to learn")
        if GENERATION_MARK.search(_template_text(self.tokenizer, self.tools)):
            return text, self._marked(messages, skip=_assistants(messages[:first]))
        return text, [self._turn(messages, index, text) for index in turns]

    def _marked(self, messages: Sequence[Message], *, skip: int) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=list(self.tools) if self.tools else None,
            chat_template=_template_text(self.tokenizer, self.tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.settings},
        )
        return [(start, end) for start, end in rendered[1][0]][skip:]

    def _turn(self, messages: Sequence[Message], index: int, text: str) -> Span:
        """Return the span of message `index`, what ends its turn included."""
        before = self.render(messages[:index], generate=True) if index else ""
        alone = self.render(messages[: index + 1])
        start = len(before) if text.startswith(before) and index else None
        said = messages[index]["content"] if isinstance(messages[index]["content"], str) else ""
        if start is not None and text.startswith(alone) and said.strip() in alone[start:]:
            return start, len(alone)
        # rendered otherwise when more turns follow: where is its content, and what follows it?
        content = self._content(messages, index, text)
        within = self._content(messages[: index + 1], index, alone)
        if content is None or within is None:
            raise UsageError(
                f"message {index + 1}: the chat template does not show where this assistant turn is",
                hint="a template with {% generation %} marks says so; or loss_on: all",
            )
        ending = alone[within[1] :]
        end = content[1] + len(ending) if text.startswith(ending, content[1]) else content[1]
        return content[0] if start is None else min(start, content[0]), end

    def _content(self, messages: Sequence[Message], index: int, text: str) -> Span | None:
        """Return where in `text` the content of message `index` is; None where the template drops it."""
        changed = list(messages)
        changed[index] = {**messages[index], "content": STAND_IN}
        place = self.render(changed).find(STAND_IN)
        if place < 0:
            return None
        rest = len(self.render(changed)) - place - len(STAND_IN)
        return place, len(text) - rest

    def check_roles(self, messages: Sequence[Message], seen: set[str]) -> None:
        """Raise UsageError for a role whose messages the template leaves out; `seen` grows."""
        for index, message in enumerate(messages):
            role = str(message.get("role"))
            if role in seen or not isinstance(message.get("content"), str):
                continue
            seen.add(role)
            changed = list(messages)
            changed[index] = {**message, "content": STAND_IN}
            if STAND_IN not in self.render(changed):
                raise UsageError(f"the chat template leaves out messages of role {role!r}")


def as_messages(value: Any, *, what: str) -> list[Message]:
    """Return messages in their usual form: role and content, without the empty cells of a table."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise UsageError(f"{what}: expected a list of messages, got {str(value)[:60]!r}")
    messages = []
    for item in value:
        message = {str(key): part for key, part in item.items() if part is not None}
        if "from" in message and "value" in message:
            role = str(message.pop("from"))
            message = {"role": ROLES.get(role, role), "content": message.pop("value"), **message}
        if "role" not in message:
            raise UsageError(f"{what}: a message without a role: {str(dict(item))[:60]}")
        message.setdefault("content", "")
        messages.append(message)
    return messages


def read_tools(value: Any) -> list[Any] | None:
    """Return the tools of a row: a list of JSON schemas, or JSON that holds one."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(f"tools: not JSON ({error.msg})") from None
    if not value:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise UsageError(f"tools: expected a list of JSON schemas, got {str(value)[:60]!r}")
    return [_without_empty(tool) for tool in value]


def check_chat_template(tokenizer: Any) -> None:
    """Raise UsageError when the base model cannot be talked to in messages."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "model: this base model has no chat template, but the data set holds messages",
            hint="use an instruct model, or string prompts without dataset.chat",
        )


def check_settings(tokenizer: Any, settings: Mapping[str, Any], *, tools: bool = False) -> None:
    """Raise UsageError for settings (or tools) that the template never looks at."""
    names = [*settings, *(["tools"] if tools else [])]
    if not names:
        return
    check_chat_template(tokenizer)
    known = _variables(_template_text(tokenizer, ["a tool"] if tools else None))
    for name in names:
        if name in known:
            continue
        if name == "tools":
            raise UsageError(
                "train.dataset.tools_column: this model's chat template has no place for tools",
                hint="a model that calls tools, or tools_column: null",
            )
        raise UsageError(
            f"train.dataset.chat_template_kwargs: {name} is not in this model's chat template",
            hint=f"it reads {', '.join(sorted(known - set(OURS))) or 'none'}",
        )


def _template_text(tokenizer: Any, tools: Any) -> str:
    text: str = tokenizer.get_chat_template(tools=tools)
    return text


@cache
def _variables(template: str) -> frozenset[str]:
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # generation marks are an extension of transformers: for this they may as well be blanks
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(plain)))


def _assistants(messages: Sequence[Message]) -> int:
    return sum(message.get("role") == "assistant" for message in messages)


def _without_empty(value: Any) -> Any:
    """Return nested data without the empty cells that a table gives every row."""
    if isinstance(value, Mapping):
        return {key: _without_empty(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_without_empty(part) for part in value]
    return value
