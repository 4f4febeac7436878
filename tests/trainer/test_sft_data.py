"""Dialogues as tokens: which of them the loss is on, by hand, against the template and against TRL."""

import json

import pytest

from planner.errors import UsageError
from trainer.chat import Chat
from trainer.config import DatasetSection
from trainer.data import Samples
from trainer.sft_data import read_examples, tokenize_example
from trainer.small_model import small_tokenizer

SECTION = DatasetSection(name="x")
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}\n{% endgeneration %}{% else %}{{ m['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and loop.last %}(think)\n{% endif %}{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Like Qwen3's: the last turn has what earlier ones have lost, so no earlier text is a prefix."""
TOOLS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<nothink>\n{% endif %}"
)
ANSWERS = ("a" * 25, "b" * 25, "c" * 12)


def dialogue(*answers):
    turns = []
    for number, answer in enumerate(answers):
        turns += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": answer},
        ]
    return turns


def tokenizer_of(template=None):
    tokenizer = small_tokenizer(chat=True)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def trained(sample, *, template=None, loss_on="completion", section=SECTION):
    tokenizer = tokenizer_of(template)
    ids, flags = tokenize_example(sample, tokenizer, section, loss_on=loss_on)
    assert len(ids) == len(flags)
    return tokenizer.decode([token for token, flag in zip(ids, flags, strict=True) if flag])


@pytest.mark.parametrize("template", [None, MARKED], ids=["turn by turn", "generation marks"])
def test_the_loss_is_on_every_turn_of_the_assistant(template):
    """65 of 65 tokens: 62 characters and three line ends; the last turn alone has 13."""
    sample = {"messages": dialogue(*ANSWERS)}
    text = trained(sample, template=template)
    assert text == "".join(f"{answer}\n" for answer in ANSWERS)
    assert len(text) == 65
    assert trained(sample, template=template, loss_on="last") == "c" * 12 + "\n"


def test_marks_agree_with_transformers_own_mask():
    tokenizer = tokenizer_of(MARKED)
    messages = dialogue(*ANSWERS)
    made = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, flags = tokenize_example({"messages": messages}, tokenizer, SECTION, loss_on="completion")
    assert (ids, flags) == (made["input_ids"], made["assistant_masks"])


def test_a_template_that_forgets_its_thoughts_still_shows_each_turn():
    assert (
        trained({"messages": dialogue("one", "two")}, template=FORGETFUL) == "one\n(think)\ntwo\n"
    )


def test_an_answer_that_repeats_the_question_is_told_apart():
    turns = [{"role": "user", "content": "a a"}, {"role": "assistant", "content": "a a"}]
    assert trained({"messages": turns * 2}, template=FORGETFUL) == "a a\n(think)\na a\n"


def test_a_turn_that_the_template_hides_is_said():
    broken = (
        "{% for m in messages %}{% if not loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UsageError, match="does not show where"):
        trained({"messages": dialogue("one", "two")}, template=broken)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "completion": [
                    {"role": "assistant", "content": "look"},
                    {"role": "tool", "content": "3"},
                    {"role": "assistant", "content": "three"},
                ],
            },
            "look\nthree\n",
        ),
        ({"prompt": dialogue("old")[:2] + dialogue("x")[:1], "completion": "new"}, "new\n"),
        (
            {
                "prompt": dialogue("old") + dialogue("x")[:1],
                "completion": [{"role": "assistant", "content": "new"}],
            },
            "new\n",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "a\n",
        ),
        ({"messages": [*dialogue("a"), {"role": "user", "content": None}]}, "a\n"),
    ],
    ids=[
        "completion of turns",
        "text after messages",
        "after older turns",
        "ShareGPT",
        "empty cells",
    ],
)
@pytest.mark.parametrize("template", [None, MARKED], ids=["plain", "marked"])
def test_prompt_and_completion_may_be_lists(sample, expected, template):
    section = SECTION
    if "conversations" in sample:
        section = DatasetSection(name="x", messages_column="conversations")
    assert trained(sample, template=template, section=section) == expected


def test_pairs_are_what_trl_makes_of_them():
    """Masks of prompt and completion: transformers tokenises both as one text, as TRL 1.16 does."""
    tokenizer = tokenizer_of()
    prompt, completion = dialogue("ab")[:1], dialogue("ab")[1:]
    ids, flags = tokenize_example(
        {"prompt": prompt, "completion": completion}, tokenizer, SECTION, loss_on="completion"
    )
    whole = tokenizer.apply_chat_template(prompt + completion)["input_ids"]
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    assert ids == whole
    assert flags == [0] * len(before) + [1] * (len(whole) - len(before))


def test_tools_and_settings_reach_the_template():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"x": None}}}
    for tools in ([tool], json.dumps([tool])):
        text = trained({"messages": dialogue("a"), "tools": tools}, template=TOOLS, loss_on="all")
        assert "tools>add" in text
    section = DatasetSection(name="x", chat_template_kwargs={"enable_thinking": False})
    sample = {"messages": dialogue("a")}
    assert "<nothink>" in trained(sample, template=TOOLS, section=section, loss_on="all")
    assert "<nothink>" not in trained(sample, template=TOOLS, loss_on="all")
    own = sample | {"chat_template_kwargs": {"enable_thinking": True}}
    assert "<nothink>" not in trained(own, template=TOOLS, section=section, loss_on="all")


def read(rows, *, limit=99, template=None, **fields):
    return read_examples(
        Samples(rows, source="rows"),
        tokenizer_of(template),
        DatasetSection(name="x", **fields),
        limit=limit,
        loss_on="completion",
    )


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        ({"messages": dialogue("a")[:1]}, None, "row 2: a dialogue without an assistant turn"),
        ({"messages": "hi"}, None, "row 2: messages: expected a list of messages, got 'hi'"),
        ({"messages": [{"content": "x"}]}, None, "row 2: messages: a message without a role"),
        ({"messages": dialogue("a"), "tools": "["}, TOOLS, "row 2: tools: not JSON"),
        ({"messages": dialogue("a"), "tools": '[{"a": 1}]'}, None, "no place for tools"),
        (
            {"messages": [{"role": "tool", "content": "x"}, *dialogue("a")]},
            "{% for m in messages %}{% if m['role'] != 'tool' %}<{{ m['role'] }}>{{ m['content'] }}\n"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            "row 2: the chat template leaves out messages of role 'tool'",
        ),
        (
            {"messages": [{"role": "system", "content": "x"}, *dialogue("a")]},
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}",
            "row 2: the chat template refuses the messages: no system role",
        ),
        ({"prompt": "a", "completion": ""}, None, "row 2: empty completion"),
        ({"prompt": "a", "completion": None}, None, "row 2: no completion"),
        ({"prompt": None, "completion": "a"}, None, "row 2: no prompt"),
        ({"text": ""}, None, "row 2: an empty text"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_row_that_cannot_be_learnt_is_one_line_with_its_number(row, template, said):
    with pytest.raises(UsageError) as caught:
        read([{"messages": dialogue("a")}, row], template=template)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_rows_are_counted_before_anything_loads():
    rows = [
        {"prompt": "ab", "completion": "c"},
        {"prompt": "ab", "completion": "cdef"},
        {"prompt": "abcdef", "completion": "c"},
    ]
    examples = read(rows, limit=4)
    assert (examples.rows, examples.lengths, examples.cut) == ((0, 1), (4, 4), 1)
    assert examples.summary() == (
        "2 of 3 rows are used; 1 are cut at 4 tokens; 1 dropped: its prompt alone fills the length"
    )
    assert examples.text_of(1) == "ab[cd]"
    with pytest.raises(UsageError, match="no row has anything to learn within 2 tokens"):
        read(rows, limit=2)


def test_a_long_data_set_shows_how_far_it_is(monkeypatch):
    import trainer.sft_data

    monkeypatch.setattr(trainer.sft_data, "PROGRESS_ROWS", 2)
    said: list[str] = []
    rows = [{"prompt": "a", "completion": "b"}] * 5
    section = DatasetSection(name="x")
    read_examples(
        Samples(rows, source="rows"), tokenizer_of(None), section, limit=9, loss_on="completion", say=said.append
    )  # fmt: skip
    assert said == ["tokenised 2 of 5 rows", "tokenised 4 of 5 rows"]


def test_a_setting_that_the_template_never_reads_is_refused():
    with pytest.raises(UsageError, match="enable_thinking is not in this model's chat template"):
        read([{"messages": dialogue("a")}], chat_template_kwargs={"enable_thinking": False})


def test_the_system_prompt_goes_before_messages_that_have_none():
    section = DatasetSection(name="x", system_prompt="be brief")
    whole = trained({"messages": dialogue("a")}, section=section, loss_on="all")
    assert whole.startswith("system>be brief\n<user>")
    own = [{"role": "system", "content": "own"}, *dialogue("a")]
    assert "brief" not in trained({"messages": own}, section=section, loss_on="all")


def test_the_chat_of_a_base_model_is_refused():
    with pytest.raises(UsageError, match="no chat template"):
        Chat(small_tokenizer()).render(dialogue("a"))
