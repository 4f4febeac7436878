"""A run from its data to its folder: what is said before it, and what is left of it when it fails."""

import json
import math
import os
import signal
import threading
import time

import pytest
import torch

from planner.errors import UsageError, VramwiseError
from planner.run.runfile import validate
from trainer.checkpoint import checkpoints, latest
from trainer.config import LossSection, TrainSection, parse_run
from trainer.engines.transformers import TransformersEngine
from trainer.losses import LossSettings
from trainer.policy_update import step_normaliser
from trainer.sampling import StopStrings
from trainer.small_model import small_tokenizer

DIGITS = "def reward(completions, **k):\n    return [sum(c.isdigit() for c in t) / 6 for t in completions]\n"


def rewarded(tmp_path, code=DIGITS, **settings):
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    return {"rewards": [{"name": "mine.py:reward", **settings}]}


def rows(tmp_path, *samples):
    text = "\n".join(json.dumps(sample) for sample in samples)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    return {"dataset": {"name": "rows.jsonl"}}


# data, before the model


def test_rows_are_counted_before_the_model_loads(document, train_run_of, tmp_path):
    made = document(
        recipe={"prompt_length": 12},
        train={
            **rewarded(tmp_path),
            **rows(
                tmp_path,
                {"prompt": "1 + 1 ="},
                {"prompt": "x" * 30},
                {"prompt": None},
                {"prompt": ""},
                {"prompt": [{"content": "no role"}]},
                {"prompt": "2 + 2 ="},
            ),
            "prompts_per_step": 4,
            "steps": 3,
        },
    )
    said = []
    result = train_run_of(made, say=said.append)
    assert result.steps == 3  # twelve prompts out of three usable rows: bad ones are passed over
    (line,) = [text for text in said if "rows are used" in text]
    assert line.startswith("3 of 6 rows are used; 1 prompts lose their beginning: over 12 tokens")
    assert "the longest has 30" in line
    assert "1 dropped: no prompt (row 3)" in line
    assert "1 dropped: an empty prompt (row 4)" in line
    assert "a message without a role: {'content': 'no role'} (row 5)" in line


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{"prompt": "x" * 50}, {"prompt": "y" * 60}], "every prompt is longer than 40 tokens"),
        ([{"prompt": ""}, {"prompt": ""}], "an empty prompt in any of 2 rows"),
        ([{"prompt": None}, {"prompt": ""}], "no row can be used: 1 rows: no prompt"),
        ([{"prompt": [{"role": "user"}, 3]}] * 2, "expected a list of messages"),
    ],
)
def test_data_that_cannot_be_used_is_one_line_and_leaves_nothing(
    document, train_run_of, tmp_path, samples, said
):
    made = document(train={**rewarded(tmp_path), **rows(tmp_path, *samples)})
    with pytest.raises(UsageError, match=said) as caught:
        train_run_of(made)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_role_that_the_template_leaves_out_is_named_with_its_row(small_model, tmp_path):
    from transformers import AutoTokenizer

    from trainer.config import DatasetSection
    from trainer.data import Samples
    from trainer.prompt_data import read_prompts

    tokenizer = AutoTokenizer.from_pretrained(small_model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    ask = {"role": "user", "content": "1+1="}
    talks = [{"prompt": [ask]}, {"prompt": [{"role": "tool", "content": "2"}, ask]}]
    section = DatasetSection(name="talks")
    with pytest.raises(
        UsageError, match=r"row 2: the chat template leaves out messages of role 'tool'"
    ):
        read_prompts(Samples(talks, source="talks"), tokenizer, section, limit=40)


def test_rows_without_what_a_reward_reads_are_dropped(document, train_run_of, tmp_path):
    made = document(
        train={
            "rewards": ["exact"],
            **rows(tmp_path, {"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": None}),
            "prompts_per_step": 1,
        }
    )
    said = []
    train_run_of(made, say=said.append)
    assert any("1 dropped: no answer (row 2)" in line for line in said)


def test_a_step_is_not_many_epochs(document, train_run_of, tmp_path):
    data = rows(tmp_path, {"prompt": "1 + 1 ="}, {"prompt": "2 + 2 ="})
    made = document(train={**rewarded(tmp_path), **data, "prompts_per_step": 32})
    with pytest.raises(UsageError, match=r"prompts_per_step: 32 .* the data set: .* 16 times"):
        train_run_of(made)
    del made["train"]["prompts_per_step"]
    said = []
    train_run_of(made, say=said.append)  # 16 / 4 generations = 4 prompts by the recipe
    assert any("a step takes all 2 of the data set" in line for line in said)


def test_message_prompts_get_the_system_prompt_and_reach_rewards_as_messages(
    document, train_run_of, tmp_path
):
    code = (
        "def reward(prompts, completions, **k):\n"
        "    assert prompts[0] == [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'q'}]\n"
        "    assert completions[0][0]['role'] == 'assistant'\n"
        "    return [1.0] * len(completions)\n"
    )
    made = document(
        train={
            **rewarded(tmp_path, code),
            **rows(tmp_path, {"prompt": [{"role": "user", "content": "q"}]}),
            "steps": 1,
        }
    )
    made["train"]["dataset"]["system_prompt"] = "be brief"
    assert train_run_of(made).steps == 1


# the output folder


def test_overwrite_keeps_the_old_run_until_the_new_one_has_made_a_step(
    document, train_run_of, tmp_path
):
    train_run_of(document(train=rewarded(tmp_path)))
    old = latest(tmp_path / "out").path
    before = (old / "adapter_model.safetensors").read_bytes()
    # one that does not fit, and one whose first step fails
    small = document(train={**rewarded(tmp_path), "overwrite": True, "device_memory": "1MiB"})
    broken = document(train={**rewarded(tmp_path, "def reward(**k):\n    1 / 0\n")})
    broken["train"]["overwrite"] = True
    for made in (small, broken):
        with pytest.raises(VramwiseError):
            train_run_of(made)
        assert (old / "adapter_model.safetensors").read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir() if "replaced" in path.name) == []
    again = document(train={**rewarded(tmp_path), "overwrite": True, "steps": 1})
    train_run_of(again)
    assert [each.step for each in checkpoints(tmp_path / "out")] == [1]


