import math

import pytest

from planner.errors import UnknownNameError, UsageError
from trainer.config import RewardSection
from trainer.data import Prompt
from trainer.rewards import check_reward_columns, load_rewards, score

ANSWERS = ["4", "10", "7"]


def prompts(*, conversational=False):
    return [
        Prompt(token_ids=(1,), text="?", sample={"answer": answer}, conversational=conversational)
        for answer in ANSWERS
    ]


def scored(rewards, texts, *, conversational=False):
    return score(
        rewards,
        prompts=prompts(conversational=conversational),
        texts=texts,
        completion_ids=[list(range(len(text))) for text in texts],
    )


def built_in(name, **options):
    return load_rewards([RewardSection(name=name, options=options)], root=None)


def from_file(tmp_path, code, name="reward", **settings):
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    return load_rewards([RewardSection(name=f"mine.py:{name}", **settings)], root=tmp_path)


def test_exact_compares_the_first_line():
    assert scored(built_in("exact"), [" 4\n5", "11", "7 "]).totals == [1, 0, 1]
    assert scored(built_in("exact", first_line=False), [" 4\n5", "10", "7"]).totals == [0, 1, 1]


def test_numeric_finds_the_final_answer_in_any_form():
    texts = ["so it is $\\frac{8}{2}$", "the answer is 10.0", "it is 8"]
    assert scored(built_in("numeric"), texts).totals == [1, 1, 0]


def test_format_matches_the_whole_completion_unless_told_not_to():
    texts = ["<a>1</a>", "x <a>1</a>", "1"]
    assert scored(built_in("format", pattern="<a>.*</a>"), texts).totals == [1, 0, 0]
    loose = built_in("format", pattern="<a>.*</a>", whole=False)
    assert scored(loose, texts).totals == [1, 1, 0]


def test_length_is_full_inside_and_falls_off_outside():
    texts = ["ab", "abcd", "abcdefgh"]
    assert scored(built_in("length", low=4, high=4), texts).totals == [0.5, 1, 0]


def test_weights_add_up_and_each_reward_is_kept_apart():
    sections = [
        RewardSection(name="exact", weight=2),
        RewardSection(name="length", options={"high": 4}),
    ]
    result = scored(load_rewards(sections, root=None), ["4", "x", "7"])
    assert result.totals == [3, 1, 3]
    assert result.by_reward == {"exact": [1, 0, 1], "length": [1, 1, 1]}
    assert set(result.seconds) == {"exact", "length"}


def test_a_function_gets_trls_arguments(tmp_path):
    code = (
        "def reward(prompts, completions, answer, completion_ids, **kwargs):\n"
        "    assert prompts == ['?'] * 3 and len(completion_ids) == 3\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert scored(from_file(tmp_path, code), ["4", "10", "0"]).totals == [1, 1, 0]


def test_conversational_completions_are_messages(tmp_path):
    code = "def reward(completions, **k):\n    return [float(c[0]['role'] == 'assistant') for c in completions]\n"
    result = scored(from_file(tmp_path, code), ["a", "b", "c"], conversational=True)
    assert result.totals == [1, 1, 1]
    assert scored(built_in("exact"), ["4", "b", "7"], conversational=True).totals == [1, 0, 1]


def test_an_async_reward_is_awaited(tmp_path):
    code = (
        "import asyncio\n"
        "async def reward(completions, **kwargs):\n"
        "    await asyncio.sleep(0)\n"
        "    return [1.0] * len(completions)\n"
    )
    assert scored(from_file(tmp_path, code), ["a", "b", "c"]).totals == [1, 1, 1]


def test_one_failing_sample_costs_only_itself(tmp_path):
    code = "def reward(completions, **k):\n    return [1 / len(c) for c in completions]\n"
    result = scored(from_file(tmp_path, code, per_sample=True), ["ab", "", "abcd"])
    assert result.by_reward["reward"] == [0.5, None, 0.25]
    assert math.isnan(result.totals[1])
    assert not result.bad
    (failure,) = result.failures
    assert (failure.reward, failure.index) == ("reward", 1)
    assert "ZeroDivisionError" in failure.error


def test_none_is_silence_and_nan_is_bad(tmp_path):
    code = "def reward(completions, **k):\n    return [None, 1.0, 2.0]\n"
    result = scored(from_file(tmp_path, code), ["a", "b", "c"])
    assert result.totals[1:] == [1, 2]
    assert not result.bad
    code = "def reward(completions, **k):\n    return [float('nan'), 1.0, 2.0]\n"
    assert scored(from_file(tmp_path, code), ["a", "b", "c"]).bad


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.py:reward", "no such file"),
        ("broken.py:reward", "does not import"),
        ("mine.py:rewrad", "unknown function in mine.py"),
        ("exat", "unknown reward"),
    ],
)
def test_what_does_not_load_is_one_line(tmp_path, name, said):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text("def reward(**k): ...\n", encoding="utf-8")
    with pytest.raises((UsageError, UnknownNameError), match=said) as caught:
        load_rewards([RewardSection(name=name)], root=tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("format", {"pattern": "("}),
        ("format", {}),
        ("exact", {"colum": 1}),
        ("length", {"high": 0}),
    ],
)
def test_bad_options_are_refused(name, options):
    with pytest.raises(UsageError, match=rf"train\.rewards\.{name}\.options"):
        built_in(name, **options)


def test_a_missing_answer_column_is_said_before_the_run():
    with pytest.raises(UsageError, match="reads the column 'answer'"):
        check_reward_columns([RewardSection(name="exact")], ["prompt", "solution"])
    named = RewardSection(name="exact", options={"column": "solution"})
    check_reward_columns([named], ["prompt", "solution"])


def test_reasoning_gym_scores_its_own_tasks(tmp_path):
    pytest.importorskip("reasoning_gym")
    from trainer.config import DatasetSection
    from trainer.data import load_samples

    samples = load_samples(DatasetSection(name="reasoning-gym/leg_counting"), root=tmp_path)
    sample = samples[0]
    prompt = Prompt(token_ids=(1,), text="?", sample=sample, conversational=False)
    texts = [sample["answer"], "none"]
    result = score(
        built_in("reasoning-gym"), prompts=[prompt] * 2, texts=texts, completion_ids=[[1], [1]]
    )
    assert result.totals[0] == 1
    assert result.totals[1] < 1
