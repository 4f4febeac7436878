import json

import pytest

from app.cli import main
from planner.errors import UsageError
from trainer.evaluate import EvalSettings, evaluate, find_source

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(6)]


@pytest.fixture
def trained(document, train_run_of, tmp_path):
    """Return the output folder of a GRPO run with LoRA whose adapters have moved."""
    (tmp_path / "mine.py").write_text(
        "def reward(completions, **k):\n    return [sum(c.isdigit() for c in t) / 6 for t in completions]\n",
        encoding="utf-8",
    )
    made = document(train={"rewards": ["mine.py:reward"], "steps": 1, "lr": 0.05})
    return train_run_of(made).output


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    return path


def test_a_checkpoint_generates_as_the_policy_that_was_trained(trained, data, tmp_path):
    """Greedy completions equal those of base + adapters loaded by PEFT."""
    import torch
    from peft import AutoPeftModelForCausalLM

    from trainer.model import load_tokenizer

    out = tmp_path / "completions.jsonl"
    settings = EvalSettings(
        data=data, rewards=("exact",), temperature=0, completion_length=6, completions=out
    )
    document = evaluate(str(trained), settings)
    assert document["figures"]["samples"] == 6
    assert document["engine"] == "transformers"
    folder = find_source(str(trained), base=None, dtype=None).adapter
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(
        str(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    )
    for line, row in zip(out.read_text().splitlines(), ROWS, strict=True):
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        made = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert json.loads(line)["completion"] == text


def test_the_command_prints_json_and_figures(trained, capsys):
    arguments = ["eval", str(trained), "--task", "arithmetic", "--limit", "4"]
    arguments += ["--generations", "4", "--k", "1", "--k", "4", "--completion-length", "4"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rewards"] == ["exact"]
    figures = document["figures"]
    assert figures["pass@1/low"] <= figures["pass@1"] <= figures["pass@4"] <= figures["pass@4/high"]
    assert main(arguments) == 0
    assert "pass@4 " in capsys.readouterr().out


def test_given_text_is_evaluated_by_its_perplexity(small_model, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one two"}\n{"text": "three"}', encoding="utf-8")
    figures = evaluate(str(small_model), EvalSettings(data=path, dtype="fp32"))["figures"]
    assert figures["tokens"] == len("one two") + len("three")
    assert figures["perplexity"] > 1


@pytest.mark.vllm
@pytest.mark.parametrize(
    "engine", [pytest.param("vllm-push", marks=pytest.mark.slow), "vllm-shared"]
)
def test_vllm_says_what_transformers_says(document, train_run_of, data, tmp_path, engine):
    """Heads are 32 wide: narrower ones vLLM's CPU attention does not have."""
    pytest.importorskip("vllm")
    from trainer.small_model import make_small_model

    model = make_small_model(tmp_path / "m", hidden=128, layers=1, initializer_range=0.1)
    made = document(model=str(model), train={"steps": 1, "lr": 0.05})
    trained = train_run_of(made).output
    texts = []
    for kind in ("transformers", engine):
        out = tmp_path / f"{kind}.jsonl"
        settings = EvalSettings(
            data=data,
            rewards=("exact",),
            temperature=0,
            completion_length=6,
            completions=out,
            engine=kind,
            rows=4,
            prompt_length=40,
        )
        assert evaluate(str(trained), settings)["engine"] == kind
        texts.append([json.loads(line)["completion"] for line in out.read_text().splitlines()])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (EvalSettings(), "nothing to evaluate on"),
        (EvalSettings(task="arithmetic", engine="vlm"), "--engine: 'vlm'"),
        (EvalSettings(task="arithmetic", k=(4,)), "pass@4 needs 4 generations"),
        (EvalSettings(task="nonesuch"), "nonesuch"),
    ],
    ids=["no data", "engine", "k", "task"],
)
def test_what_cannot_be_evaluated_is_one_line(small_model, settings, said):
    with pytest.raises(UsageError, match=said) as caught:
        evaluate(str(small_model), settings)
    assert "\n" not in caught.value.message


def test_a_folder_without_a_model_is_said(tmp_path):
    with pytest.raises(UsageError, match="holds neither a model nor adapters"):
        evaluate(str(tmp_path), EvalSettings(task="arithmetic"))