def test_a_failed_start_leaves_nothing_and_the_mended_run_starts(document, train_run_of, tmp_path):
    with pytest.raises(VramwiseError, match=r"failed on every completion: ZeroDivisionError"):
        train_run_of(document(train=rewarded(tmp_path, "def reward(**k):\n    1 / 0\n")))
    assert not (tmp_path / "out").exists()
    assert train_run_of(document(train=rewarded(tmp_path))).steps == 2


def test_a_reward_that_breaks_later_stops_the_run_with_its_state(document, train_run_of, tmp_path):
    code = (
        "calls = 0\n"
        "def reward(completions, **k):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 1: raise ConnectionError('judge')\n"
        "    return [float(len(t)) for t in completions]\n"
    )
    made = document(train={**rewarded(tmp_path, code), "steps": 9, "max_bad_steps": 2})
    with pytest.raises(VramwiseError, match=r"2 steps in a row .*ConnectionError\('judge'\)"):
        train_run_of(made)
    assert latest(tmp_path / "out").step == 3


def test_sigterm_saves_although_a_reward_hangs(document, train_run_of, tmp_path):
    code = (
        "import time\nfrom pathlib import Path\n"
        "calls = 0\n"
        "def reward(completions, **k):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 2:\n"
        f"        Path({str(tmp_path / 'hangs')!r}).touch()\n"
        "        7 ** (10 ** 10)\n"
        "    return [float(len(t)) for t in completions]\n"
    )

    def terminate():
        while not (tmp_path / "hangs").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    made = document(train={**rewarded(tmp_path, code), "steps": 5})
    result = train_run_of(made)
    assert (result.stopped_by, result.steps) == (signal.SIGTERM, 1)
    saved = latest(tmp_path / "out")
    assert saved.step == 1
    # the step that was cut short is done again
    assert saved.state()["order"]["position"] == 4
    assert train_run_of(document(train=made["train"] | rewarded(tmp_path)), resume=True).steps == 5


# memory that runs out outside the update


def test_a_rollout_out_of_memory_is_done_again_with_fewer_at_once(
    document, train_run_of, tmp_path, monkeypatch
):
    whole, waves = TransformersEngine._run, []

    def run(self, rows, *others):
        waves.append(len(rows))
        if len(rows) > 4:
            raise torch.OutOfMemoryError("no")
        return whole(self, rows, *others)

    monkeypatch.setattr(TransformersEngine, "_run", run)
    assert train_run_of(document(train={**rewarded(tmp_path), "steps": 1})).steps == 1
    assert waves == [16, 8, 4, 4, 4, 4]


def test_scoring_out_of_memory_is_done_again_with_smaller_micro_batches(
    document, train_run_of, tmp_path, monkeypatch
):
    import trainer.policy_update as module

    whole, tokens = module.log_probs, []

    def log_probs(policy, batch, *others, **options):
        if not torch.is_grad_enabled():
            tokens.append(batch.num_tokens)
            if batch.num_tokens > 200:
                raise torch.OutOfMemoryError("no")
        return whole(policy, batch, *others, **options)

    monkeypatch.setattr(module, "log_probs", log_probs)
    made = document(
        recipe={"beta": 0.1},
        train={**rewarded(tmp_path), "steps": 1, "share_prefix": False, "micro_batch_tokens": 600},
    )
    (step,) = train_run_of(made).metrics
    assert tokens[0] > 200 >= max(tokens[-3:])
    assert step["budget_tokens"] < 600


