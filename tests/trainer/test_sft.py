import json

import pytest
import torch

from planner.errors import UsageError

ROWS = [
    {"prompt": f"{left} + {right} =", "completion": f" {left + right}\n"}
    for left in range(10)
    for right in range(10)
]


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture
def sft(document, sums):
    """Return a function that makes an SFT run document."""

    def make(*, recipe=None, train=None):
        made = document(
            recipe={
                "task": "sft",
                "context": 64,
                "micro_batch_size": 16,
                "lora": {"rank": 16},
                **(recipe or {}),
            },
            train={"dataset": {"name": str(sums)}, "lr": 0.01, "rewards": [], **(train or {})},
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        return made

    return make


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_loss_falls(sft, train_run_of, method):
    losses = [
        step["loss"]
        for step in train_run_of(
            sft(recipe={"method": method}, train={"steps": 25, "save_every": 0})
        ).metrics
    ]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_loss_and_gradient_are_those_of_transformers(sft, train_run_of, tmp_path, loss_on):
    """The same batch through the model's own full-logits loss, with labels of -100 elsewhere."""
    from trainer.config import parse_run
    from trainer.data import Order, load_samples
    from trainer.preflight import prepare
    from trainer.sft import loss, next_batch, split
    from trainer.sft_data import read_examples

    run, train = parse_run(
        sft(recipe={"method": "full"}, train={"loss_on": loss_on}), root=tmp_path
    )
    ready = prepare(run, train)
    samples = load_samples(train.dataset, root=tmp_path)
    examples = read_examples(
        samples, ready.policy.tokenizer, train.dataset, limit=64, loss_on=loss_on
    )
    batch = next_batch(examples, Order(size=100, seed=0), ready=ready)
    num_tokens = sum(sum(sequence.scored) for sequence in batch)
    total = 0.0
    for part in split(batch, 64, ready=ready):
        share, _ = loss(part, ready=ready, num_tokens=num_tokens)
        share.backward()
        total += share.item()
    ours = {name: parameter.grad.clone() for name, parameter in ready.policy.trainable()}
    model = ready.policy.model
    model.zero_grad()
    width = max(len(sequence.token_ids) for sequence in batch)
    ids, labels = torch.zeros(2, len(batch), width, dtype=torch.long)
    labels.fill_(-100)
    for row, sequence in enumerate(batch):
        tokens = torch.tensor(sequence.token_ids)
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(torch.tensor(sequence.scored), tokens, -100)
    expected = model(input_ids=ids, labels=labels, use_cache=False).loss
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in ready.policy.trainable():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_chat_is_trained_on_its_answer(sft, train_run_of, tmp_path):
    path = tmp_path / "chat.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    path.write_text(json.dumps(row), encoding="utf-8")
    result = train_run_of(sft(train={"dataset": str(path), "steps": 1}))
    # "yo" and the template's line end, once: a step repeats no row, whatever the recipe's sizes
    assert result.metrics[0]["tokens"] == 3


def test_an_empty_completion_is_one_line(sft, train_run_of, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"prompt": "a", "completion": ""}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="empty completion"):
        train_run_of(sft(train={"dataset": str(path)}))


def test_the_command_line_trains_and_merges(sft, tmp_path):
    """Through the console script's own app: train, resume, merge; the merged model is the policy."""
    import yaml
    from transformers import AutoModelForCausalLM
    from typer import Typer
    from typer.testing import CliRunner

    from trainer.checkpoint import latest, read_weights
    from trainer.cli import register
    from trainer.config import read_run
    from trainer.model import load_policy

    app = Typer()
    register(app)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(sft(train={"steps": 3, "output": "out"})), encoding="utf-8")
    done = CliRunner().invoke(app, ["train", str(run_file), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["steps"], answer["schema_version"]) == (3, 1)
    made = yaml.safe_load(run_file.read_text())
    made["train"]["steps"] = 4
    run_file.write_text(yaml.safe_dump(made), encoding="utf-8")
    done = CliRunner().invoke(app, ["train", str(run_file), "--resume", "--json"])
    assert json.loads(done.stdout)["steps"] == 4
    merged = tmp_path / "merged"
    done = CliRunner().invoke(
        app, ["merge", str(tmp_path / "out"), str(merged), "--dtype", "fp32", "--json"]
    )
    assert done.exit_code == 0, done.output
    run, _ = read_run(run_file)
    policy = load_policy(run.model, recipe=run.recipe)
    read_weights(policy, latest(tmp_path / "out").path)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits,
            policy.model(input_ids=ids).logits,
            rtol=1e-4,
            atol=1e-4,
        )
    done = CliRunner().invoke(app, ["merge", str(tmp_path / "out"), str(merged)])
    assert isinstance(done.exception, UsageError)
