import json
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch

from planner.errors import UsageError, VramwiseError
from planner.run.recipe import Method, Recipe
from trainer import checkpoint as checkpoints
from trainer.model import load_policy
from trainer.optim import make_optimizer


def make(small_model, method="lora", kind="adamw"):
    recipe = Recipe(dtype="bf16", method=method, lora={"rank": 2})
    policy = load_policy(str(small_model), recipe=recipe)
    optimizer = make_optimizer(
        policy.trainable(), kind=kind, lr=1e-3, master_weights=method is not Method.FULL
    )
    return policy, optimizer


def step_once(policy, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.trainable():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def fill(policy, optimizer, value):
    """Make every weight and every moment say `value`."""
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.fill_(value)
            for name, tensor in optimizer.state[parameter].items():
                if isinstance(tensor, torch.Tensor) and name.startswith(("moment", "master")):
                    tensor.fill_(value)


def values(policy, optimizer):
    tensors = [parameter for _, parameter in policy.trainable()]
    for parameter in list(tensors):
        state = optimizer.state[parameter]
        tensors += [state[name] for name in state if name.startswith(("moment", "master"))]
    return {float(value) for tensor in tensors for value in tensor.detach().unique()}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_a_restored_run_takes_the_very_next_step(small_model, tmp_path, method, kind):
    policy, optimizer = make(small_model, method, kind)
    step_once(policy, optimizer, 1)
    saved = checkpoints.save(
        tmp_path, step=1, policy=policy, optimizer=optimizer, state={"note": [1]}
    )
    drawn = torch.rand(3)
    step_once(policy, optimizer, 2)
    other, other_optimizer = make(small_model, method, kind)
    state = checkpoints.restore(saved, policy=other, optimizer=other_optimizer)
    assert state["note"] == [1]
    assert torch.equal(torch.rand(3), drawn)
    step_once(other, other_optimizer, 2)
    for (name, one), (_, two) in zip(policy.trainable(), other.trainable(), strict=True):
        assert torch.equal(one, two), name


def test_adapters_load_in_peft_and_whole_models_in_transformers(small_model, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, optimizer = make(small_model)
    step_once(policy, optimizer, 1)
    saved = checkpoints.save(tmp_path / "a", step=1, policy=policy, optimizer=optimizer, state={})
    base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, saved.path, autocast_adapter_dtype=False)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    policy, optimizer = make(small_model, "full")
    step_once(policy, optimizer, 1)
    saved = checkpoints.save(tmp_path / "b", step=1, policy=policy, optimizer=optimizer, state={})
    whole = AutoModelForCausalLM.from_pretrained(saved.path)
    assert whole.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(saved.path)("12")["input_ids"]


def test_only_the_newest_are_kept_and_leftovers_are_swept(small_model, tmp_path):
    policy, optimizer = make(small_model)
    leftover = tmp_path / checkpoints.FOLDER / ".partial-1-99"
    leftover.mkdir(parents=True)
    for step in (1, 2, 3, 4):
        checkpoints.save(tmp_path, step=step, policy=policy, optimizer=optimizer, state={}, keep=2)
    assert [checkpoint.step for checkpoint in checkpoints.checkpoints(tmp_path)] == [3, 4]
    assert not leftover.exists()


def test_a_folder_without_its_state_is_no_checkpoint(small_model, tmp_path):
    (tmp_path / checkpoints.FOLDER / "step-00000009").mkdir(parents=True)
    with pytest.raises(UsageError, match="nothing to resume"):
        checkpoints.latest(tmp_path)


def test_another_recipe_is_refused_in_one_line(small_model, tmp_path):
    policy, optimizer = make(small_model)
    step_once(policy, optimizer, 1)
    saved = checkpoints.save(tmp_path, step=1, policy=policy, optimizer=optimizer, state={})
    other = load_policy(str(small_model), recipe=Recipe(dtype="bf16", lora={"rank": 3}))
    other_optimizer = make_optimizer(other.trainable(), kind="adamw", lr=1e-3)
    with pytest.raises(UsageError, match="cannot resume") as caught:
        checkpoints.restore(saved, policy=other, optimizer=other_optimizer)
    assert "\n" not in caught.value.message


def write_without_end(output, policy, optimizer, first):
    step = first
    while True:
        fill(policy, optimizer, float(step % 128))
        checkpoints.save(output, step=step, policy=policy, optimizer=optimizer, state={"at": step})
        step += 1


def test_twenty_kills_never_leave_an_unreadable_checkpoint(small_model, tmp_path):
    torch.set_num_threads(1)
    policy, optimizer = make(small_model)
    step_once(policy, optimizer, 1)
    draw = random.Random(0)
    step, saved_steps = 1, []
    for kill in range(20):
        child = os.fork()
        if child == 0:
            try:
                write_without_end(tmp_path, policy, optimizer, step)
            finally:
                os._exit(1)
        # every other kill comes after at least one more checkpoint, however slow the machine
        wanted = step if kill % 2 == 0 else 1
        while not any(saved.step >= wanted for saved in checkpoints.checkpoints(tmp_path)):
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        for checkpoint in checkpoints.checkpoints(tmp_path):
            state = checkpoints.restore(checkpoint, policy=policy, optimizer=optimizer)
            assert state["at"] == state["step"] == checkpoint.step
            assert values(policy, optimizer) == {float(checkpoint.step % 128)}
        step = checkpoints.latest(tmp_path).step + 1
        saved_steps.append(step)
    assert saved_steps == sorted(saved_steps)
    assert len(set(saved_steps)) >= 10


def test_too_little_space_is_seen_before_writing(small_model, tmp_path, monkeypatch):
    policy, optimizer = make(small_model)
    checkpoints.save(tmp_path, step=1, policy=policy, optimizer=optimizer, state={})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(VramwiseError, match=r"step 2 not written.*1000 B free.*step 1 is intact"):
        checkpoints.save(tmp_path, step=2, policy=policy, optimizer=optimizer, state={})


@pytest.mark.parametrize("limit_bytes", [2_000, 20_000], ids=["weights", "optimizer"])
def test_a_write_that_fails_half_way_is_one_error_and_the_last_one_stays(
    small_model, tmp_path, limit_bytes
):
    """A file size limit makes real writes fail, as a full disk does."""
    policy, optimizer = make(small_model)
    step_once(policy, optimizer, 1)
    first = checkpoints.save(tmp_path, step=1, policy=policy, optimizer=optimizer, state={})
    if limit_bytes > 2_000:  # adapters fit under this limit, optimizer state does not
        assert (first.path / "adapter_model.safetensors").stat().st_size < limit_bytes
    assert (first.path / "training.pt").stat().st_size > limit_bytes
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(VramwiseError, match="step 2 not written") as caught:
            checkpoints.save(tmp_path, step=2, policy=policy, optimizer=optimizer, state={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "step 1 is intact" in caught.value.message
    assert "\n" not in caught.value.message
    assert [path.name for path in (tmp_path / checkpoints.FOLDER).iterdir()] == [first.path.name]
    checkpoints.restore(first, policy=policy, optimizer=optimizer)


REWARD = (
    "import os, signal\n"
    "calls = 0\n"
    "def reward(completions, **kwargs):\n"
    "    global calls\n"
    "    calls += 1\n"
    "    if calls == {stop_at}:\n"
    "        os.kill(os.getppid(), signal.SIGTERM)\n"
    "    return [float(sum(c.isdigit() for c in text)) for text in completions]\n"
)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_sigterm_saves_and_the_resumed_run_is_the_same_bit_for_bit(
    document, train_run_of, tmp_path, method
):
    ends = {}
    for name, stop_at in (("whole", 0), ("stopped", 3)):
        (tmp_path / f"{name}.py").write_text(REWARD.format(stop_at=stop_at), encoding="utf-8")
        made = document(
            recipe={"method": method, "dtype": "bf16", "lora": {"rank": 2, "dropout": 0.0}},
            train={
                "rewards": [f"{name}.py:reward"],
                "steps": 5,
                "output": str(tmp_path / name),
                "save_every": 0,
            },
        )
        result = train_run_of(made)
        if stop_at:
            assert (result.stopped_by, result.steps) == (signal.SIGTERM, 3)
            assert checkpoints.latest(result.output).step == 3
            (tmp_path / f"{name}.py").write_text(REWARD.format(stop_at=0), encoding="utf-8")
            result = train_run_of(made, resume=True)
        assert (result.stopped_by, result.steps) == (None, 5)
        ends[name] = result.output
    lines = {
        name: [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        for name, output in ends.items()
    }
    for key in ("step", "reward", "loss", "grad_norm", "entropy", "completions/mean_length"):
        assert [line[key] for line in lines["whole"]] == [line[key] for line in lines["stopped"]]
    one, two = (checkpoints.latest(output).path for output in ends.values())
    for path in sorted(one.glob("*.safetensors")):
        assert path.read_bytes() == (two / path.name).read_bytes()
    states = [torch.load(path / "training.pt", weights_only=True) for path in (one, two)]
    assert equal(states[0]["optimizer"], states[1]["optimizer"])


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two
