"""What is written: stock transformers and PEFT load it, the planner prices it, and disks that are full leave nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from planner.errors import VramwiseError
from planner.models.hub import read_model
from planner.quant.table import canonical, scheme_table, stored_bytes
from trainer.checkpoint import latest
from trainer.merge import merge_checkpoint
from trainer.quantize import files
from trainer.quantize.bnb import BitsAndBytes
from trainer.quantize.files import Files, stored_tensors
from trainer.quantize.harm import Measurement
from trainer.quantize.job import quantize
from trainer.quantize.streamed import Streamed

ROOT = Path(__file__).parents[3]
LEAST = 68_000
"""A budget for the small model just above its least."""


@pytest.fixture(scope="module")
def loaded(written):
    return AutoModelForCausalLM.from_pretrained(written[0] / "bnb", device_map={"": "cpu"})


def _tensors(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_stock_transformers_holds_what_was_chosen(written, loaded, source):
    card = written[1]["formats"]["bnb"]
    original = Files(source)
    blocks = {each["name"]: each["stored"] for each in card["linears"]}
    assert set(blocks.values()) == {"16-bit", "block 32", "block 64"}  # all three are in the test
    modules = dict(loaded.named_modules())
    for name, stored in blocks.items():
        weight = modules[name].weight
        if stored == "16-bit":
            assert type(modules[name]) is nn.Linear
            assert torch.equal(weight, original[f"{name}.weight"].bfloat16())
        else:
            assert type(modules[name]).__name__ == "Linear4bit"
            assert weight.quant_state.blocksize == int(stored.removeprefix("block "))
            error = dequantize_4bit(weight.data, weight.quant_state) - original[f"{name}.weight"]
            assert error.abs().max() < 0.2  # of weights of deviation 0.1
    assert type(modules["lm_head"]) is nn.Linear
    assert torch.equal(
        modules["model.layers.3.self_attn.k_proj"].bias,
        original["model.layers.3.self_attn.k_proj.bias"].bfloat16(),
    )


def test_a_kept_linear_of_layer_1_keeps_none_of_layer_10(written):
    """transformers takes a listed "model.layers.1" for layers 10 and 11 too; whole names it does not."""
    listed = json.loads((written[0] / "bnb/config.json").read_text())["quantization_config"]
    kept = written[1]["formats"]["bnb"]["kept"]
    assert listed["llm_int8_skip_modules"] == [*kept, "lm_head"]
    assert all(name.count(".") == 4 for name in kept)


def test_the_planner_prices_what_is_held_and_what_is_on_disk(written, loaded):
    for form in ("bnb", "compressed-tensors"):
        folder, card = written[0] / form, written[1]["formats"][form]
        stored = _tensors(folder)
        assert sum(tensor.nbytes for tensor in stored.values()) == card["bytes"]
        model = read_model(folder)
        scheme = canonical(model.checkpoint_quantization)
        planned = stored_bytes(model, scheme_table(model, scheme), 2)
        packed = sum(each["stored"] != "16-bit" for each in card["linears"])
        if form == "bnb":
            # in memory the offset of the constants is a number of 4 bytes; on disk it stands in a JSON text
            texts = [t.nbytes for name, t in stored.items() if "quant_state" in name]
            assert len(texts) == packed
            assert planned == card["bytes"] - sum(texts) + 4 * packed
            assert planned == _held(loaded)
        else:
            assert planned == card["bytes"] - 16 * packed  # weight_shape: two int64


def _held(model):
    total = 0
    for parameter in model.parameters():
        total += parameter.nbytes
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            parts = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
            total += sum(part.nbytes for part in parts)
    return total


def test_the_measured_kl_is_that_of_the_loaded_model(written, source, asked):
    """The check goes layer by layer in fp32; here both models run whole."""
    from trainer.model import load_tokenizer
    from trainer.quantize.calibration import read_calibration

    job = asked("unused")
    held = read_calibration(
        load_tokenizer(str(source)), job.data, root=job.root, tokens=job.tokens
    ).held
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(written[0] / "bnb", device_map={"": "cpu"})
    plain = packed.dequantize().float()
    with torch.no_grad():
        before = whole(held).logits.log_softmax(-1)
        after = plain(held).logits.log_softmax(-1)
    kl = float((before.exp() * (before - after)).sum(-1).mean())
    card = written[1]["formats"]["bnb"]
    assert card["measured_kl"] == pytest.approx(kl, rel=0.01)


def test_peft_wraps_both_kinds_and_every_gradient_arrives(written, loaded):
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(loaded, LoraConfig(r=4, target_modules=names))
    # eval-mode 4-bit linears repack themselves on some CPUs, for a kernel without a backward
    model.train()
    ids = torch.arange(3, 40).unsqueeze(0)
    model(ids, labels=ids).loss.backward()
    missing = [
        name
        for name, parameter in model.named_parameters()
        if "lora_B" in name and (parameter.grad is None or not parameter.grad.any())
    ]
    assert not missing
    model.unload()


def test_tokenizer_and_card_stand_beside_the_weights(written, source):
    folder, card = written[0] / "bnb", written[1]["formats"]["bnb"]
    text = "12+34=46"
    tokens = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokens
    assert json.loads((folder / "quantize.json").read_text()) == card
    assert card["bytes"] <= 1_100_000
    assert card["bytes"] == card["outside_linears_bytes"] + sum(
        each["bytes"] for each in card["linears"]
    )
    sizes = [point["bytes"] for point in card["curve"]]
    assert sizes == sorted(sizes)
    assert (folder / "quantize.svg").read_text().startswith("<svg")


def test_shards_have_an_index_that_transformers_follows(asked, tmp_path, monkeypatch, small_model):
    monkeypatch.setattr(files, "SHARD_BYTES", 20_000)
    whole = tmp_path / "shards"
    quantize(asked(whole, model=small_model, budget=LEAST), quiet=True)
    assert len(list(whole.glob("model-*-of-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(whole, device_map={"": "cpu"})
    assert type(model.model.layers[1].mlp.up_proj).__name__ == "Linear4bit"
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in _tensors(whole).values())


def test_a_weight_that_reads_back_otherwise_is_an_error_and_nothing_is_left(
    asked, tmp_path, monkeypatch, small_model
):
    """One flipped bit in one packed weight, between choosing and writing."""
    stored = Measurement.stored

    def flipped(self, linear, candidate):
        tensors = stored(self, linear, candidate)
        if linear.endswith("layers.1.mlp.up_proj"):
            tensors["weight"][5] ^= 1
        return tensors

    monkeypatch.setattr(Measurement, "stored", flipped)
    out = tmp_path / "out"
    with pytest.raises(VramwiseError, match=r"layers\.1\.mlp\.up_proj\.weight does not read back"):
        quantize(asked(out, model=small_model, budget=LEAST), quiet=True)
    assert not out.exists()


def test_an_interrupted_measurement_goes_on_and_gives_the_same_bytes(
    asked, tmp_path, monkeypatch, small_model
):
    def job(name):
        return asked(tmp_path / name, model=small_model, budget=LEAST + 20_000, format="both")

    lines = []
    quantize(job("at-once"), quiet=True)
    backward = Measurement._backward

    def dies(self, index):
        if index == 0:
            raise KeyboardInterrupt
        backward(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "_backward", dies)
        with pytest.raises(KeyboardInterrupt):
            quantize(job("twice"), quiet=True)
    assert not (tmp_path / "twice").exists()
    layers = []

    def counted(self, index):
        layers.append(index)
        backward(self, index)

    monkeypatch.setattr(Measurement, "_backward", counted)
    quantize(job("twice"), say=lines.append, quiet=True)
    assert layers == [0]
    assert any("going on" in line for line in lines)
    for form in ("bnb", "compressed-tensors"):
        again, first = (_tensors(tmp_path / name / form) for name in ("twice", "at-once"))
        assert again.keys() == first.keys()
        assert all(torch.equal(again[name], first[name]) for name in first)
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_nothing_that_loads(small_model, tmp_path):
    """Files may not grow beyond 150 kB: what is kept of a layer does not reach that, the checkpoint does."""
    out = tmp_path / "out"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000));"
        "from app.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ["quantize", str(small_model), "--out", str(out), "--budget", "2MB"]
    command += ["--task", "arithmetic", "--tokens", "256"]
    made = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=ROOT
    )
    assert made.returncode == 1, made.stderr
    assert "cannot be written: " in made.stderr
    assert "Traceback" not in made.stderr
    assert not out.exists()
    assert not list(tmp_path.rglob("config.json"))


def test_only_one_layers_weights_are_in_memory(source):
    model = Streamed(source, device=torch.device("cpu"))
    with model.loaded(3) as layer:
        held = [name for name, p in model.model.named_parameters() if not p.is_meta]
        assert held
        assert all(name.startswith("model.layers.3.") for name in held)
        assert not any(parameter.is_meta for parameter in layer.parameters())
    assert all(parameter.is_meta for parameter in model.model.parameters())


def test_a_written_checkpoint_trains_by_qlora_and_merges_over_what_its_codes_mean(
    asked, small_model, document, train_run_of, tmp_path
):
    """method: qlora and nothing else; the merged weights are the dequantised ones and the adapters' product."""
    base = tmp_path / "base"
    quantize(asked(base, model=small_model, budget=LEAST), quiet=True)
    made = document(
        model=str(base),
        recipe={"method": "qlora", "dtype": "bf16"},
        train={"lr": 1e-2},
    )
    result = train_run_of(made)
    assert (result.steps, result.bad_steps) == (2, 0)
    merge_checkpoint(result.output, tmp_path / "merged", dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapters = load_file(latest(result.output).path / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    stored = stored_tensors(Files(base), name)
    a, b = (adapters[f"base_model.model.{name}.lora_{each}.weight"].float() for each in ("A", "B"))
    product = b @ a
    change = merged.get_submodule(name).weight - BitsAndBytes().read_back(stored, torch.float32)
    assert product.abs().max() > 0
    assert torch.nn.functional.cosine_similarity(change.flatten(), product.flatten(), 0) > 0.99
