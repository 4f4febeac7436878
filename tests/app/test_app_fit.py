"""Will it fit?: every control moves the plan, and every figure on the page is the planner's."""

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

import app.runs
import planner.models.hub
from app import details
from app.knobs import KNOBS, Kind, Knob, applies
from app.palette import term_words
from app.runs import DEFAULTS, run_of
from app.words import in_app
from planner.errors import VramwiseError
from planner.models.hub import find_model
from planner.models.hub_remote import fetch_model
from planner.plan import Plan, plan
from planner.units import format_bytes
from tests.planner.test_hub import hub

__all__ = ["hub"]

MAIN = Path(app.runs.__file__).with_name("main.py")


def start(*, tab: str = "", export: str = "", **parameters: str) -> AppTest:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    for key, chosen in (("part", tab), ("export", export)):
        if chosen:
            at.session_state[key] = chosen
    for name, value in parameters.items():
        at.query_params[name] = value
    at.run()
    assert not at.exception
    return at


def start_with_model(name: str) -> AppTest:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    at.session_state["model"] = name
    return at.run()


def metric(at: AppTest, label: str) -> str:
    return next(item.value for item in at.metric if item.label == label)


def planned(**values: Any) -> Plan:
    run = run_of({**DEFAULTS, **values})
    return plan(run.model, run.recipe, run.machine)


def test_the_first_page_shows_the_planners_figures() -> None:
    at = start()
    result = planned()
    assert metric(at, "Peak") == format_bytes(result.peak_bytes)
    assert metric(at, "Capacity") == format_bytes(result.capacity_bytes)
    assert metric(at, "Headroom") == format_bytes(result.headroom_bytes)
    assert metric(at, "Host RAM") == format_bytes(result.host_peak_bytes)
    table = at.table[0].value
    terms = {term_words(term.name): term for term in result.phase(result.peak_phase).terms}
    assert {name.replace("\\", "") for name in table["term"]} == set(terms)
    assert set(table["size"]) == {format_bytes(term.bytes) for term in terms.values()}


def answer(**values: Any) -> str:
    """Return the peak, or the error's message where the run contradicts itself."""
    try:
        return format_bytes(planned(**values).peak_bytes)
    except VramwiseError as error:
        return in_app(error.message)


def other_value(knob: Knob) -> Any:
    """Return a value that is neither the default nor a framework's."""
    if knob.key == "task":
        return "sft"
    if knob.key == "algorithm":
        return "dapo"
    if knob.kind in (Kind.CHOICE, Kind.SWITCH):
        return next(value for value in reversed(knob.options) if value != knob.default)
    if knob.kind is Kind.TEXT:
        return {"targets": "attention", "saved_modules": "lm_head", "reshard": "2"}[knob.key]
    if knob.kind is Kind.NUMBER:
        return 0.5
    return {"context": 3000, "prompt": 700, "kv_bytes": 2**30, "keep_layers": 3, "sleep": 1}.get(
        knob.key, 4
    )


@pytest.fixture(scope="module")
def shared() -> AppTest:
    return with_more_open()


def with_more_open() -> AppTest:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    at.session_state["more"] = True
    return at.run()


MARKED = [
    pytest.param(knob, marks=pytest.mark.slow) if knob.path.startswith("parallel.") else knob
    for knob in KNOBS
]
"""Every one of them: the degrees of a layout, tested apart in tests/planner, with the slow tests."""


@pytest.mark.parametrize("knob", MARKED, ids=lambda knob: knob.key)
def test_every_control_changes_the_plan_as_the_recipe_says(shared: AppTest, knob: Knob) -> None:
    value = other_value(knob)
    task = DEFAULTS["task"] if applies(knob, DEFAULTS["task"], DEFAULTS["method"]) else "serve"
    shared.get_by_key("task").set_value(task).run()
    before = {"task": task} if task != DEFAULTS["task"] else {}
    shared.get_by_key(knob.key).set_value(value).run()
    assert not shared.exception
    shown = shared.error[0].value.replace("\\", "") if shared.error else metric(shared, "Peak")
    assert shown == answer(**{**before, knob.key: value})
    shared.get_by_key(knob.key).set_value(knob.default).run()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama-3.2-1b"),
        ("gpu", "h100-sxm"),
        ("framework", "trl"),
        ("gpus", 2),
        ("ram", 16.0),
    ],
)
def test_model_and_machine_controls(key: str, value: Any) -> None:
    at = start()
    at.get_by_key(key).set_value(value).run()
    assert not at.exception
    assert metric(at, "Headroom") == format_bytes(planned(**{key: value}).headroom_bytes)


