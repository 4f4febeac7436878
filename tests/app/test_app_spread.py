"""Several GPUs in the app: no layout is said and mended by one click; bars by rank; layouts on Recommend."""

from pathlib import Path

from streamlit.testing.v1 import AppTest

from app import charts
from app.links import link_parameters
from app.runs import DEFAULTS, RUN_DEFAULTS, machine_section
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.runfile import make_recipe

MAIN = Path(__file__).parents[2] / "app" / "main.py"
STATE = {"model": "llama-3.2-1b", "gpu": "h100-sxm", "gpus": 8, "task": "sft", "method": "full"}


def start(**more: object) -> AppTest:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    for key, value in {**STATE, **more}.items():
        at.session_state[key] = value
    return at.run()


def test_eight_gpus_without_a_layout_are_said_and_mended_by_one_click() -> None:
    at = start()
    assert not at.exception
    assert "a whole copy on each" in at.info[0].value
    assert at.button(key="best_layout").label.startswith("Share the work: ")  # nothing is divided
    at.get_by_key("best_layout").click().run()
    assert not at.exception
    assert at.session_state["sharding"] == "ddp"
    assert not at.info
    assert any("all hold the same" in caption.value for caption in at.caption)


def test_the_hosts_of_the_gpus_are_a_setting_of_the_run() -> None:
    at = start(gpus=16, nodes=4)
    assert not at.exception
    assert at.number_input(key="nodes").value == 4
    values = {**RUN_DEFAULTS, "gpus": 16, "nodes": 4}
    assert machine_section(values).nodes == 4
    assert link_parameters({**DEFAULTS, **values})["nodes"] == "4"
    assert machine_section({**values, "gpus": 1}).nodes is None


def test_recommend_shows_the_layouts_of_a_model() -> None:
    at = start(look_for="GPUs for my model")
    at.switch_page("app_pages/recommend.py").run()
    assert not at.exception
    table = at.dataframe[-1].value
    assert table["why not"][0] == "the first choice"
    assert table["verdict"][0] == "fits"


def test_a_bar_for_every_stage_of_a_pipeline() -> None:
    recipe = make_recipe(
        task="sft", method="full", framework="megatron", context=512,
        gradient_accumulation=4, parallel={"pipeline": 4},
    )  # fmt: skip
    result = plan(catalogue_model("llama-3.2-1b"), recipe, make_machine("h100", gpus=4))
    bars = charts.rank_bars(result)["layer"][0]["data"]["values"]
    assert list(dict.fromkeys(bar["rank"] for bar in bars)) == [kind.role for kind in result.ranks]
    assert len(result.ranks) == 4
    most = max(result.ranks, key=lambda kind: kind.peak_bytes)
    total = sum(bar["gib"] for bar in bars if bar["rank"] == most.role)
    assert abs(total - result.peak_bytes / 2**30) < 0.01
