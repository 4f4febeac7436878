"""CONTRIBUTING's recipes, followed step by step with a toy each; tests/planner/test_mixers.py has the token mixer's."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import planner.families
from app.cli import app
from planner import datafiles
from planner.errors import UnsupportedError, UsageError
from planner.families import fields as family_fields
from planner.importers import words
from planner.importers.settings import Settings
from planner.machines import machine as machines
from planner.models.spec import ModelSpec
from planner.phases import budget
from planner.plan import plan
from planner.replay.steps import replay_run
from planner.run import framework as laws
from planner.run.recipe import Optimizer
from planner.run.runfile import make_recipe
from planner.terms.optimizer import optimizer
from planner.terms.optimizer_kinds import KINDS, Kind, complete
from tests.planner.toys import A_GPU, LLAMA, PARAMETERS, choices, terms

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_recipe_has_a_test() -> None:
    titles = set(re.findall(r"^## Add (.+)$", TEXT, re.MULTILINE))
    assert titles == {
        "a GPU",
        "a model family",
        "a token mixer",
        "an optimizer",
        "a framework version",
    }
    for name in re.findall(r"`((?:planner|profiler|trainer|tests|data)/[\w/.]+\.\w+)`", TEXT):
        assert (ROOT / name).is_file(), name


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of data/ that the planner reads instead."""
    copied = tmp_path / "data"
    for folder in ("gpus", "frameworks", "models", "calibration"):
        shutil.copytree(ROOT / "data" / folder, copied / folder)
    readers = (machines, laws, family_fields)
    for module in readers:
        monkeypatch.setattr(module, "data_dir", lambda: copied)
    forget()
    yield copied
    monkeypatch.undo()
    forget()


def forget() -> None:
    """Forget what was read of data/."""
    assert datafiles.data_dir() != Path()
    for kept in (
        machines.gpu_catalogue,
        machines._index,
        laws.frameworks,
        laws._index,
        laws.pick,
        family_fields._class_table,
    ):
        kept.cache_clear()


def vramwise(*arguments: str) -> str:
    """Run a command and return what it prints."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_add_a_gpu(data: Path) -> None:
    file = data / "gpus" / "nvidia.json"
    rows = json.loads(file.read_text(encoding="utf-8"))
    row = {
        "id": "toy-64",
        "name": "NVIDIA Toy 64GB",
        "class": "datacenter",
        "compute_capability": "9.0",
        "marketed_gb": 64,
        "driver_total_mib": 65_000,
        "torch_total_mib": 64_000,
        "context_mib": 500,
        "bandwidth_gb_s": 1_000,
        "source": {"torch_total_mib": "a log", "driver_total_mib": "nvidia-smi"},
        "retrieved": "2026-11-30",
    }
    unknown = {key: value for key, value in row.items() if key != "torch_total_mib"}
    unknown |= {"id": "toy-32", "name": "NVIDIA Toy 32GB", "driver_total_mib": None}
    file.write_text(json.dumps([*rows, row, unknown]), encoding="utf-8")
    forget()
    assert "NVIDIA Toy 64GB" in vramwise("gpus", "toy-64")
    found = plan(LLAMA, make_recipe(context=16), machines.make_machine("NVIDIA Toy 64GB"))
    assert found.capacity_bytes == (64_000 - 500) * 2**20
    # listed, never guessed
    assert "toy-32" in vramwise("gpus", "toy-32")
    with pytest.raises(UsageError) as caught:
        machines.make_machine("toy-32")
    assert "--vram" in f"{caught.value.message} {caught.value.hint}"


FAMILY = '''
"""Toys: Llama with biases on queries, keys and values."""

from planner.families.decoder import Traits, build_decoder


def build(fields):
    """Return the ModelSpec."""
    return build_decoder(fields, Traits(qkv_bias=True))
'''


def test_add_a_model_family(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from profiler.class_defaults import class_entry
    from profiler.meta_model import build_on_meta, module_counts

    class ToyConfig(transformers.Qwen2Config):
        model_type = "toy"

    class ToyForCausalLM(transformers.Qwen2ForCausalLM):
        config_class = ToyConfig

    transformers.AutoConfig.register("toy", ToyConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    # 1 and 2: the class's defaults, a file and its place in the registry
    file = data / "models" / "class_defaults.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    table["model_types"]["toy"] = class_entry("toy")
    file.write_text(json.dumps(table), encoding="utf-8")
    (tmp_path / "toys.py").write_text(FAMILY, encoding="utf-8")
    path = [*planner.families.__path__, str(tmp_path)]
    monkeypatch.setattr(planner.families, "__path__", path)
    monkeypatch.setitem(planner.families._MODULE_OF, "toy", "toys")
    forget()
    try:
        config = {"model_type": "toy", "hidden_size": 64, "intermediate_size": 112,
                  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "vocab_size": 96}  # fmt: skip
        spec = planner.families.model_spec_from_config(config)
        # 3: every module's count
        theirs = {
            name: count for name, count in module_counts(build_on_meta(config)).items() if count
        }
        assert spec.parameters == sum(theirs.values())
        # a layer q 64 x 64 + 64, k and v 64 x 32 + 32, o 64 x 64, three of 64 x 112, two norms;
        # embeddings and head of 96, the last norm
        layer = 4_160 + 2 * 2_080 + 4_096 + 3 * 7_168 + 128
        assert spec.parameters == 3 * layer + 2 * 96 * 64 + 64
        assert plan(spec, make_recipe(context=16), A_GPU).peak_bytes > 2 * spec.parameters
    finally:
        sys.modules.pop("planner.families.toys", None)
        planner.families._builder.cache_clear()


class Words(StrEnum):
    """One more optimizer."""

    TOY = "toy"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Words:
    """Follow "Add an optimizer": a word and a row, a tool's name."""
    with pytest.raises(ImportError, match="optimizer toy: no row in KINDS"):
        complete(KINDS, (*Optimizer, Words.TOY))
    monkeypatch.setitem(KINDS, Words.TOY, Kind(3))
    monkeypatch.setattr(words, "_OPTIMIZERS", ((r"^toy", Words.TOY), *words._OPTIMIZERS))
    complete(KINDS, (*Optimizer, Words.TOY))
    return Words.TOY


