"""Every page: it runs, its controls do what they say, and its figures are the library's."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import app.runs
from app import finder, finding, jobs, pins, scoring
from app.knobs import BY_KEY
from app.palette import term_words
from planner.accuracy.score import Accuracy
from planner.answers.cards import cards_for_model
from planner.answers.published import published
from planner.answers.recommend import recommend
from planner.doctor.fix_table import MAKERS
from planner.doctor.titles import TITLES
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.framework import pick
from planner.run.recipe import Task
from planner.units import format_bytes

APP = Path(app.runs.__file__).parent
PAGES = sorted(path.stem for path in (APP / "app_pages").glob("*.py"))


def open_page(name: str, state: Mapping[str, Any] | None = None, **parameters: str) -> AppTest:
    at = AppTest.from_file(str(APP / "main.py"), default_timeout=120)
    for key, value in parameters.items():
        at.query_params[key] = value
    for key, value in (state or {}).items():
        at.session_state[key] = value
    at.switch_page(f"app_pages/{name}.py").run()
    assert not at.exception, at.exception[0].stack_trace
    return at


@pytest.mark.parametrize("name", PAGES)
def test_every_page_runs_and_names_itself(name: str) -> None:
    at = open_page(name)
    assert len(at.title) == 1
    assert at.main.children[0].type == "title"  # nothing is written above it
    assert not at.error


@pytest.mark.parametrize("name", PAGES)
def test_every_chart_and_table_has_a_text_alternative(name: str) -> None:
    at = open_page(name)
    for kind in ("vega_lite_chart", "dataframe", "table"):
        assert all(element.proto.alt for element in at.get(kind))


def test_every_chart_has_its_figures_as_a_table() -> None:
    with_a_table_below = {"heat", "gpu_heat"}
    bare = set()
    for path in [*APP.glob("*.py"), *(APP / "app_pages").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "draw":
                said = {keyword.arg: keyword.value for keyword in node.keywords}
                if "figures" not in said:
                    bare.add(ast.literal_eval(said["key"]))
    assert bare == with_a_table_below


def test_the_figures_of_a_chart_are_the_planners() -> None:
    at = open_page("compare", model="llama-3.2-1b")
    opener = next(item for item in at.expander if item.label == "The figures of this chart")
    assert not opener.dataframe
    at.session_state["compare_chart_figures"] = True
    at.run()
    frame = at.dataframe[0].value
    run = app.runs.run_of({**app.runs.DEFAULTS, "model": "llama-3.2-1b"})
    result = plan(run.model, run.recipe, run.machine)
    terms = result.phase(result.peak_phase).terms
    own = frame[frame["run"] == "vramwise"]
    assert dict(zip(own["term"], own["size"], strict=True)) == {
        term_words(term.name): format_bytes(term.bytes) for term in terms
    }


def test_the_app_needs_no_torch() -> None:
    code = (
        "import sys, pathlib, importlib\n"
        f"folder = pathlib.Path({str(APP)!r})\n"
        "names = [p.stem for p in folder.glob('*.py') if p.stem not in ('main', '__main__', 'cli')]\n"
        "[importlib.import_module('app.' + name) for name in names if name != '__init__']\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=APP.parent, check=False).returncode == 0


def test_no_page_unpickles_or_opens_a_socket() -> None:
    for path in [*APP.glob("*.py"), *(APP / "app_pages").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.name == "workers.py":  # reads what its own process wrote to a pipe
            text = text.replace("pickle.load(process.stdout)", "").replace("pickle.load(asked)", "")
        for word in ("pickle.load", "eval(", "exec(", "import requests", "urlopen", "socket"):
            assert word not in text, f"{path.name}: {word}"


# Recommend


def test_recommend_lists_what_the_planner_recommends() -> None:
    at = open_page("recommend", gpu="rtx-4090-laptop", search="qwen3", least="4096")
    rows = recommend(
        make_machine("rtx-4090-laptop"),
        task="grpo",
        least_context=4096,
        limit=finding.FEW,
        wanted=lambda name, model: "qwen3" in name,
    )
    expected = [(r.model, r.method, r.context) for r in rows]
    frame = at.dataframe[0].value
    assert (
        list(frame[["model", "method", "context"]].itertuples(index=False, name=None))
        == (expected[: len(frame)])
    )
    assert expected


def test_recommend_filters() -> None:
    at = open_page("recommend", gpu="rtx-4090")
    assert at.toggle(key="show_all")
    few = len(set(at.dataframe[0].value["model"]))
    at.toggle(key="show_all").set_value(True).run()
    assert len(set(at.dataframe[0].value["model"])) > few
    at.get_by_key("sizes").set_value((1.0, 4.0)).run()
    assert at.dataframe[0].value["billions"].between(1, 4).all()
    at.text_input(key="search").set_value("no such model").run()
    assert at.info
    assert not at.exception


def test_recommend_says_which_methods_a_framework_does_not_plan() -> None:
    at = open_page("recommend", gpu="h100", framework="megatron", task="sft", search="llama-3.2-1b")
    assert set(at.dataframe[0].value["method"]) == {"full"}
    said = "\n".join(caption.value for caption in at.caption)
    for method in ("qlora", "lora"):
        assert f"method\\: {method} cannot be planned under Megatron-LM yet" in said
    own = open_page("recommend", gpu="h100", task="sft", search="llama-3.2-1b")
    assert not any("cannot be planned" in caption.value for caption in own.caption)


def test_one_click_opens_page_one_filled_in() -> None:
    at = open_page("recommend", gpu="rtx-4090-laptop", rank="64", framework="unsloth")

    def click() -> None:
        from app import finding
        from planner.run.runfile import make_recipe

        waves = {"max_num_seqs": 2}
        recipe = make_recipe(
            task="grpo", method="lora", framework="unsloth", context=4096, engine=waves
        )
        finding.open_run(recipe, model="qwen2.5-3b")

    app_script = AppTest.from_function(click)
    for key in ("gpu", "framework"):
        app_script.session_state[key] = at.session_state[key]
    app_script.run()
    state = app_script.session_state
    assert (state["model"], state["method"], state["context"]) == ("qwen2.5-3b", "lora", 4096)
    assert state["seqs"] == 2  # the settings that make it fit come along
    assert (state["gpu"], state["framework"], state["rank"]) == ("rtx-4090-laptop", "unsloth", None)
    at.session_state["go"] = {}
    at.run()
    assert at.title[0].value == "Will it fit?"


def test_a_task_that_our_trainer_lacks_is_recommended_under_one_that_has_it() -> None:
    at = open_page("recommend", task="dpo", search="qwen3-0.6b")
    assert len(at.dataframe[0].value)
    said = at.caption[0].value.replace("\\", "")
    assert "no dpo of its own: planned under TRL" in said
    chosen = open_page("recommend", task="dpo", search="qwen3-0.6b", framework="hf-trainer")
    assert "hf-trainer has no dpo" in chosen.error[0].value.replace("\\", "")


def test_a_row_is_opened_by_the_keyboard_alone() -> None:
    at = open_page("recommend", task="sft", search="qwen3-0.6b")
    first = at.dataframe[0].value.iloc[0]
    at.selectbox(key="named_row").set_value(0).run()
    at.button(key="open_named").click().run()
    assert at.title[0].value == "Will it fit?"
    assert (at.session_state["model"], at.session_state["method"]) == (
        first["model"],
        first["method"],
    )


def test_sizes_are_a_slider_of_doublings() -> None:
    stops = finder.SIZES[1:-1]
    assert all(after == 2 * before for before, after in pairwise(stops))
    assert not finder.SIZES[0]
    assert finder.SIZES[-1] >= 2800


def test_the_reverse_lists_the_planners_cards_and_opens_one_with_its_settings() -> None:
    at = open_page(
        "recommend", look_for="GPUs for my model", model="llama-3.1-8b", context="4096", task="sft"
    )
    at.multiselect(key="kinds").set_value(["workstation"]).run()
    expected = cards_for_model(
        find_model("llama-3.1-8b"),
        context=4096,
        kinds=("workstation",),
        limit=finding.FEW_CARDS,
    )
    frame = at.dataframe[0].value
    shown = list(frame[["gpu", "method", "settings"]].itertuples(index=False, name=None))
    assert shown == [(c.gpu, c.method, c.setting.settings) for c in expected if c.setting]
    at.selectbox(key="named_row").set_value(0).run()
    at.button(key="open_named").click().run()
    assert at.title[0].value == "Will it fit?"
    assert next(m.value for m in at.metric if m.label == "Peak") == format_bytes(
        expected[0].peak_bytes
    )
    assert at.session_state["gpu"] == expected[0].gpu


def test_kinds_of_gpu_that_hold_nothing_are_said() -> None:
    at = open_page("recommend", look_for="GPUs for my model", model="llama-3.1-405b")
    at.multiselect(key="kinds").set_value(["embedded"]).run()
    assert "no card of these kinds" in at.info[0].value


def test_serving_has_its_own_recommendations() -> None:
    at = open_page("recommend", task="serve", gpu="h100-sxm")
    assert len(at.dataframe[0].value)
    assert not set(at.dataframe[0].value["method"]) & set(finder.METHODS)


# Compare


@pytest.mark.parametrize("task", BY_KEY["task"].options)
def test_only_frameworks_that_do_the_task_are_compared_unasked(task: str) -> None:
    shown = jobs.side_by_side(task)
    assert shown
    assert all(pick(name).has(Task(task)) for name in shown)


def test_compare_opens_with_frameworks_of_the_runs_task() -> None:
    at = open_page("compare", task="dpo", framework="trl", model="llama-3.2-1b")
    assert list(at.dataframe[0].value["run"]) == list(jobs.side_by_side("dpo"))
    assert not at.warning


def test_compare_puts_the_planners_peaks_side_by_side() -> None:
    at = open_page("compare", model="llama-3.2-1b")
    frame = at.dataframe[0].value.set_index("run")
    for framework in jobs.side_by_side("grpo"):
        values = {**app.runs.DEFAULTS, "model": "llama-3.2-1b", "framework": framework}
        run = app.runs.run_of(values)
        peak = plan(run.model, run.recipe, run.machine).peak_bytes
        assert frame.loc[framework, "peak"] == format_bytes(peak, digits=1)
    assert "framework" in set(at.dataframe[1].value["setting"])
    at.multiselect(key="frameworks").set_value(["vramwise"]).run()
    assert len(at.dataframe) == 1


def test_runs_are_added_removed_and_kept_in_the_link() -> None:
    at = open_page("compare", compare="my runs", model="llama-3.2-1b")
    assert at.info
    at.button(key="pin_here").click().run()
    at.get_by_key("batch").set_value(4).run()
    at.button(key="pin_here").click().run()
    assert len(at.dataframe[0].value) == 2
    assert set(at.dataframe[1].value["setting"]) == {"sequences"}
    kept = at.query_params["pin"]
    assert len(kept) == 2
    again = AppTest.from_file(str(APP / "main.py"), default_timeout=60)
    again.query_params["pin"] = kept
    again.query_params["compare"] = "my runs"
    again.run()
    again.switch_page("app_pages/compare.py").run()
    assert len(again.dataframe[0].value) == 2
    again.button(key="unpin_0").click().run()
    assert len(again.dataframe[0].value) == 1


def test_a_hostile_pin_is_a_notice() -> None:
    run, notices = pins.run_of("batch=-1&model=llama-3.2-1b&x=__import__('os')")
    assert run.model.name == "llama-3.2-1b"
    assert len(notices) == 2


def test_the_waterfall_goes_from_510_to_54_as_published() -> None:
    at = open_page("compare", compare="510.8 GB to 54.3 GB")
    assert len(at.get("vega_lite_chart")) == 2
    frame = at.dataframe[0].value
    rows = published("unsloth-grpo")["rows"]
    assert list(frame["published"]) == [row["published"] for row in rows]
    assert list(frame["op level"]) == [format_bytes(row["op_level_bytes"]) for row in rows]


# Explain an error


def test_explain_works_its_example_out() -> None:
    at = open_page("explain")
    at.button(key="example").click().run()
    assert not at.exception
    assert "A tensor of tokens x vocabulary does not fit" in [item.value for item in at.header]
    assert any("15.66 GiB" in str(frame.value.to_dict()) for frame in at.dataframe)


def test_explain_takes_a_log_a_config_a_model_and_a_gpu() -> None:
    at = open_page("explain")
    log = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    at.file_uploader(key="explain_log").upload("run.log", log)
    at.file_uploader(key="explain_config").upload(
        "config.yml",
        b"base_model: Qwen/Qwen2.5-7B\nadapter: lora\nsequence_len: 4096\nmicro_batch_size: 2\n",
    )
    at.text_input(key="explain_model").set_value("qwen2.5-7b")
    at.selectbox(key="explain_gpu").set_value("rtx-4090").run()
    assert not at.exception
    assert not at.error
    assert any("axolotl" in item.label for item in at.expander)


@pytest.mark.parametrize("text", ["", "   \n", "hello", "<script>alert(1)</script>", "a" * 399_999])
def test_explain_survives_any_text(text: str) -> None:
    at = open_page("explain")
    at.text_area(key="pasted").set_value(text).run()
    assert not at.exception
    said = " ".join(item.value for item in (*at.markdown, *at.caption))
    assert "--config" not in said  # which are boxes here
    assert "--model " not in said


def test_explain_refuses_a_bad_config_and_an_unknown_model() -> None:
    at = open_page("explain")
    at.file_uploader(key="explain_config").upload("config.yml", b"\x00\x01\x02")
    at.text_area(key="pasted").set_value("CUDA out of memory").run()
    assert at.error
    other = open_page("explain")
    other.text_input(key="explain_model").set_value("/etc/passwd").run()
    assert "not in the catalogue" in other.error[0].value


def test_every_cause_has_a_sentence_for_a_title() -> None:
    assert set(TITLES) >= set(MAKERS)
    assert all(len(title.split()) > 3 for title in TITLES.values())


def test_a_cause_that_nothing_is_known_of_is_not_called_possible() -> None:
    at = open_page(
        "explain", state={"pasted": "CUDA error: out of memory\nKilled\nRuntimeError: x"}
    )
    assert not at.exception
    possible = [said.value for said in at.caption if said.value.startswith("Also possible")]
    assert not [said for said in possible if "unknown" in said.lower()]


# Accuracy


def test_accuracy_shows_the_worst_ten_first_and_honest_statistics(live_accuracy: Accuracy) -> None:
    at = open_page("accuracy")
    scored = live_accuracy.scored
    worst = sorted(scored, key=lambda item: -abs(item.error))[:10]
    assert list(at.dataframe[0].value["id"]) == [item.row.id for item in worst]
    figures = next(item.value for item in at.metric if item.label == "Figures")
    assert figures == f"{len(scored):,}"


def test_accuracy_filters_by_source_and_quantity() -> None:
    at = open_page("accuracy", quantity="peak_allocated")  # as links of older versions say it
    result = scoring.accuracy()
    assert list(at.dataframe[-2].value["quantity"]) == ["peak allocated"]
    source = next(i.row.source for i in result.scored if i.prediction.quantity == "peak_allocated")
    at.selectbox(key="source").set_value(source).run()
    assert set(at.dataframe[0].value["source"]) == {source}
    at.selectbox(key="quantity").set_value("num cpu blocks").run()
    assert at.info or len(at.dataframe)
    assert not at.exception


def test_facts_of_a_row_name_its_source() -> None:
    item = scoring.accuracy().scored[0]
    assert scoring.facts(item)["id"] == item.row.id
