"""Checkpoints of several ranks: whole or absent, in PEFT's format too, and read by any number of ranks."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from tests.trainer.parallel.gloo import on_ranks
from tests.trainer.parallel.processes import ended, kill, start
from trainer import checkpoint as checkpoints
from trainer.config import parse_run
from trainer.parallel.ranks import ALONE
from trainer.preflight import prepare
from trainer.run import train_parsed

pytestmark = pytest.mark.xdist_group("ranks")


def train(ranks, document, root, resume=False):
    run, section = parse_run(document, root=Path(root))
    result = train_parsed(run, section, root=Path(root), resume=resume, ranks=ranks)
    return [metrics["loss"] for metrics in result.metrics], str(torch.get_rng_state().sum())


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT document of ragged rows."""
    draw = random.Random(0)
    rows = [{"prompt": f"{n}+{n}=", "completion": "7" * draw.randint(1, 12)} for n in range(10, 42)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def make(name, steps, recipe=None, **train):
        made = document(
            recipe={"task": "sft", "context": 24, "micro_batch_size": 2} | (recipe or {}),
            train={
                "dataset": "rows.jsonl",
                "output": str(tmp_path / name),
                "steps": steps,
                "prompts_per_step": 8,
                "rewards": [],
                "lr": 0.01,
            }
            | train,
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        return made

    return make


SHARDED = {"sharding": "fsdp2"}
LORA = SHARDED | {"lora": {"rank": 3}}
FULL8 = SHARDED | {"method": "full", "optimizer": "adamw-8bit"}


@pytest.mark.parametrize(
    ("recipe", "close"), [(LORA, 1e-5), (FULL8, 2e-3)], ids=["lora", "full-8bit"]
)
def test_a_run_goes_on_at_any_number_of_ranks(sft, tmp_path, recipe, close):
    def made(name, steps):
        return sft(name, steps, recipe)

    alone = {key: value for key, value in recipe.items() if key != "sharding"}
    whole, _ = train(ALONE, sft("whole", 6, alone), tmp_path)
    (half, _), _ = on_ranks(2, train, made("half", 3), tmp_path)
    assert half == pytest.approx(whole[:3], rel=close)
    saved = json.loads((checkpoints.latest(tmp_path / "half").path / "state.json").read_text())
    assert saved["ranks"] == 2
    for size in (1, 2, 4):
        name = f"at-{size}"
        shutil.copytree(tmp_path / "half", tmp_path / name)
        if size == 1:
            rest, _ = train(ALONE, sft(name, 6, alone), tmp_path, True)
        else:
            (rest, _), *_ = on_ranks(size, train, made(name, 6), tmp_path, True)
        assert rest == pytest.approx(whole[3:], rel=close), size
    # what one process has saved, two go on from
    train(ALONE, sft("one", 3, alone), tmp_path)
    (rest, _), _ = on_ranks(2, train, made("one", 6), tmp_path, True)
    assert rest == pytest.approx(whole[3:], rel=close)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{"method": "qlora"}, {"task": "grpo"}], ids=["qlora", "grpo"])
def test_four_bit_weights_and_sampled_completions_go_on_at_any_number_of_ranks(
    sft, document, tmp_path, recipe
):
    def made(name, steps, size):
        shared = {"sharding": "fsdp2"} if size > 1 else {}
        if recipe.get("task") != "grpo":
            return sft(name, steps, shared | recipe)
        train = {"output": str(tmp_path / name), "steps": steps, "prompts_per_step": 5, "lr": 1e-2}
        return document(recipe={"micro_batch_size": 4} | shared, train=train)

    whole, _ = train(ALONE, made("whole", 6, 1), tmp_path)
    (half, _), _ = on_ranks(2, train, made("half", 3, 2), tmp_path)
    assert half == pytest.approx(whole[:3], rel=1e-5, abs=1e-6)
    for size in (1, 4):
        name = f"at-{size}"
        shutil.copytree(tmp_path / "half", tmp_path / name)
        document_of_rest = made(name, 6, size)
        if size == 1:
            rest, _ = train(ALONE, document_of_rest, tmp_path, True)
        else:
            (rest, _), *_ = on_ranks(size, train, document_of_rest, tmp_path, True)
        assert rest == pytest.approx(whole[3:], rel=1e-5, abs=1e-6), size


