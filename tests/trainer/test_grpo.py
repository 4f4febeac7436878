import json
import math

import pytest
import torch

from planner.errors import UsageError, VramwiseError
from trainer.advantages import group_advantages
from trainer.batching import Layout
from trainer.config import parse_run
from trainer.engines import make_engine
from trainer.losses import LossType
from trainer.policy_update import learn, loss_settings
from trainer.preflight import prepare
from trainer.rollout import sample, sampling_settings

LOSSES = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo"]
DIGITS = "def reward(completions, **k):\n    return [sum(c.isdigit() for c in t) / 6 for t in completions]\n"


def rewarded(tmp_path, code=DIGITS):
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    return {"rewards": ["mine.py:reward"]}


def rewards_of(result):
    return [step["reward"] for step in result.metrics]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_reward_rises(document, train_run_of, tmp_path, loss, method):
    """Digits pay; a random model writes them one time in eight."""
    rate = 0.02 if method == "lora" else 0.005
    made = document(
        recipe={"method": method, "micro_batch_size": 32},
        train={
            **rewarded(tmp_path),
            "steps": 12,
            "lr": rate,
            "loss": {"type": loss},
            "save_every": 0,
        },
    )
    made["train"]["prompts_per_step"] = 8
    rewards = rewards_of(train_run_of(made))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_one_that_was_asked_for(document, tmp_path, loss):
    _, train = parse_run(document(train={"loss": {"type": loss}}), root=tmp_path)
    settings = loss_settings(train, beta=0.0, limit=6)
    # an enum member, for the losses are told apart by identity
    assert settings.loss_type is LossType(loss)
    assert settings.per_sequence == (loss in ("grpo", "gspo"))
    assert settings.upper == {"cispo": 5.0, "gspo": 4e-4}.get(loss, 0.2)


def test_without_detach_nothing_is_learnt(document, train_run_of, tmp_path):
    """The seed's experiment: exp(logp - logp) has no gradient."""
    made = document(train={**rewarded(tmp_path), "loss": {"type": "grpo", "detach": False}})
    assert all(step["grad_norm"] == 0 for step in train_run_of(made).metrics)


@pytest.mark.parametrize("kl", ["k3", "k3-ratio", "full-reverse", "forward"])
def test_the_kl_term_starts_at_zero_and_grows_as_the_policy_moves(
    document, train_run_of, tmp_path, kl
):
    made = document(
        recipe={"beta": 0.05},
        train={**rewarded(tmp_path), "steps": 3, "lr": 0.02, "loss": {"kl": kl}},
    )
    first, _, last = (step["kl"] for step in train_run_of(made).metrics)
    assert first == pytest.approx(0, abs=1e-6)
    assert last > 1e-6


def test_several_updates_of_a_rollout_are_off_policy(document, train_run_of, tmp_path):
    made = document(
        train={
            **rewarded(tmp_path),
            "steps": 2,
            "lr": 0.05,
            "updates_per_rollout": 2,
            "num_iterations": 2,
        }
    )
    for step in train_run_of(made).metrics:
        assert step["ratio/max"] > 1.001
        assert "memory/score/resident_bytes" in step


def prepared(document, tmp_path, **train):
    run, section = parse_run(document(train={**rewarded(tmp_path), **train}), root=tmp_path)
    return prepare(run, section), section


