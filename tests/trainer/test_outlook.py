"""The trainer's forecast: fed from real steps, and from the samples still to come."""

import json

import pytest

from planner.units import MiB

LEAK = """
import torch

kept = []

class Leak:
    def on_step_end(self, run, step, metrics):
        kept.append(torch.zeros(1 << 20))  # 4 MiB
        if step == 14:
            kept.clear()
            run.stop("seen enough")
"""


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT document over prompts of very different lengths."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a" * (1 + 3 * n % 50), "completion": " b"} for n in range(13)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    def make(**train):
        made = document(
            recipe={
                "task": "sft",
                "context": 64,
                "micro_batch_size": 2,
                "gradient_accumulation": 2,
            },
            train={"dataset": str(path), "rewards": [], "save_every": 0, **train},
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        return made

    return make


def test_every_step_says_how_long_is_left(sft, train_run_of):
    steps = train_run_of(sft(steps=4)).metrics
    left = [step["forecast/seconds_left"] for step in steps]
    assert left[0] > 0
    assert left[-1] == 0
    assert all(
        step["forecast/seconds_left/low"] <= value <= step["forecast/seconds_left/high"]
        for step, value in zip(steps, left, strict=True)
    )
    assert not any("forecast/out_of_memory_step" in step for step in steps)


def test_what_is_to_come_is_what_comes(sft, tmp_path, monkeypatch):
    import trainer.sft as module
    from trainer.config import parse_run
    from trainer.run import train_parsed

    ran, foreseen = [], []
    outlook, next_batch = module.Outlook, module.next_batch

    def made(ready, *, done, loads):
        foreseen.extend(loads)
        return outlook(ready, done=done, loads=loads)

    def taken(*arguments, **options):
        batch = next_batch(*arguments, **options)
        ran.append(sum(len(sequence.token_ids) for sequence in batch))
        return batch

    monkeypatch.setattr(module, "Outlook", made)
    monkeypatch.setattr(module, "next_batch", taken)
    run, train = parse_run(sft(steps=7), root=tmp_path)  # over the end of an epoch
    train_parsed(run, train, root=tmp_path)
    assert [load.tokens for load in foreseen] == ran
    assert len(set(ran)) > 3
    assert all(0 < load.widest <= 2 * 64 for load in foreseen)


def test_a_leak_on_a_small_device_is_told_before_it_ends_the_run(
    sft, train_run_of, tmp_path, capsys
):
    (tmp_path / "leak.py").write_text(LEAK, encoding="utf-8")
    result = train_run_of(sft(steps=200, callbacks=["leak.py:Leak"], device_memory=f"{96 * MiB}b"))
    assert result.stop_reason == "seen enough"
    told = result.metrics[-1]["forecast/out_of_memory_step"]
    held = max(v for k, v in result.metrics[0].items() if k.endswith("planned_bytes"))
    assert told == pytest.approx((96 - held / MiB) / 4, abs=4)
    said = [line for line in capsys.readouterr().err.splitlines() if "will run out" in line]
    assert len(said) == 1
    assert "because of growth of 4.0" in said[0]