def test_as_many_ranks_go_on_bit_for_bit_and_peft_reads_what_they_saved(sft, tmp_path, small_model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    recipe = LORA | {"dtype": "bf16", "lora": {"rank": 3, "dropout": 0.2}}
    on_ranks(2, train, sft("whole", 4, recipe), tmp_path)
    on_ranks(2, train, sft("parts", 2, recipe), tmp_path)
    on_ranks(2, train, sft("parts", 4, recipe), tmp_path, True)
    one, two = (checkpoints.latest(tmp_path / name).path for name in ("whole", "parts"))
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == [Path("adapter_model.safetensors")]
    assert (one / files[0]).read_bytes() == (two / files[0]).read_bytes()
    # the adapters that any tool reads are those that the ranks hold
    base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16)
    read = PeftModel.from_pretrained(base, one, autocast_adapter_dtype=False)
    alone = {key: value for key, value in recipe.items() if key != "sharding"}
    run, section = parse_run(sft("whole", 4, alone), root=tmp_path)
    ready = prepare(run, section)
    checkpoints.restore(
        checkpoints.latest(tmp_path / "whole"),
        policy=ready.policy,
        optimizer=ready.stepper.optimizer,
    )
    held = dict(ready.policy.model.named_parameters())
    trained = [name for name in held if "lora_" in name]
    assert trained
    for name, parameter in read.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, held[name]), name


def fill(ready, value):
    """Make every trained weight and every moment here say `value`."""
    with torch.no_grad():
        for _, local in ready.policy.stepped():
            local.fill_(value)
            for name, state in ready.stepper.optimizer.state[local].items():
                if isinstance(state, torch.Tensor) and name.startswith(("moment", "master")):
                    state.fill_(value)


def values(ready):
    tensors = [local for _, local in ready.policy.stepped()]
    for local in list(tensors):
        state = ready.stepper.optimizer.state[local]
        tensors += [state[name] for name in state if name.startswith(("moment", "master"))]
    return {float(value) for tensor in tensors for value in tensor.detach().unique()}


def ready_to_save(ranks, document, root):
    run, section = parse_run(document, root=Path(root))
    ready = prepare(run, section, ranks=ranks)
    optimizer = ready.stepper.optimizer
    for _, local in ready.policy.stepped():
        optimizer.state[local] = optimizer.new_state(local)
    return ready


def write_without_end(ranks, document, root, step):
    ready = ready_to_save(ranks, document, root)
    ranks = ready.ranks
    while True:
        fill(ready, float(step % 128))
        checkpoints.save(
            Path(root) / "out",
            step=step,
            policy=ready.policy,
            optimizer=ready.stepper.optimizer,
            state={"at": step},
            ranks=ranks,
        )
        step += 1


@pytest.mark.parametrize(
    "kills",
    [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["two", "twenty"],
)
def test_kills_of_any_rank_never_leave_an_unreadable_checkpoint(sft, tmp_path, kills):
    alone = ready_to_save(ALONE, sft("out", 9, {"lora": {"rank": 3}}), tmp_path)
    draw = random.Random(kills)
    step, ends = 1, []
    for kill_number in range(kills):
        processes = start(
            2, write_without_end, sft("out", 9, LORA), tmp_path, step, folder=tmp_path
        )
        wanted = step + kill_number % 2
        while not any(s.step >= wanted for s in checkpoints.checkpoints(tmp_path / "out")):
            assert all(process.is_alive() for process in processes)
            time.sleep(0.002)
        later = draw.uniform(0.0, 0.3)
        time.sleep(later)
        victim = draw.randrange(2)
        kill(processes[victim])
        killed = time.monotonic()
        codes = ended(processes)
        assert codes[victim] == -9
        assert codes[1 - victim] == 1, "the other one ends too"
        took = time.monotonic() - killed
        for checkpoint in checkpoints.checkpoints(tmp_path / "out"):
            state = checkpoints.restore(
                checkpoint, policy=alone.policy, optimizer=alone.stepper.optimizer
            )
            assert state["at"] == state["step"] == checkpoint.step
            assert values(alone) == {float(checkpoint.step % 128)}
        step = checkpoints.latest(tmp_path / "out").step + 1
        half = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()]
        print(
            f"kill {kill_number + 1}: rank {victim}, {later * 1000:.0f} ms behind a checkpoint; the other ended "
            f"{took:.1f} s later; whole up to step {step - 1}; in the folder: {', '.join(sorted(half))}",
            flush=True,
        )
        ends.append(step)
    assert ends == sorted(set(ends)), "each got further"
