"""The class defaults we ship are transformers' own, and a config without them is planned by them."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from planner.families import model_spec_from_config
from planner.families.fields import ConfigFields, _class_table, known_model_types

pytest.importorskip("transformers")

from profiler.class_defaults import class_entry


@pytest.mark.parametrize("model_type", known_model_types())
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    assert _class_table()[model_type] == class_entry(model_type)


def test_a_tied_head_implied_by_the_class() -> None:
    """Gemma-2's config.json says nothing of tying: its class does."""
    config = {"model_type": "gemma2", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1}
    assert model_spec_from_config(config).tied
    assert not model_spec_from_config(
        {**config, "model_type": "llama", "num_attention_heads": 4}
    ).tied


def test_an_explicit_null_is_not_the_default() -> None:
    fields = ConfigFields({"sliding_window": None}, "gemma2")
    assert fields.optional("sliding_window") is None
    assert ConfigFields({}, "gemma2").optional("sliding_window") == 4096


def test_a_missing_dtype_is_torchs_default_and_old_spellings_count() -> None:
    base = {"model_type": "llama", "num_hidden_layers": 1}
    assert model_spec_from_config(base).checkpoint_dtype == "fp32"
    assert model_spec_from_config({**base, "torch_dtype": "bfloat16"}).checkpoint_dtype == "bf16"
    assert model_spec_from_config({**base, "dtype": "torch.float16"}).checkpoint_dtype == "fp16"


def test_published_quantisation_is_named() -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    base = {"model_type": "llama", "num_hidden_layers": 1}
    spec = model_spec_from_config({**base, "quantization_config": block})
    assert spec.checkpoint_quantization == "fp8-block"
    assert spec.quantization_config == block