def test_plain_gib_instead_of_a_gpu() -> None:
    at = start(gpu="own size", vram="40")
    at.get_by_key("vram").set_value(12.0).run()
    assert metric(at, "Capacity") == format_bytes(planned(gpu="own size", vram=12.0).capacity_bytes)


def test_levers_are_the_planners_and_one_click_makes_it_fit() -> None:
    at = start(framework="trl", method="lora", model="llama-3.1-8b", context="4096", batch="8")
    assert "Does not fit" in at.header[0].value
    before = metric(at, "Peak")
    at.button(key="lever_0").click().run()
    assert metric(at, "Peak") != before
    at.get_by_key("model").set_value("qwen2.5-3b").run()
    for _ in range(3):
        if "Does not fit" not in at.header[0].value:
            break
        at.button(key="make_it_fit").click().run()
        assert not at.exception
    assert "Does not fit" not in at.header[0].value


@pytest.mark.parametrize("key", ["context", "batch", "generations", "rank"])
def test_the_largest_that_fits_can_be_used_and_fits(key: str) -> None:
    at = start(model="qwen2.5-3b", tab=details.LARGEST)
    at.button(key=f"use_{key}").click().run()
    assert "Fits" in at.header[0].value
    assert f"Use {at.session_state[key]:,}" == at.button(key=f"use_{key}").label


def test_an_impossible_run_is_one_clear_error() -> None:
    at = start(method="full", quantization="nf4")
    assert "cannot be trained in full" in at.error[0].value
    assert not at.exception
    assert not at.metric


def test_a_model_that_is_not_there() -> None:
    at = start_with_model("../../etc/passwd")
    assert "not in the catalogue" in at.error[0].value


@pytest.mark.parametrize(
    "typed", ["llama 3.1 8b", "LLAMA-3.1-8B-Instruct", "unsloth/Meta-Llama-3.1-8B-bnb-4bit"]
)
def test_a_model_is_found_however_it_is_typed(typed: str) -> None:
    at = start(model=typed)  # a link may say it so, too
    assert not at.warning
    assert metric(at, "Peak") == format_bytes(planned(model="llama-3.1-8b").peak_bytes)
    assert any("llama-3.1-8b" in said.value for said in at.sidebar.caption)
    assert bool([b for b in at.button if b.key == "look_up_own"]) == ("/" in typed)


def type_gpu(at: AppTest, typed: str) -> None:
    """Write in the box what is none of its options."""
    box = at.selectbox(key="gpu")
    box.options.append(typed)  # the test's box knows no others
    box.set_value(typed).run()


@pytest.mark.parametrize(
    ("typed", "gpu", "gpus"),
    [("8 x h100", "h100-sxm", 8), ("4090 laptop", "rtx-4090-laptop", 1), ("2x 3090", "rtx-3090", 2)],
)  # fmt: skip
def test_cards_are_found_however_they_are_typed(typed: str, gpu: str, gpus: int) -> None:
    at = start()
    type_gpu(at, typed)
    assert not at.exception
    assert (at.session_state["gpu"], at.session_state["gpus"]) == (gpu, gpus)
    assert at.query_params["gpu"] == gpu
    assert not at.error


@pytest.mark.parametrize(("typed", "near"), [("16gb laptop", "rtx-4090-laptop"), ("h1000", "h100")])
def test_what_is_no_card_or_several_is_said_and_changes_nothing(typed: str, near: str) -> None:
    at = start(gpu="rtx-3090")
    type_gpu(at, typed)
    assert near in " ".join(said.value for said in at.sidebar.caption).replace("\\", "")
    assert typed in at.error[0].value
    assert at.session_state["gpu"] == "rtx-3090"
    assert metric(at, "Peak")