def test_add_an_optimizer(toy: Any) -> None:
    r = replace(choices(method="full", context=8, checkpointing="full"), optimizer=toy)
    states = 3 * 2 * PARAMETERS  # three in 16 bit
    found = optimizer(LLAMA, r)
    assert (found.states.bytes, found.host.bytes, found.step.bytes) == (states, 0, 0)
    step = next(phase for phase in budget(LLAMA, r, A_GPU).phases if phase.name == "step")
    held = {term.name: term.bytes for term in step.terms}
    assert held["optimizer"] == states
    # the replay plays them tensor by tensor: seven norms of 128 B take 512; the embedding's gradient
    # is the largest moment, beside the stream's of 8 tokens
    assert replay_run(LLAMA, r).allocated_bytes == 5 * (2 * PARAMETERS + 7 * 384) + 8 * 128
    settings = Settings({}, tool="toys", version="1", assumed=False)
    assert words.optimizer(settings, "toy_fused") is toy


def test_an_optimizer_that_nobody_steps_is_refused_by_name(toy: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    from profiler.storages import StorageTracker
    from profiler.subjects.optimizers import make_optimizer as traced
    from trainer.optim import make_optimizer

    weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match="optimizer toy"):
        make_optimizer([("weight", weight)], kind=toy, lr=1.0)
    with pytest.raises(UnsupportedError, match="optimizer toy"):
        traced(toy, [weight], StorageTracker())


def peak(framework: str, model: ModelSpec = LLAMA) -> dict[str, int]:
    """Return the loss phase of a plan under a framework."""
    recipe = make_recipe(framework=framework, task="sft", method="lora", context=16)
    return terms(plan(model, recipe, A_GPU), "loss")


def test_add_a_framework_version(data: Path) -> None:
    folder = data / "frameworks"
    before = peak("trl==1.16")
    # 1: the newest law takes the family's name, the one before it its release's and a closed range
    old = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
    old |= {"name": "trl-1.16", "family": "trl", "versions": ">=1.15,<1.17", "aliases": []}
    (folder / "trl-1.16.json").write_text(json.dumps(old), encoding="utf-8")
    new = {
        "name": "trl",
        "family": "trl",
        "title": "TRL 1.17",
        "extends": "trl-1.16",
        "versions": ">=1.17,<2",
        "read": "1.17.0",
        "source": "a toy",
        "retrieved": "2026-11-30",
        # 2: only what differs
        "defaults": {"all": {"loss": "full", "micro_batch_size": 2}},
        "logits": {"full": "full"},
    }
    (folder / "trl.json").write_text(json.dumps(new), encoding="utf-8")
    forget()
    assert [laws.pick(f"trl=={v}").name for v in ("1.15.2", "1.16", "1.17", "1.99")] == [
        "trl-1.16", "trl-1.16", "trl", "trl"
    ]  # fmt: skip
    assert peak("trl==1.16") == before
    assert peak("trl==1.17") != before
    assert laws.pick("trl").switches == laws.pick("trl-1.16").switches
    # 3: the command says which law and what it changes
    said = vramwise("frameworks", "trl==1.17")
    assert "TRL 1.17" in said
    assert "micro_batch_size" in said
    # two laws for one version are what tests/planner/test_frameworks.py looks for
    newest, second = laws.families()["trl"][:2]
    assert (newest.name, second.name) == ("trl", "trl-1.16")
    assert not any(newest.matches(laws._release(v)) for v in ("1.15", "1.16.9"))
    # a misspelt switch is one line with the near match
    new["switches"] = {"reentrnt": True}
    (folder / "trl.json").write_text(json.dumps(new), encoding="utf-8")
    forget()
    with pytest.raises(UsageError, match="reentrnt: unknown key") as caught:
        laws.frameworks()
    assert "reentrant" in (caught.value.hint or "")
