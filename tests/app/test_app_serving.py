"""The page "Serve": what is refused, one click that starts it, and figures that are the library's."""

from pathlib import Path

from streamlit.testing.v1 import AppTest

import app.runs
from app import serving
from planner.answers.serving import serving_view
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.runfile import make_recipe

APP = Path(app.runs.__file__).parent


def open_serve(**parameters: str) -> AppTest:
    at = AppTest.from_file(str(APP / "main.py"), default_timeout=120)
    for key, value in parameters.items():
        at.query_params[key] = value
    at.switch_page("app_pages/serve.py").run()  # without planning another page first
    assert not at.exception, at.exception[0].stack_trace
    return at


def metric(at: AppTest, label: str) -> str:
    return next(item.value for item in at.metric if item.label == label)


def test_a_server_that_refuses_starts_after_one_click() -> None:
    at = open_serve(model="qwen3-8b", gpu="l4", context="40960")
    assert "Does not start" in at.header[0].value
    assert any("does not hold one sequence" in item.value.replace("\\", "") for item in at.markdown)
    first = next(button for button in at.button if button.key == "serve_0")
    (said,) = [item.value for item in at.markdown if "requests of 40,960" in item.value][:1]
    promised = said.partition(" tokens")[0]
    first.click().run()
    assert not at.exception
    assert "Starts" in at.header[0].value
    assert metric(at, "Tokens of KV cache") == promised


def test_more_cards_are_set_with_the_change_that_needs_them() -> None:
    at = open_serve(model="llama-3.1-70b", gpu="h100-sxm", context="8192")
    wider = next(button for button in at.button if "GPUs" in button.label)
    wider.click().run()
    assert at.session_state["gpus"] == at.session_state["tensor_parallel"] == 2
    assert "Starts" in at.header[0].value


def test_figures_are_the_librarys_and_a_prefix_counts() -> None:
    at = open_serve(model="llama-3.1-8b", gpu="rtx-4090", context="8192", prompt="3000", completion="1000")  # fmt: skip
    recipe = make_recipe(
        task="serve", framework="vllm", context=8192, prompt_length=3000, completion_length=1000
    )
    model, machine = catalogue_model("llama-3.1-8b"), make_machine("rtx-4090")
    for shared in (1024, 2000):
        at.number_input(key="shared_prefix").set_value(shared).run()
        view = serving_view(
            model, recipe, machine, plan(model, recipe, machine), shared_prefix=shared
        )
        assert view is not None
        assert view.prefix is not None
        assert metric(at, "Tokens of KV cache") == f"{view.figures.kv_tokens:,}"
        assert metric(at, "Longest request") == f"{view.longest:,}"
        assert metric(at, "Requests at once, shared") == f"{view.prefix.at_once:,}"
    assert "vllm serve" in at.code[0].value


def test_labels_are_plain_words() -> None:
    model, machine = catalogue_model("llama-3.1-8b"), make_machine("rtx-4090")
    recipe = make_recipe(task="serve", framework="vllm", context=131_072)
    for context in (131_072, 4096):
        asked = recipe.model_copy(update={"context": context})
        view = serving_view(model, asked, machine, plan(model, asked, machine))
        assert view is not None
        labels = [serving.label(change) for change in view.changes]
        assert labels
        assert not any("--" in text or "engine." in text or "_" in text for text in labels)