def test_a_name_of_several_models_names_them() -> None:
    at = start_with_model("qwen 7b")
    assert "several models" in at.error[0].value
    assert any("qwen2.5-7b" in said.value for said in at.caption)


def test_the_hub_is_asked_only_on_a_click(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, **_: Any) -> Any:
        asked.append(name)
        return find_model("qwen2.5-0.5b")

    monkeypatch.setattr(planner.models.hub, "fetch_model", fetch)
    at = start_with_model("someone/some-model")
    assert asked == []
    assert not at.metric
    at.button(key="look_up").click().run()
    assert asked == ["someone/some-model"]
    assert metric(at, "Peak") == format_bytes(planned(model="qwen2.5-0.5b").peak_bytes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/gated", "is gated"),
        ("org/slow", "did not answer"),
        ("org/crowded", "too many requests"),
        ("org/absent", "no such repository"),
        ("org/down", "cannot be reached"),
    ],
)
def test_a_hub_that_gives_nothing_is_said_and_what_to_do(
    hub: str, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    address = "http://127.0.0.1:9" if name == "org/down" else hub
    ask = partial(fetch_model, endpoint=address, offline=False, timeout_s=1)
    monkeypatch.setattr(planner.models.hub, "fetch_model", lambda name, **_: ask(name))
    at = start_with_model(name)
    at.button(key="look_up").click().run()
    assert not at.exception
    told = [item.value.replace("\\", "") for item in (*at.error, *at.caption)]
    assert said in " ".join(told)
    assert not [text for text in told if "--" in text]
    assert any("config.json can be uploaded" in text for text in told)


def test_placeholders_say_what_the_framework_does() -> None:
    at = start(framework="trl")
    box = next(item for item in at.selectbox if item.key == "checkpointing")
    assert box.proto.placeholder == "full"
    prompt = next(item for item in at.number_input if item.key == "prompt")
    assert prompt.proto.placeholder == "none"  # what the plan assumes where none is given


def shown_link(at: AppTest) -> str:
    return next(code.value for code in at.code if code.value.startswith("http"))


def test_a_link_restores_every_setting() -> None:
    chosen: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "gpu": "h100-sxm",
        "context": 5000,
        "batch": 3,
    }
    chosen |= {"optimizer": "lion", "beta": 0.25, "packing": "yes", "targets": "q_proj, v_proj"}
    at = with_more_open()
    at.session_state["part"], at.session_state["export"] = details.TAKE, "Link"
    for key, value in chosen.items():
        at.get_by_key(key).set_value(value)
    at.run()
    link = shown_link(at)
    query = dict(parse_qsl(urlsplit(link).query))
    again = start(tab=details.TAKE, export="Link", **query)
    assert metric(again, "Peak") == metric(at, "Peak") == format_bytes(planned(**chosen).peak_bytes)
    assert shown_link(again) == link
    assert not again.warning


def test_more_settings_are_made_when_they_are_looked_at_or_set() -> None:
    closed = start()
    assert "optimizer" not in {box.key for box in closed.selectbox}
    set_by_link = start(optimizer="lion")
    assert set_by_link.selectbox(key="optimizer").value == "lion"
    assert metric(set_by_link, "Peak") == format_bytes(planned(optimizer="lion").peak_bytes)


def test_other_tools_and_train_settings() -> None:
    at = start(tab=details.TAKE)
    at.get_by_key("dataset").set_value("gsm8k").run()
    at.get_by_key("steps").set_value(7).run()
    assert "name: gsm8k" in at.code[0].value
    assert "steps: 7" in at.code[0].value
    at.session_state["export"] = "Other tools"
    at.run()
    for tool in at.get_by_key("tool").options:
        at.get_by_key("tool").set_value(tool).run()
        assert not at.exception


def test_every_chart_has_a_text_alternative() -> None:
    at = start(tab=details.CURVE)
    charts = at.get("vega_lite_chart")
    assert len(charts) == 2
    assert all(chart.proto.alt for chart in charts)