def gradient_of(ready, section, *, budget):
    """Return the gradient of one update, at a budget in tokens."""
    from trainer.data import Prompt

    policy = ready.policy
    texts = ["1 + 2 =", "11 + 4 = 15\n2 + 2 ="]
    prompts = [
        Prompt(
            token_ids=tuple(policy.tokenizer(t)["input_ids"]),
            text=t,
            sample={},
            conversational=False,
        )
        for t in texts
    ]
    settings = sampling_settings(
        section.sampling, policy.tokenizer, num_generations=4, max_new_tokens=6
    )
    from dataclasses import replace

    engine = make_engine(policy, recipe=ready.recipe)
    rollout = sample(engine, prompts, replace(settings, seed=3), tokenizer=policy.tokenizer)
    rewards = torch.tensor([0.0, 1, 1, 0, 0, 0, 0, 2])
    advantages = group_advantages(rewards, num_generations=4).values
    seen = {}
    ready.stepper.optimizer.step = lambda: seen.update(
        {name: parameter.grad.clone() for name, parameter in policy.trainable()}
    )
    ready.stepper.budget.tokens = budget
    _, logged = learn(0, rollout, advantages, ready=ready, train=section, engine=engine)
    return seen, logged


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_any_budget_gives_the_same_gradient(document, tmp_path, loss):
    ready, section = prepared(document, tmp_path, loss={"type": loss}, share_prefix=False)
    large, logged = gradient_of(ready, section, budget=10_000)
    assert logged["micro_batches"] == 1
    small, logged = gradient_of(ready, section, budget=27)
    assert logged["micro_batches"] > 4
    assert any(gradient.abs().max() > 1e-5 for gradient in large.values())
    for name, gradient in large.items():
        torch.testing.assert_close(small[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_equal_rewards_are_not_run_and_change_no_gradient(document, tmp_path, monkeypatch):
    import trainer.policy_update as module

    ready, section = prepared(document, tmp_path, share_prefix=False)
    rows = []
    whole = module.split

    def counted(rollout, chosen, **options):
        rows.append(len(chosen))
        return whole(rollout, chosen, **options)

    monkeypatch.setattr(module, "split", counted)
    from trainer.data import Prompt

    policy = ready.policy
    prompt = Prompt(token_ids=(5, 6, 7), text="", sample={}, conversational=False)
    settings = sampling_settings(
        section.sampling, policy.tokenizer, num_generations=4, max_new_tokens=6
    )
    engine = make_engine(policy, recipe=ready.recipe)
    rollout = sample(engine, [prompt, prompt], settings, tokenizer=policy.tokenizer)
    advantages = group_advantages(torch.tensor([1.0] * 4 + [0, 0, 1, 1]), num_generations=4).values
    learn(0, rollout, advantages, ready=ready, train=section, engine=engine)
    assert rows == [4]


def test_all_equal_rewards_are_said_and_do_no_harm(document, train_run_of, tmp_path, capsys):
    made = document(
        train=rewarded(
            tmp_path, "def reward(completions, **k):\n    return [1.0] * len(completions)\n"
        )
    )
    result = train_run_of(made)
    assert result.bad_steps == 0
    assert all(step["frac_reward_zero_std"] == 1 for step in result.metrics)
    assert "nothing to learn" in capsys.readouterr().err


NAN_FROM = (
    "calls = 0\n"
    "def reward(completions, **k):\n"
    "    global calls\n"
    "    calls += 1\n"
    "    bad = {first} <= calls < {end}\n"
    "    return [float('nan') if bad else float(len(t)) for t in completions]\n"
)


def test_a_nan_reward_skips_its_step(document, train_run_of, tmp_path):
    code = NAN_FROM.format(first=2, end=3)
    result = train_run_of(document(train={**rewarded(tmp_path, code), "steps": 3}))
    assert result.bad_steps == 1
    assert [("skipped" in step) for step in result.metrics] == [False, True, False]


def test_too_many_bad_steps_stop_the_run_with_its_state_saved(document, train_run_of, tmp_path):
    from trainer.checkpoint import latest

    code = NAN_FROM.format(first=2, end=99)
    made = document(train={**rewarded(tmp_path, code), "steps": 9, "max_bad_steps": 3})
    with pytest.raises(VramwiseError, match="stopped at step 3: 3 steps in a row"):
        train_run_of(made)
    assert latest(tmp_path / "out").step == 4
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_nan_weight_skips_the_update_and_leaves_weights_alone(document, tmp_path):
    ready, _ = prepared(document, tmp_path)
    name, broken = ready.policy.trainable()[0]
    with torch.no_grad():
        broken.view(-1)[0] = math.nan
    before = {key: value.clone() for key, value in ready.policy.trainable() if key != name}
    update = ready.stepper.run(
        0,
        micro_batches=lambda budget: [_batch()],
        loss=lambda batch: (broken.sum() + sum(v.sum() for _, v in ready.policy.trainable()), 0),
        longest=4,
    )
    assert update.skipped
    for key, value in ready.policy.trainable():
        if key != name:
            assert torch.equal(value, before[key])


def _batch():
    from trainer.batching import ScoredSequence, collate

    sequence = ScoredSequence(token_ids=(3, 4, 5), scored=(False, True, True))
    return collate([sequence], [0], layout=Layout.SORTED)


def test_a_failing_reward_is_reported_with_its_sample(document, train_run_of, tmp_path):
    code = "def reward(completions, **k):\n    return [1 / (len(t) - 6) for t in completions]\n"
    made = document(train=rewarded(tmp_path, code))
    made["train"]["rewards"] = [{"name": "mine.py:reward", "per_sample": True}]
    (step, *_) = train_run_of(made).metrics
    assert step["reward_failures"] > 0
    assert "ZeroDivisionError" in step["reward_failure"]


def test_what_a_step_logs(document, train_run_of, tmp_path):
    made = document(
        train={
            "rewards": [*rewarded(tmp_path)["rewards"], {"name": "length", "options": {"high": 3}}],
            "print_completions": 1,
        }
    )
    result = train_run_of(made)
    step = result.metrics[0]
    for key in [
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "clip_ratio/low",
        "clip_ratio/high",
        "completions/mean_length",
        "completions/truncated_frac",
        "rewards/reward/mean",
        "rewards/reward/std",
        "rewards/reward/seconds",
        "rewards/length/mean",
        "memory/rollout/resident_bytes",
        "memory/forward/planned_bytes",
        "memory/backward/planned_bytes",
    ]:
        assert key in step, key
    assert step["entropy"] == pytest.approx(math.log(88), rel=0.2)
    assert (result.output / "completions" / "step-00000000.parquet").exists()


def test_a_used_output_folder_is_refused(document, train_run_of, tmp_path):
    made = document(train=rewarded(tmp_path))
    train_run_of(made)
    with pytest.raises(UsageError, match="exists and is not empty"):
        train_run_of(made)
    made["train"]["overwrite"] = True
    train_run_of(made)
    (tmp_path / "out" / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"thesis\.tex.*not deleting"):
        train_run_of(made)


def test_a_base_without_a_chat_template_is_refused(document, train_run_of, tmp_path):
    from trainer.small_model import make_small_model

    base = make_small_model(tmp_path / "base")
    made = document(model=str(base), train=rewarded(tmp_path))
    made["train"]["dataset"]["chat"] = True
    with pytest.raises(UsageError, match="no chat template"):
        train_run_of(made)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains(document, train_run_of, tmp_path, dtype):
    made = document(
        recipe={"dtype": dtype, "micro_batch_size": 32},
        train={
            **rewarded(tmp_path),
            "steps": 12,
            "lr": 0.02,
            "prompts_per_step": 8,
            "save_every": 0,
        },
    )
    rewards = rewards_of(train_run_of(made))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def test_qlora_trains(document, train_run_of, tmp_path):
    pytest.importorskip("bitsandbytes")
    made = document(
        recipe={"method": "qlora", "micro_batch_size": 32, "optimizer": "adamw-8bit"},
        train={
            **rewarded(tmp_path),
            "steps": 12,
            "lr": 0.02,
            "prompts_per_step": 8,
            "save_every": 0,
        },
    )
    rewards = rewards_of(train_run_of(made))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
