"""What visitors share: answers of workers and of the shared caches, and nothing that is one person's."""

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import app.runs
from app import cached, jobs, palette, warm, workers
from app.runs import DEFAULTS, received, run_of
from planner import reserved
from planner.errors import UsageError
from planner.models.catalogue import load_catalogue
from planner.models.hub import find_model
from planner.plan import plan
from planner.units import parse_bytes
from tests.app.test_app_pages import PAGES, open_page

MAIN = Path(app.runs.__file__).with_name("main.py")


def test_a_worker_answers_refuses_and_is_replaced_when_it_dies() -> None:
    pool = workers.Pool(1)
    try:
        assert pool.run(parse_bytes, ("3GiB",)) == 3 << 30
        with pytest.raises(UsageError, match="banana"):
            pool.run(parse_bytes, ("banana",))
        process = pool.workers[0].process
        assert process
        process.kill()
        process.wait()
        assert pool.run(parse_bytes, ("4GiB",)) == 4 << 30
    finally:
        pool.stop()
    assert all(worker.process is None for worker in pool.workers)


def test_a_run_is_the_same_after_it_was_sent_and_its_plan_brings_its_replay() -> None:
    run = run_of({**DEFAULTS, "model": "qwen2.5-0.5b", "context": 1024})
    again = received(run.sent())
    assert (again.key, again.recipe, again.machine) == (run.key, run.recipe, run.machine)
    result = jobs.plan_of(run.sent())
    assert "reserved" in vars(result)
    assert result.peak_bytes == plan(run.model, run.recipe, run.machine).peak_bytes


def test_what_differs_has_another_key() -> None:
    runs = [
        run_of({**DEFAULTS, **values})
        for values in ({}, {"context": 1000}, {"gpu": "rtx-3090"}, {"model": "qwen2.5-3b"})
    ]
    own = [run_of(DEFAULTS, model=find_model(name)) for name in ("qwen2.5-3b", "qwen2.5-7b")]
    assert len({run.key for run in (*runs, *own)}) == 6


def test_an_upload_is_in_no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an upload went into the shared cache")

    at = AppTest.from_file(str(MAIN), default_timeout=60).run()
    monkeypatch.setattr(cached, "_shared", refuse)
    config = load_catalogue()["qwen2.5-0.5b"]["config"] | {"_name_or_path": "my-secret-model"}
    at.file_uploader(key="config_file").upload("config.json", json.dumps(config).encode())
    at.run()
    assert not at.exception
    assert at.metric[0].label == "Peak"
    assert all(model.name != "my-secret-model" for model, _ in reserved._PLAYED.values())


def test_a_framework_keeps_its_line_whatever_stands_beside_it() -> None:
    styles = [palette.framework_style(name) for name in palette.FRAMEWORKS]
    assert len(set(styles)) == len(styles)
    assert palette.framework_style("trl") == palette.framework_style("trl")


@pytest.mark.slow
def test_what_pages_open_with_is_made_before_anybody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(warm.WANTED, raising=False)
    warm.first()
    warm.others()
    asked: list[str] = []
    monkeypatch.setattr(workers, "run", lambda job, *_, **__: asked.append(job.__qualname__))
    for name in PAGES:
        open_page(name)
    assert asked == []


def test_a_session_that_lasts_a_day_keeps_no_more_than_a_new_one() -> None:
    at = AppTest.from_file(str(MAIN), default_timeout=60)
    at.query_params["model"] = "qwen2.5-0.5b"
    kept = []
    for context in (1024, 1100, 1200, 1300):
        at.session_state["context"] = context
        at.run()
        assert not at.exception
        kept.append(set(at.session_state.to_dict()))
    assert kept[1] == kept[-1]
