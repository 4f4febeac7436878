"""The page "Budget": what it shows is the library's frontier, and sliders leave what meets them."""

import pytest
from streamlit.testing.v1 import AppTest

from app import budgets, links, runs
from planner.answers.amount import spending_for
from planner.answers.frontier import Point, frontier, listed_cards
from tests.app.test_app_pages import open_page

LINK = {"model": "qwen3-0.6b", "task": "sft", "context": "1024"}


@pytest.fixture(scope="module")
def points() -> tuple[Point, ...]:
    run = runs.run_of(links.read_link(LINK))
    return frontier(
        run.model,
        run.recipe,
        cards=listed_cards(),
        spending=spending_for(10_000, 1.0, None),
    ).points


def opened() -> AppTest:
    return open_page("budget", **LINK)


def test_the_page_shows_the_librarys_frontier_and_drags_the_budget(
    points: tuple[Point, ...],
) -> None:
    at = opened()
    table = at.dataframe[0].value
    assert list(table["gpus"]) == [f"{p.gpus} x {p.gpu}" for p in points]
    hours = sorted(p.spent.hours for p in points)
    slider = at.select_slider(key="budget_hours")
    limit = next(each for each in budgets.stops(hours) if each >= hours[len(hours) // 2])
    slider.set_value(limit).run()
    assert not at.exception
    within = [f"{p.gpus} x {p.gpu}" for p in points if p.spent.hours <= limit]
    assert list(at.dataframe[0].value["gpus"]) == within
    at.select_slider(key="budget_usd").set_value(
        budgets.stops([p.spent.usd_middle or 0 for p in points])[0]
    )
    at.select_slider(key="budget_hours").set_value(budgets.stops(hours)[0]).run()
    assert len(at.warning) == 1
    assert "Nothing meets" in at.warning[0].value
    assert len(at.dataframe[0].value) == 1  # the nearest


def test_a_way_opens_as_a_plan(points: tuple[Point, ...]) -> None:
    at = opened()
    at.selectbox(key="budget_row").set_value(0).run()
    at.button(key="budget_open").click().run()
    assert not at.exception
    assert at.title[0].value == "Will it fit?"
    assert at.session_state["gpu"] == points[0].gpu
    assert at.session_state["context"] == 1024
    kept = points[0].recipe["checkpointing"]
    assert at.session_state["checkpointing"] == kept


def test_round_stops_span_every_way() -> None:
    stops = budgets.stops([0.4, 33.0])
    assert stops[0] <= 0.4
    assert stops[-1] >= 33
    assert stops == sorted(set(stops))
    assert budgets.stops([5.0])[-1] >= 5
