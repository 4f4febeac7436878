"""Architectures no family knows: planned from transformers' module tree, or refused with a reason."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest.importorskip("transformers")

import planner.families
from planner.errors import MissingExtraError, UnknownNameError, UnsupportedError, UsageError
from planner.families import model_spec_from_config, supported_model_types
from planner.models.spec import MixerKind, MlpKind
from profiler.meta_model import build_on_meta, model_spec_from_transformers

D: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kind", ["cohere", "exaone4", "helium", "arcee", "apertus"])
def test_an_unknown_family_is_exact(kind: str) -> None:
    assert kind not in supported_model_types()
    config = {**D, "model_type": kind}
    spec, model = model_spec_from_transformers(config), build_on_meta(config)
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    assert spec.num_layers == 4
    assert {layer.mlp.intermediate for layer in spec.layers} == {112}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "olmo2", "qwen3_moe", "starcoder2"])
def test_it_agrees_with_the_families(kind: str) -> None:
    """Both ways to the same model: counts, mixers and MLPs are equal."""
    config = {
        **D,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "model_type": kind,
    }
    config |= {"num_experts_per_tok": 2, "sliding_window": None}
    tree, ours = model_spec_from_transformers(config), model_spec_from_config(config)
    assert tree.parameters == ours.parameters
    assert tree.parameters_by_module == ours.parameters_by_module
    assert (tree.tied, tree.vocab, tree.hidden) == (ours.tied, ours.vocab, ours.hidden)
    for theirs, mine in zip(tree.layers, ours.layers, strict=True):
        assert theirs.mixer == dataclasses.replace(mine.mixer, softcap=0.0)
        assert (theirs.mlp.kind, theirs.mlp.intermediate) == (mine.mlp.kind, mine.mlp.intermediate)
        assert theirs.mlp.top_k == mine.mlp.top_k
        assert {(m.name, m.shapes) for m in theirs.modules} == {
            (m.name, m.shapes) for m in mine.modules
        }


def test_windows_and_experts_are_seen() -> None:
    spec = model_spec_from_transformers({**D, "model_type": "exaone4", "sliding_window": 8})
    kinds = [spec.layers[index].mixer.kind for index in spec.layer_order]
    assert MixerKind.SLIDING in kinds
    assert MixerKind.FULL in kinds
    mixture = {"model_type": "flex_olmo", **D, "num_experts": 4, "num_experts_per_tok": 2}
    assert {la.mlp.kind for la in model_spec_from_transformers(mixture).layers} == {MlpKind.MOE}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "zamba2"}, "no ordinary attention.*mamba"),
        ({"model_type": "rwkv"}, "lacks num_attention_heads"),
        ({"model_type": "vit"}, "no language model"),
    ],
)
def test_what_cannot_be_planned_says_why(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        model_spec_from_transformers(config)


def test_bad_configs_are_one_line() -> None:
    with pytest.raises(
        UsageError, match=r"transformers cannot build 'cohere'.*hidden_size"
    ) as caught:
        model_spec_from_transformers({**D, "model_type": "cohere", "hidden_size": "x"})
    assert "\n" not in str(caught.value)
    with pytest.raises(UnknownNameError, match="'coherre'"):
        model_spec_from_transformers({"model_type": "coherre"})


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**D, "model_type": "helium"}))
    assert model_spec_from_transformers(tmp_path).model_type == "helium"


def test_the_command_plans_an_unknown_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.cli import main

    config = {**D, "head_dim": 16, "model_type": "helium"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["models", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(p.numel() for p in build_on_meta(config).parameters())
    assert facts["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 2


def test_without_transformers_the_error_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: Any) -> Any:
        raise MissingExtraError("planning from transformers' module tree", "train")

    monkeypatch.setattr(planner.families, "outside_builder", missing)
    with pytest.raises(UnsupportedError, match="'helium' is not an architecture") as caught:
        model_spec_from_config({**D, "model_type": "helium"})
    assert "train extra" in (caught.value.hint or "")
