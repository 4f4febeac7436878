"""Share links: what is wrong or hostile is named and left out; what is right comes back exactly."""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

import app.links
from app.knobs import BY_KEY, KNOBS, parse, to_field, to_widget
from app.links import check_link, link, link_parameters, read_link
from app.runs import DEFAULTS

MAIN = Path(app.links.__file__).with_name("main.py")
HOSTILE = {
    "batch": "9999999999",
    "rank": "-1",
    "context": "1e99",
    "beta": "nan",
    "utilization": "inf",
    "task": "rm -rf /",
    "method": "QLORA",
    "gpu": "<img src=x onerror=alert(1)>",
    "gpus": "-3",
    "nodes": "0",
    "vram": "0",
    "model": "../../etc/passwd",
    "framework": "__import__('os').system('id')",
    "algorithm": "banana",
    "kv_dtype": "x" * 500,
    "targets": "a\x00b",
    "nonsense": "[click](javascript:alert(1))",
}


@pytest.mark.parametrize(("key", "text"), HOSTILE.items())
def test_a_hostile_parameter_is_a_notice_and_the_default_stays(key: str, text: str) -> None:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    at.query_params[key] = text
    at.run()
    assert not at.exception
    assert len(at.warning) == 1
    assert "is not used" in at.warning[0].value
    assert at.metric[0].label == "Peak"
    if key in DEFAULTS and key in at.session_state:
        assert at.session_state[key] == DEFAULTS[key]


def test_all_of_them_at_once() -> None:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    for key, text in HOSTILE.items():
        at.query_params[key] = text
    at.run()
    assert not at.exception
    assert len(at.warning) == 10  # and that there are more


def test_notices_cannot_hold_markup() -> None:
    for notice in check_link({"zz`**<b>": "`</code><script>"}):
        inner = notice.split("`")
        assert len(inner) == 3, notice


def test_defaults_are_left_out() -> None:
    assert link_parameters(DEFAULTS) == {}
    assert link("http://127.0.0.1:8501/?old=1", DEFAULTS) == "http://127.0.0.1:8501/"


def test_a_size_is_in_the_link_only_where_it_counts() -> None:
    values = {**DEFAULTS, "vram": 12.0}
    assert "vram" not in link_parameters(values)
    assert link_parameters({**values, "gpu": "own size"})["vram"] == "12"


_TEXTS = st.one_of(st.text(max_size=30), st.integers().map(str), st.floats().map(str))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*DEFAULTS, "other"]), _TEXTS, max_size=6))
def test_any_link_gives_settings_that_come_back_the_same(parameters: dict[str, str]) -> None:
    values = read_link(parameters)
    assert set(values) == set(DEFAULTS)
    again = dict(parse_qsl(urlsplit(link("http://x/", values)).query))
    assert check_link(again) == []
    assert link_parameters(read_link(again)) == link_parameters(values)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.key)
def test_every_knob_refuses_what_its_field_would_refuse(knob) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(knob, "\x00" * 200)
    assert BY_KEY[knob.key] is knob


@pytest.mark.parametrize(("text", "field"), [("yes", True), ("no", False), ("4", 4)])
def test_a_layer_may_stay_divided_over_a_few_gpus(text: str, field: object) -> None:
    knob = BY_KEY["reshard"]
    assert to_field(knob, parse(knob, text)) == field
    assert to_widget(knob, field) == text
    with pytest.raises(ValueError, match="yes, no or a number of GPUs"):
        parse(knob, "some")
