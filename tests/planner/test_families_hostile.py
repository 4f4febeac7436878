"""What a bad config.json gets: one UsageError that names field, value and what is allowed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.families import model_spec_from_config, supported_model_types
from planner.models.catalogue import load_catalogue
from planner.models.config_file import MAX_CONFIG_BYTES
from planner.models.hub import find_model

BASE = dict(load_catalogue()["qwen2.5-0.5b"]["config"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "x"),
        ("hidden_size", -896),
        ("hidden_size", 0),
        ("hidden_size", 1e30),
        ("hidden_size", 896.5),
        ("hidden_size", float("nan")),
        ("hidden_size", float("inf")),
        ("hidden_size", True),
        ("hidden_size", None),
        ("hidden_size", [896]),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 13),
        ("num_key_value_heads", 3),
        ("vocab_size", {"a": 1}),
        ("tie_word_embeddings", "yes"),
        ("torch_dtype", "int7"),
        ("quantization_config", "fp8"),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", ["nonsense"] * 24),
        ("layer_types", "full"),
        ("max_position_embeddings", "many"),
        ("attention_dropout", "nan"),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        model_spec_from_config({**BASE, field: value})
    message = str(caught.value)
    named = {"num_key_value_heads": "num_attention_heads"}
    assert named.get(field, field) in message
    assert "\n" not in message
    assert len(message) < 200


def test_nested_fields_are_named_in_full() -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": "x"}}
    with pytest.raises(UsageError, match=r"text_config\.hidden_size: 'x'"):
        model_spec_from_config(config)
    with pytest.raises(UsageError, match="text_config: expected an object"):
        model_spec_from_config({"model_type": "gemma3", "text_config": 5})
    with pytest.raises(UsageError, match=r"vision_config\.patch_size"):
        model_spec_from_config({"model_type": "gemma3", "vision_config": {"patch_size": -1}})


@pytest.mark.parametrize("value", [None, 7, "", ["llama"], {}])
def test_a_bad_model_type(value: Any) -> None:
    with pytest.raises(UsageError, match="model_type"):
        model_spec_from_config({**BASE, "model_type": value})


@pytest.mark.parametrize("document", [[], 5, "text", None])
def test_a_document_that_is_no_object(document: Any) -> None:
    with pytest.raises(UsageError, match="expected an object"):
        model_spec_from_config(document)


def test_files_that_are_not_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, said in [
        (json.dumps(BASE)[:100].encode(), "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1, 2]", "expected an object"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[" * 200_000, "nested too deeply|not valid JSON"),
    ]:
        file.write_bytes(content)
        with pytest.raises(UsageError, match=said):
            find_model(str(file))
    file.unlink()
    with pytest.raises(UsageError, match="No such file"):
        find_model(str(file))
    with pytest.raises(UsageError, match=r"config\.json"):
        find_model(str(tmp_path))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(100_000_000)
    with pytest.raises(UsageError, match=f"100000000 bytes is too large.*|{MAX_CONFIG_BYTES}"):
        find_model(str(file))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-5, 200), max_size=6),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)
FIELDS = sorted(
    {key for entry in load_catalogue().values() for key in entry["config"]} - {"model_type"}
)


@settings(max_examples=600, deadline=None)
@given(
    model_type=st.sampled_from(supported_model_types()),
    changes=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4),
)
def test_junk_is_planned_exactly_or_refused(model_type: str, changes: dict[str, Any]) -> None:
    try:
        spec = model_spec_from_config({**changes, "model_type": model_type})
    except UsageError:
        return
    held = (*spec.embeddings, *spec.final, *spec.towers, *spec.extra)
    modules = [*held, *(module for layer in spec.layers for module in layer.modules)]
    assert all(n > 0 for module in modules for shape in module.shapes for n in shape)
    assert all(module.count > 0 for module in modules)
    assert 0 < spec.active_parameters <= spec.text_parameters <= spec.parameters


SIZES = st.integers(1, 12)


@settings(max_examples=200, deadline=None)
@given(
    heads=SIZES, ratio=st.integers(1, 4), width=SIZES, layers=st.integers(1, 40), tied=st.booleans()
)
def test_counts_follow_the_shape(
    heads: int, ratio: int, width: int, layers: int, tied: bool
) -> None:
    """A Llama of any shape has the count its formula gives, and one more layer adds one layer."""
    hidden, kv_heads, inner, vocab = heads * ratio * width, heads, 3 * width, 17

    def count(num_layers: int) -> int:
        config = {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_attention_heads": heads * ratio,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
            "vocab_size": vocab,
            "num_hidden_layers": num_layers,
            "tie_word_embeddings": tied,
        }
        return model_spec_from_config(config).parameters

    layer = 2 * hidden * hidden + 2 * hidden * kv_heads * width + 3 * hidden * inner + 2 * hidden
    assert count(layers + 1) - count(layers) == layer
    assert count(layers) == layers * layer + hidden + vocab * hidden * (1 if tied else 2)