def test_memory_that_runs_out_for_good_ends_the_run_with_a_checkpoint(
    document, train_run_of, tmp_path, monkeypatch
):
    import trainer.grpo as module

    whole, calls = module.group_advantages, []

    def advantages(*others, **options):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no")
        return whole(*others, **options)

    monkeypatch.setattr(module, "group_advantages", advantages)
    made = document(train={**rewarded(tmp_path), "steps": 5, "save_every": 0})
    with pytest.raises(VramwiseError, match="out of memory in step 2; step 2 is saved"):
        train_run_of(made)
    assert latest(tmp_path / "out").state()["order"]["position"] == 8


# stops


def test_a_stop_string_may_lie_over_several_tokens(document, train_run_of, tmp_path):
    code = "def reward(completions, **k):\n    return [0.0 if 'a' in t[:-1] else 1.0 for t in completions]\n"
    made = document(
        recipe={"completion_length": 40},
        train={**rewarded(tmp_path, code), "steps": 1, "print_completions": 1},
    )
    # a bad random model: any two characters are as likely as any other two, so stop at many pairs
    stops = [a + b for a in "0123456789abcdefghijklm" for b in "0123456789abcdefghijklm"]
    made["train"]["sampling"] = {"stop": stops}
    result = train_run_of(made)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(result.output / "completions" / "step-00000000.parquet")
    texts = table["completion"].to_pylist()
    stopped = [text for text in texts if text[-2:] in stops]
    assert len(stopped) > 8
    assert all(not any(stop in text[:-1] for stop in stops) for text in texts)


def test_what_goes_on_behind_a_stop_string_is_cut():
    tokenizer = small_tokenizer()
    stops = StopStrings(tokenizer, ("\nQ:", "end"))
    ids = tuple(tokenizer("4\nQ: 5 end")["input_ids"])
    assert tokenizer.decode(ids[: stops.cut(ids)]) == "4\nQ:"
    assert stops.cut(tuple(tokenizer("4\nQ 5")["input_ids"])) is None
    assert StopStrings(tokenizer, ()).cut(ids) is None


# the loss


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("grpo", 8), ("gspo", 8), ("dr_grpo", 8 * 20), ("dapo", 50), ("bnpo", 50), ("cispo", 50)],
)
def test_cut_completions_are_sequences_still(loss, expected):
    settings = LossSettings(loss_type=loss, max_completion_length=20)
    found = step_normaliser(settings, lengths=[10] * 8, chosen=range(8), counted={0, 2, 3, 5, 7})
    assert found == expected


def test_gspo_clips_as_its_paper_does():
    assert LossSection(type="gspo").clip == (3e-4, 4e-4)
    assert LossSection(type="gspo", epsilon=0.1).clip == (0.1, None)
    assert LossSection(type="grpo").clip == (0.2, None)
    assert LossSection(type="dapo", epsilon_high=0.28).clip == (0.2, 0.28)


def test_grad_norm_is_of_all_inner_updates(document, train_run_of, tmp_path, monkeypatch):
    import trainer.stepping as module

    whole, norms = module.apply_step, []

    def apply_step(*others, **options):
        result = whole(*others, **options)
        norms.append(result[0])
        return result

    monkeypatch.setattr(module, "apply_step", apply_step)
    made = document(train={**rewarded(tmp_path), "steps": 1, "num_iterations": 3, "lr": 0.01})
    (step,) = train_run_of(made).metrics
    assert len(norms) == 3
    assert step["grad_norm"] == pytest.approx(sum(norms) / 3)
    assert step["grad_norm/max"] == max(norms)
    assert not math.isclose(step["grad_norm"], norms[-1], rel_tol=1e-6)


# names


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"train": {"learning_rate": 1e-5}}, "did you mean lr"),
        ({"train": {"max_completion_length": 9}}, "did you mean recipe.completion_length"),
        ({"recipe": {"learning_rate": 1e-5}}, "did you mean train.lr"),
        ({"recipe": {"per_device_train_batch_size": 2}}, "did you mean micro_batch_size"),
        ({"recipe": {"lora": {"r": 8}}}, "did you mean rank"),
        ({"train": {"sampling": {"max_new_tokens": 8}}}, "did you mean recipe.completion_length"),
    ],
)
def test_other_trainers_names_are_known(document, tmp_path, change, hint):
    with pytest.raises(UsageError, match="unknown key") as caught:
        parse_run(document(**change), root=tmp_path)
    assert hint in caught.value.hint


def test_the_names_that_are_offered_are_fields():
    from planner.run.other_names import OTHER_NAMES
    from planner.run.recipe import Recipe

    for name in OTHER_NAMES.values():
        section, _, path = name.split(" ")[0].rstrip(":").partition(".")
        model = {"train": TrainSection, "recipe": Recipe}.get(section)
        if model is None:
            assert name == "model"
            continue
        for part in path.split("."):
            assert part in model.model_fields, name
            found = model.model_fields[part].annotation
            model = next(
                (
                    each
                    for each in (found, *getattr(found, "__args__", ()))
                    if hasattr(each, "model_fields")
                ),
                model,
            )
    assert validate(TrainSection, {"output": "x", "dataset": "arithmetic"}).lr == 1e-5
