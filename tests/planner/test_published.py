"""The published tables come out of their inputs, to the printed digit."""

import pytest

from planner.answers import published as tables
from planner.answers.published import context_line, published, render
from planner.errors import UnknownNameError


def test_the_ten_numbers() -> None:
    rows = published("unsloth-grpo")["rows"]
    got = {(row["column"], row["line"]): row["reproduced"] for row in rows}
    assert got == {
        ("unsloth", "training"): 42,
        ("unsloth", "grpo_logits"): 9.8,
        ("unsloth", "inference_weights"): 0,
        ("unsloth", "kv_cache"): 2.5,
        ("unsloth", "total"): 54.3,
        ("trl", "training"): 414,
        ("trl", "grpo_logits"): 78.3,
        ("trl", "inference_weights"): 16,
        ("trl", "kv_cache"): 2.5,
        ("trl", "total"): 510.8,
    }
    for row in rows:
        assert row["published"] == row["reproduced"]
        assert row["derivation"]
        assert row["unit"]
        assert isinstance(row["op_level_bytes"], int)
    exact = {(row["column"], row["line"]): row["exact"] for row in rows}
    assert exact["trl", "training"] == pytest.approx(414.51, abs=0.01)
    assert exact["unsloth", "training"] == pytest.approx(42.09, abs=0.01)
    assert exact["trl", "grpo_logits"] == pytest.approx(78.281, abs=0.001)
    assert exact["trl", "inference_weights"] == pytest.approx(16.06, abs=0.01)


def test_they_follow_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CONTEXT", 20_000)
    rows = published("unsloth-grpo")["rows"]
    changed = {
        (row["column"], row["line"]) for row in rows if row["reproduced"] != row["published"]
    }
    # "20K" is 20,480: with 20,000 no line that depends on it comes out
    assert {("trl", "training"), ("trl", "grpo_logits"), ("unsloth", "total")} <= changed


def test_the_line_of_the_context_table() -> None:
    at_zero, slope = context_line("trl")
    assert (at_zero, slope) == pytest.approx((9.697, 404.73), abs=0.01)
    at_zero, slope = context_line("unsloth")
    assert (at_zero, slope) == pytest.approx((7.370, 4718.9), abs=0.05)


def test_every_cell_of_oxen_is_right() -> None:
    document = published("oxen-grpo")
    assert len(document["rows"]) == 20
    wrong = [
        (row["line"], row["column"])
        for row in document["rows"]
        if row["reproduced_fits"] != row["published_fits"]
    ]
    assert wrong == []
    assert document["right_cells"] == 20


def test_tables_render_and_unknown_names_list_the_known() -> None:
    for name in tables.TABLES:
        text = render(published(name))
        assert all(note in text for note in published(name)["notes"])
    with pytest.raises(UnknownNameError) as caught:
        published("unsloth")
    assert "unsloth-grpo" in (caught.value.hint or "")
