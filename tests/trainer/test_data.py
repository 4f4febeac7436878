import json
import sys

import pytest

from planner.errors import MissingExtraError, UnknownNameError, UsageError
from trainer.chat import check_chat_template
from trainer.config import DatasetSection
from trainer.data import Order, check_columns, load_samples, tokenize_prompt
from trainer.sft_data import tokenize_example
from trainer.small_model import small_tokenizer
from trainer.tasks import gsm8k
from trainer.tasks.arithmetic import ArithmeticTask

ROWS = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "answer": str(n + 1)} for n in range(5)]


@pytest.mark.parametrize(
    ("operation", "compute"),
    [("add", int.__add__), ("subtract", int.__sub__), ("multiply", int.__mul__)],
)
def test_generated_answers_are_right(operation, compute):
    task = ArithmeticTask(operations=[operation], digits=2, examples=2, size=50)
    for sample in (task[index] for index in range(50)):
        *worked, question = sample["prompt"].split("\n")
        left, _, right, _ = question.split()
        assert sample["answer"] == str(compute(int(left), int(right)))
        for line in worked:
            left, _, right, _, answer = line.split()
            assert int(answer) == compute(int(left), int(right))


def test_the_seed_decides_the_samples():
    first = [ArithmeticTask(seed=1)[index] for index in range(20)]
    assert first == [ArithmeticTask(seed=1)[index] for index in range(20)]
    assert first != [ArithmeticTask(seed=2)[index] for index in range(20)]


@pytest.mark.parametrize(
    "options", [{"digits": 0}, {"operations": ["divide"]}, {"size": "x"}, {"nonsense": 1}]
)
def test_bad_task_options_are_refused(options, tmp_path):
    section = DatasetSection(name="arithmetic", options=options)
    with pytest.raises(UsageError, match=r"train\.dataset\.options"):
        load_samples(section, root=tmp_path)


def test_every_epoch_is_a_permutation_and_a_resume_goes_on():
    order = Order(size=7, seed=3)
    taken = order.take(3)
    state = json.loads(json.dumps(order.state()))
    rest = order.take(11)
    assert sorted(taken + rest[:4]) == list(range(7))
    assert sorted(rest[4:]) == list(range(7))
    assert taken + rest[:4] != rest[4:]
    resumed = Order(size=7, seed=99)
    resumed.restore(state)
    assert resumed.take(11) == rest


def test_an_order_refuses_another_data_set():
    state = Order(size=7, seed=3).state()
    with pytest.raises(UsageError, match="8 samples"):
        Order(size=8, seed=3).restore(state)


def write(path, suffix):
    import pandas

    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    elif suffix == ".csv":
        pandas.DataFrame(ROWS).to_csv(path, index=False)
    elif suffix == ".parquet":
        pandas.DataFrame(ROWS).to_parquet(path)
    else:
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ""])
def test_local_files_are_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / f"rows{suffix}", suffix)
    samples = load_samples(DatasetSection(name=f"rows{suffix}"), root=tmp_path)
    assert len(samples) == len(ROWS)
    assert samples[3]["prompt"] == ROWS[3]["prompt"]


def test_json_lines_need_no_other_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path / "rows.jsonl", ".jsonl")
    samples = load_samples(DatasetSection(name="rows.jsonl"), root=tmp_path)
    assert samples[0]["prompt"] == ROWS[0]["prompt"]
    with pytest.raises(MissingExtraError):
        load_samples(DatasetSection(name="absent/hub-id"), root=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", '{"prompt": "a"}\n{oops\n', "line 2"),
        ("list.jsonl", "[1]\n", "expected an object"),
        ("absent.jsonl", None, "no such file"),
        ("rows.xml", "<a/>", "cannot read rows.xml"),
    ],
)
def test_an_unreadable_file_is_one_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=said) as caught:
        load_samples(DatasetSection(name=name), root=tmp_path)
    assert "\n" not in caught.value.message


