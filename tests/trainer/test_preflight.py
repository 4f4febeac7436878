import dataclasses
from types import SimpleNamespace

import pytest
import torch

from planner.errors import VramwiseError
from planner.models.hub import find_model
from planner.plan import plan
from planner.units import MiB
from trainer.config import parse_run
from trainer.fake_device import FakeDevice
from trainer.preflight import prepare

DIGITS = (
    "def reward(completions, **k):\n    return [sum(c.isdigit() for c in t) for t in completions]\n"
)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Return a model whose activations, not weights, are what fills a device."""
    from trainer.small_model import make_small_model

    folder = tmp_path_factory.mktemp("models") / "wide"
    return make_small_model(folder, hidden=64, intermediate=1024, layers=2, initializer_range=0.1)


def ready_of(document, tmp_path, *, recipe=None, **train):
    (tmp_path / "mine.py").write_text(DIGITS, encoding="utf-8")
    made = document(
        recipe={"checkpointing": "none", **(recipe or {})},
        train={"preflight": True, "rewards": ["mine.py:reward"], **train},
    )
    run, section = parse_run(made, root=tmp_path)
    said = []
    return prepare(run, section, say=said.append), "\n".join(said)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_was_planned_is_what_is_measured(
    document, wide_model, tmp_path, method, checkpointing
):
    def wide(**changes):
        return document(model=str(wide_model), **changes)

    ready, said = ready_of(
        wide,
        tmp_path,
        recipe={"method": method, "checkpointing": checkpointing, "prompt_length": 200},
    )
    planned, measured = ready.planned_bytes, ready.measured_bytes
    for phase in ("load", "rollout", "forward", "loss", "backward", "step"):
        # the loss's are few here: prompts are shared, and their rows copied
        near = 0.1 if phase == "loss" else 0.03
        assert measured[phase] == pytest.approx(planned[phase], rel=near), phase
        assert phase in said
    assert ready.measured.peak_phase == ready.plan.peak_phase


def test_the_rehearsal_changes_no_weight(document, tmp_path):
    before, _ = ready_of(document, tmp_path, preflight=False)
    after, _ = ready_of(document, tmp_path)
    assert before.measured_bytes == {}
    for (name, one), (_, two) in zip(
        before.policy.trainable(), after.policy.trainable(), strict=True
    ):
        assert torch.equal(one, two), name
        assert two.grad is None
    assert not after.stepper.optimizer.state


def test_the_micro_batch_is_solved_from_the_plan(document, tmp_path):
    free, _ = ready_of(
        document, tmp_path, recipe={"micro_batch_size": None}, prompts_per_step=8, preflight=False
    )
    assert free.recipe.micro_batch_size == 32
    limit = int(0.8 * free.plan.peak_bytes)
    tight, _ = ready_of(
        document,
        tmp_path,
        recipe={"micro_batch_size": None},
        prompts_per_step=8,
        preflight=False,
        device_memory=f"{limit}b",
    )
    assert 1 <= tight.recipe.micro_batch_size < 32
    assert tight.plan.verdict == "fits"
    more = tight.recipe.model_copy(update={"micro_batch_size": tight.recipe.micro_batch_size + 1})
    assert plan(find_model(document()["model"]), more, tight.plan.machine).verdict != "fits"


def test_what_cannot_fit_is_refused_with_advice_before_anything_is_loaded(
    document, tmp_path, monkeypatch
):
    import trainer.preflight as module

    monkeypatch.setattr(module, "load_policy", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(VramwiseError, match="does not fit") as caught:
        ready_of(document, tmp_path, device_memory="1MiB")
    assert "advise" in caught.value.hint


def limited(document, tmp_path, limit_bytes, **train):
    """Return a prepared run on a pretended device that the plan doesn't know of."""
    ready, _ = ready_of(document, tmp_path, preflight=False, **train)
    device = FakeDevice(limit_bytes)
    for tensor in (*ready.policy.model.parameters(), *ready.policy.model.buffers()):
        device.adopt(tensor)
    return dataclasses.replace(ready, device=device)


def test_a_rehearsal_that_runs_out_halves_the_micro_batch(document, tmp_path):
    from trainer.rehearsal import rehearse

    _, section = parse_run(document(), root=tmp_path)
    ready = limited(document, tmp_path, 10**12)
    with ready.device:
        rehearse(ready, section)
    whole = ready.device.peak_bytes
    ready = limited(document, tmp_path, int(0.7 * whole))
    with ready.device:
        rehearse(ready, section)
    assert ready.stepper.budget.halvings >= 1
    assert ready.device.peak_bytes <= 0.7 * whole + MiB
    ready = limited(document, tmp_path, ready.device.live_bytes + 1000)
    with ready.device, pytest.raises(VramwiseError, match="preflight: out of memory"):
        rehearse(ready, section)


def test_memory_that_runs_out_later_costs_nothing_but_time(document, tmp_path):
    """The same update, whole and on a device that only holds a part of it."""
    from trainer.batching import Layout, ScoredSequence, collate, micro_batches
    from trainer.losses import sft_loss
    from trainer.scoring import hidden_rows, log_probs

    sequences = [
        ScoredSequence(token_ids=(5 + n, *range(20, 60)), scored=(False,) + (True,) * 40)
        for n in range(8)
    ]

    def split(budget):
        picks = micro_batches([41] * 8, budget_tokens=budget, layout=Layout.SORTED)
        return [collate(sequences, pick, layout=Layout.SORTED) for pick in picks]

    weights, peaks = [], []
    for limit in (10**12, None):
        ready = limited(document, tmp_path, limit or int(0.75 * peaks[0]))
        ready.stepper.budget.tokens = 8 * 41

        def loss(batch, ready=ready):
            logp = log_probs(ready.policy, batch, hidden_rows(ready.policy, batch)).logp
            return sft_loss(logp, num_tokens=320), None

        with ready.device:
            update = ready.stepper.run(0, micro_batches=split, loss=loss, longest=41)
        assert not update.skipped
        peaks.append(ready.device.peak_bytes)
        weights.append([value.detach().clone() for _, value in ready.policy.trainable()])
    assert ready.stepper.budget.halvings >= 1
    assert peaks[1] < peaks[0]
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_one_sequence_that_does_not_fit_is_one_error(document, tmp_path):
    ready = limited(document, tmp_path, 10**12)

    def out_of_memory(batch):
        raise torch.OutOfMemoryError("no")

    with pytest.raises(VramwiseError, match="one sequence of 46 tokens"):
        ready.stepper.run(0, micro_batches=lambda budget: [None], loss=out_of_memory, longest=46)


def test_a_step_that_ran_out_of_memory_is_not_done_twice(document, tmp_path, monkeypatch):
    """Weights before the one that found no memory have changed: doing it again would move them twice."""
    ready = limited(document, tmp_path, 10**12)
    steps = []

    def step(self, closure=None):
        steps.append(1)
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(type(ready.stepper.optimizer), "step", step)
    weight = next(p for p in ready.policy.model.parameters() if p.requires_grad)
    with pytest.raises(VramwiseError, match="out of memory in the optimizer's step"):
        ready.stepper.run(
            0,
            micro_batches=lambda budget: [SimpleNamespace(num_tokens=1)],
            loss=lambda batch: (weight.sum(), None),
            longest=1,
        )
    assert len(steps) == 1


def test_a_pretended_device_counts_what_lives(tmp_path):
    device = FakeDevice(4 * 1000)
    with device:
        one = torch.zeros(500)
        view = one.view(50, 10)
        assert device.live_bytes == 2000
        del one
        assert device.live_bytes == 2000
        del view
        assert device.live_bytes == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1001)
