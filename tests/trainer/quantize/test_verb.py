"""`vramwise quantize`: what it says, what it refuses in one line, and a budget that a card leaves."""

import json

import pytest
import yaml

from app.cli import main
from planner.models.hub import read_model
from planner.plan import plan
from planner.run.runfile import load_run_file, machine_of
from trainer.small_model import make_small_model


def _fails(capsys, *arguments):
    code = main(["quantize", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err
    return captured.err


@pytest.fixture
def options(small_model, tmp_path):
    """Return the arguments that quantise the small model, with these changed or left out (None)."""

    def make(**changed):
        usual = {"out": tmp_path / "out", "budget": "100kB", "task": "arithmetic", "tokens": 256}
        pairs = [(f"--{key}", value) for key, value in (usual | changed).items() if value]
        return [small_model, *(part for pair in pairs for part in pair)]

    return make


def test_the_answer_is_one_document(options, tmp_path, capsys):
    assert main(["quantize", *map(str, options()), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    card = document["formats"]["bnb"]
    assert document["output"] == str(tmp_path / "out")
    assert card["least_bytes"] <= card["bytes"] <= 100_000
    assert json.loads((tmp_path / "out/quantize.json").read_text()) == card


def test_what_is_missing_or_contradicts_is_one_line(options, tmp_path, capsys):
    assert "give one of --budget SIZE and --fits CARD" in _fails(capsys, *options(budget=None))
    assert "needs --run run.yaml" in _fails(capsys, *options(budget=None, fits="rtx-4090"))
    assert "no text to measure on" in _fails(capsys, *options(task=None))
    assert "give one of them" in _fails(capsys, *options(calibration="x.txt"))
    assert "format: 'gguf' is not allowed" in _fails(capsys, *options(format="gguf"))
    assert "dtype: 'fp32' is not allowed" in _fails(capsys, *options(dtype="fp32"))
    (tmp_path / "there").mkdir()
    assert "there exists" in _fails(capsys, *options(out=tmp_path / "there"))
    assert not (tmp_path / "out").exists()


def test_a_budget_below_four_bits_says_the_least(options, tmp_path, capsys):
    said = _fails(capsys, *options(budget="50kB"))
    assert "budget: 48.83 KiB (50,000 B) is below" in said
    least = int(said.split("is below")[1].split("(")[1].split(" B)")[0].replace(",", ""))
    again = options(budget=str(least))
    assert main(["quantize", *map(str, again)]) == 0  # the least possible is possible
    assert json.loads((tmp_path / "out/quantize.json").read_text())["bytes"] == least


def test_an_odd_inner_size_is_named(tmp_path, capsys):
    folder = make_small_model(tmp_path / "odd", intermediate=72)
    said = _fails(
        capsys, folder, "--out", tmp_path / "out", "--budget", "1MB", "--task", "arithmetic"
    )
    assert "model.layers.0.mlp.down_proj has 72 inputs" in said


def test_what_is_quantised_already_is_refused(options, tmp_path, capsys):
    assert main(["quantize", *map(str, options())]) == 0
    capsys.readouterr()
    said = _fails(capsys, tmp_path / "out", *options(out=tmp_path / "second")[1:])
    assert "is quantised already (bitsandbytes)" in said


def test_a_mixture_of_experts_is_refused_by_name(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, OlmoeConfig

    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    said = _fails(
        capsys, tmp_path / "moe", "--out", tmp_path / "out", "--budget", "1MB", "--task", "gsm8k"
    )
    assert "is stored in another form than it computes in" in said


def _run_file(path, small_model, **engine):
    document = {
        "model": str(small_model),
        "recipe": {
            "task": "grpo",
            "method": "qlora",
            "num_generations": 4,
            "prompt_length": 64,
            "completion_length": 64,
            "engine": {"kind": "transformers", **engine},
        },
        "train": {"dataset": {"name": "arithmetic"}, "steps": 2},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_card_s_budget_is_what_the_plan_leaves(options, small_model, tmp_path, capsys):
    """On a large card everything stays in 16 bits; the run that fits is planned with the written files."""
    run = _run_file(tmp_path / "run.yaml", small_model)
    arguments = options(budget=None, fits="rtx-4090", run=run, task=None)
    assert main(["quantize", *map(str, arguments), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)["formats"]["bnb"]
    assert card["bytes"] == card["unquantised_bytes"]
    assert card["calibration"]["source"] == "arithmetic"  # the run's own data
    read = load_run_file(run)
    machine = machine_of(read.machine.model_copy(update={"gpu": "rtx-4090"}))
    assert plan(read_model(tmp_path / "out"), read.recipe, machine).verdict == "fits"


def test_an_engine_that_cannot_read_the_format_is_named(options, small_model, tmp_path, capsys):
    run = _run_file(tmp_path / "run.yaml", small_model, kind="vllm-push")
    said = _fails(capsys, *options(budget=None, fits="rtx-4090", run=run))
    assert "vllm-push reads no bitsandbytes" in said
    assert "compressed-tensors is what vLLM serves" in said
    run = _run_file(tmp_path / "run.yaml", small_model)
    said = _fails(
        capsys, *options(budget=None, fits="rtx-4090", run=run, format="compressed-tensors")
    )
    assert "method: qlora trains bitsandbytes weights" in said