def test_a_data_set_without_the_column_says_which_it_has(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n', encoding="utf-8")
    section = DatasetSection(name="rows.jsonl")
    samples = load_samples(section, root=tmp_path)
    with pytest.raises(UsageError, match="has the columns question"):
        check_columns(samples, section, task="grpo")
    with pytest.raises(UsageError, match=r"completion \+ prompt or messages or text"):
        check_columns(samples, section, task="sft")
    named = DatasetSection(name="rows.jsonl", prompt_column="question")
    check_columns(samples, named, task="grpo")


def test_an_empty_data_set_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n", encoding="utf-8")
    section = DatasetSection(name="rows.jsonl")
    with pytest.raises(UsageError, match="no samples"):
        check_columns(load_samples(section, root=tmp_path), section, task="grpo")


def test_a_hub_name_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(UsageError, match="cannot load 'someone/nothing'") as caught:
        load_samples(DatasetSection(name="someone/nothing"), root=tmp_path)
    assert "\n" not in caught.value.message


def test_gsm8k_rows_become_a_chat_and_the_final_number():
    sample = gsm8k.to_sample(
        {"question": "How many? ", "answer": "2*600=<<2*600=1200>>\n#### 1,200"}
    )
    assert sample["answer"] == "1200"
    assert [message["role"] for message in sample["prompt"]] == ["system", "user"]
    assert sample["prompt"][-1]["content"] == "How many?"


def test_reasoning_gym_by_name(tmp_path):
    pytest.importorskip("reasoning_gym")
    samples = load_samples(DatasetSection(name="reasoning-gym/leg_counting"), root=tmp_path)
    assert {"prompt", "answer", "entry"} <= set(samples[0])
    with pytest.raises(UnknownNameError) as caught:
        load_samples(DatasetSection(name="reasoning-gym/leg_countin"), root=tmp_path)
    assert "leg_counting" in (caught.value.hint or "")


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match="needs packages"):
        load_samples(DatasetSection(name="reasoning-gym/leg_counting"), root=tmp_path)


SECTION = DatasetSection(name="x")


def test_a_long_prompt_keeps_its_end():
    prompt = tokenize_prompt({"prompt": "abcdef"}, small_tokenizer(), SECTION, limit=3)
    assert small_tokenizer().decode(prompt.token_ids) == "def"


def test_messages_need_a_chat_template():
    with pytest.raises(UsageError, match="no chat template"):
        check_chat_template(small_tokenizer())
    tokenizer = small_tokenizer(chat=True)
    section = DatasetSection(name="x", chat=True, system_prompt="be brief")
    prompt = tokenize_prompt({"prompt": "hi"}, tokenizer, section, limit=99)
    assert prompt.text == "<system>be brief\n<user>hi\n<assistant>"
    assert prompt.conversational


def trained_text(sample, *, loss_on="completion", limit=99):
    tokenizer = small_tokenizer(chat=True)
    ids, trained = tokenize_example(sample, tokenizer, SECTION, loss_on=loss_on)
    ids, trained = ids[:limit], trained[:limit]
    assert len(ids) == len(trained)
    return tokenizer.decode([token for token, flag in zip(ids, trained, strict=True) if flag])


@pytest.mark.parametrize(
    ("sample", "completion", "everything"),
    [
        ({"prompt": "ab", "completion": "cd"}, "cd</s>", "bcd</s>"),
        ({"text": "abc"}, "bc</s>", "bc</s>"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "a\n",
            "user>q\n<assistant>a\n",
        ),
    ],
    ids=["prompt and completion", "text", "messages"],
)
def test_only_what_is_asked_is_trained_on(sample, completion, everything):
    assert trained_text(sample) == completion
    assert trained_text(sample, loss_on="all") == everything


def test_a_cut_example_is_cut_at_its_end():
    assert trained_text({"prompt": "ab", "completion": "cdef"}, limit=4) == "cd"


def test_an_empty_completion_is_refused():
    with pytest.raises(UsageError, match="empty completion"):
        trained_text({"prompt": "ab", "completion": ""})
