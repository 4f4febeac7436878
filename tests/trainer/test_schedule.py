"""The learning rate is transformers' after the warm-up; in it, a step ahead of it."""

import pytest
import torch
from transformers import get_scheduler

from planner.errors import UsageError
from trainer.config import parse_run
from trainer.schedule import learning_rate, warmup_of

STEPS = 23


def section(tmp_path, **fields):
    document = {
        "model": "m",
        "recipe": {"task": "sft", "context": 8},
        "train": {"output": "out", "dataset": "rows.jsonl", "steps": STEPS, "lr": 0.4, **fields},
    }
    return parse_run(document, root=tmp_path)[1]


def theirs(name, warmup, **special):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=special
    )  # fmt: skip
    rates = []
    for _ in range(STEPS + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "name", "special"),
    [
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "cosine", "min_lr": 0.1}, "cosine_with_min_lr", {"min_lr": 0.1}),
        ({"schedule": "cosine", "min_lr_ratio": 0.3}, "cosine_with_min_lr", {"min_lr_rate": 0.3}),
        ({"schedule": "wsd", "decay_steps": 7}, "warmup_stable_decay", {"num_decay_steps": 7}),
        (
            {"schedule": "wsd", "decay_ratio": 0.5, "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
        ),
        ({"schedule": "wsd", "decay_type": "linear"}, "warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "linear"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 5])
def test_a_schedule_is_transformers_own(ours, name, special, warmup, tmp_path):
    train = section(tmp_path, warmup_steps=warmup, **ours)
    expected = theirs(name, warmup, **special)
    floor = special.get("min_lr_ratio", 0)
    for step in range(STEPS):
        if step >= warmup:
            assert learning_rate(step, train) == pytest.approx(expected[step])
        elif not floor:  # transformers' wsd warms up from its floor, the others from 0
            assert learning_rate(step, train) == pytest.approx(expected[step + 1])


def test_a_ratio_is_rounded_up(tmp_path):
    assert warmup_of(section(tmp_path, warmup_ratio=0.1)) == 3
    train = section(tmp_path, warmup_ratio=0.1)
    assert [learning_rate(step, train) for step in range(4)] == pytest.approx(
        [0.4 / 3, 0.8 / 3, 0.4, 0.4]
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "train.warmup_ratio"),
        ({"warmup_ratio": 1.5}, "warmup_ratio"),
        ({"warmup_ratio": 0.99}, "train.warmup_ratio"),
        ({"min_lr": 0.1}, "train.min_lr"),
        ({"min_lr_ratio": 0.1, "min_lr": 0.1, "schedule": "cosine"}, "train.min_lr_ratio"),
        ({"min_lr": 0.5, "schedule": "cosine"}, "train.min_lr"),
        ({"decay_steps": 4, "schedule": "cosine"}, "train.decay_steps"),
        ({"decay_type": "cubic", "schedule": "wsd"}, "decay_type"),
        ({"decay_steps": 20, "warmup_steps": 5, "schedule": "wsd"}, "train.decay_steps"),
        ({"schedule": "polynomial"}, "schedule"),
        ({"adam_eps": 0}, "adam_eps"),
        ({"adam_betas": [0.9, 1.0]}, "adam_betas"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(fields, named, tmp_path):
    with pytest.raises(UsageError) as caught:
        section(tmp_path, **fields)
    assert named in caught.value.message
    assert caught.value.hint, "what is allowed"


def test_a_default_that_is_too_long_for_a_short_run_is_none(tmp_path):
    assert learning_rate(0, section(tmp_path, steps=1, schedule="wsd")) > 0


def test_epsilon_reaches_the_optimizer(tmp_path):
    from planner.run.recipe import Optimizer
    from trainer.optim import make_optimizer

    weight = torch.nn.Parameter(torch.zeros(4, 4))
    made = make_optimizer([("w", weight)], kind=Optimizer.ADAMW, lr=1.0, eps=0.5)
    weight.grad = torch.full_like(weight, 0.25)
    made.step()
    # the first step of Adam: lr * g / (|g| + eps)
    assert torch.allclose(weight, torch.full_like(weight, -0.25 / 0.75))
