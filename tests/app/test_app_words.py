"""Plain words: what people read on a page names no flag and no id of a program, whatever they have set."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import comparing, explaining, jobs, runs, scoring, serving, words
from app.finding import GPUS
from app.knobs import KNOBS, Kind
from app.runs import DEFAULTS, run_of
from planner.answers.published import published
from planner.doctor.fix_table import MAKERS
from planner.errors import UsageError, VramwiseError
from planner.machines.machine import find_gpu, make_machine
from planner.plan import plan
from tests.app.test_app_pages import open_page

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
WORD = re.compile(r"(?<![\w./'])[a-z]+(?:_[a-z0-9]+)+(?![\w/(']|\.\w)")
TOLD = ("label", "help", "body", "placeholder", "alt")
"""Where an element keeps what it says."""
CODE = {"source", "module"}
"""Columns that quote code."""


def ids() -> set[str]:
    """Return the names that run files, causes, terms, quantities and published lines go by."""
    lines = {row["line"] for row in published(comparing.TABLE)["rows"]}
    return {*words.field_words(), *MAKERS, *scoring.accuracy().by_quantity(), *lines}


def said(node: Any) -> Iterator[str]:
    """Yield what is written under a node; commands and files to copy are code, and left out."""
    for element in getattr(node, "children", {}).values():
        if element.type in ("code", "text"):
            continue
        texts = [getattr(element.proto, name, None) for name in TOLD]
        if element.type in ("dataframe", "table"):
            frame = element.value
            shown = [name for name in frame.columns if name not in CODE]
            texts += [*map(str, shown), *(cell for name in shown for cell in frame[name])]
        if element.type == "vega_lite_chart":
            texts += strings(json.loads(element.proto.spec))
        for text in texts:
            if isinstance(text, str):
                plain = text.replace("\\", "")
                yield re.sub(r"`[^`]*`|:material/\w+:", "", plain)
        yield from said(element)


def strings(part: Any) -> Iterator[str]:
    """Yield the data and the titles of a chart: not its formulas or the fields it reads."""
    if isinstance(part, dict):
        for key, inner in part.items():
            if key not in (*CODE, "field", "fields", "tooltip", "test", "labelExpr", "params"):
                yield from strings(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from strings(inner)
    elif isinstance(part, str):
        yield part


def jargon(at: AppTest) -> list[tuple[str, str]]:
    """Return every flag and id on a page with the sentence that it stands in."""
    known = ids()
    return [
        (word, text[:200])
        for root in (at.main, at.sidebar)
        for text in said(root)
        for word in (*FLAG.findall(text), *(w for w in WORD.findall(text) if w in known))
    ]


def some_run(draw: random.Random) -> dict[str, str]:
    """Return the link of a run that can be planned, with a few settings of its own."""
    frameworks, gpus = runs.framework_options(), runs.gpu_options()[:-1]
    while True:
        chosen: dict[str, Any] = {
            "model": draw.choice(runs.model_options()),
            "gpu": draw.choice(gpus),
            "gpus": draw.choice((1, 1, 8)),
            "framework": draw.choice(frameworks),
        }
        for knob in KNOBS:
            if knob.options and draw.random() < (0.9 if knob.key in ("task", "method") else 0.05):
                chosen[knob.key] = draw.choice(knob.options)
            elif knob.kind is Kind.COUNT and draw.random() < 0.05:
                chosen[knob.key] = draw.choice((1, 2, 8, 512))
        try:
            run = run_of(DEFAULTS | chosen)
            plan(run.model, run.recipe, run.machine)
        except VramwiseError:
            continue
        return {key: str(value) for key, value in chosen.items()}


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("will_it_fit", {"part": "At the peak"}),
        ("will_it_fit", {"gpus": "8", "gpu": "h100-sxm", "task": "sft", "method": "full"}),
        ("will_it_fit", {"part": "Take it away", "export": "Other tools"}),
        ("will_it_fit", {"part": "Take it away", "export": "Command line", "master_weights": "yes"}),
        ("will_it_fit", {"gpu": "t4"}),
        ("serve", {}),
        ("serve", {"model": "llama-3.1-70b", "gpu": "rtx-4090"}),
        ("compare", {"compare_chart_figures": True}),
        ("compare", {"compare": comparing.PUBLISHED}),
        ("recommend", {"search": "qwen3-0.6b"}),
        ("recommend", {"look_for": GPUS, "model": "qwen3-0.6b", "task": "sft", "gpus": "8"}),
        ("budget", {"model": "qwen3-0.6b"}),
        ("budget", {"model": "qwen3-0.6b", "gpus": "2"}),
        ("recording", {}),
        ("explain", {"pasted": explaining.EXAMPLE}),
        ("accuracy", {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_page_speaks_in_plain_words(page: str, link: dict[str, str]) -> None:
    assert jargon(opened(page, link)) == []


def opened(page: str, link: dict[str, Any]) -> AppTest:
    """Return a page with a link's settings; what no link can say is set in the session."""
    own = {"part", "export", "pasted", "compare_chart_figures"}
    return open_page(
        page,
        state={key: value for key, value in link.items() if key in own} | {"more": True},
        **{key: value for key, value in link.items() if key not in own},
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", ["will_it_fit", "serve", "compare", "budget"])
@pytest.mark.parametrize("seed", range(6))
def test_any_run_is_told_in_plain_words(page: str, seed: int) -> None:
    draw = random.Random(seed)
    link = some_run(draw)
    link["part"] = draw.choice(("At the peak", "Largest that fit", "Against context"))
    assert jargon(opened(page, link)) == [], link


def test_a_reader_of_the_words_would_find_jargon() -> None:
    def page() -> None:
        import pandas as pd
        import streamlit as st

        st.caption("give --gpu rtx-4090; num_generations is 8")
        st.dataframe(pd.DataFrame({"term": ["kv_cache"]}))
        st.code("vramwise plan --gpu rtx-4090")

    found = [word for word, _ in jargon(AppTest.from_function(page).run())]
    assert found == ["--gpu", "num_generations", "kv_cache"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("give --micro-batch-size 1, --vram 24GiB; x--y stays",
         'give "Batch" 1, "Memory torch sees" 24GiB; x--y stays'),
        ("as long as it may: --mean-completion says how long", "as long as it may"),
        ("one of 768 x 768 a sample (--images, --image-size).", "one of 768 x 768 a sample."),
        ("micro-batches a step (--grad-accum); more", 'micro-batches a step ("Accumulation"); more'),
        ("not read: parallel.context_kind.", 'not read: "How they share it".'),
        ("kv_cache 2 GiB; 'kv_cache' stays", "KV cache 2 GiB; 'kv_cache' stays"),
        ("then pass --token or set HF_TOKEN", "then pass HF_TOKEN"),
        ("`vramwise recommend --task serve` lists cards", 'the page "Recommend" lists cards'),
    ],
)  # fmt: skip
def test_a_sentence_of_the_planner_in_the_words_of_the_app(text: str, expected: str) -> None:
    assert words.in_app(text) == expected


def test_what_is_wrong_with_counted_cards_names_no_flag() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("8 x h100")
    assert "--gpu" in caught.value.hint
    assert "--" not in words.in_app(caught.value.hint)


def test_settings_that_differ_are_said_and_not_printed() -> None:
    fields = {
        "model": "qwen2.5-0.5b",
        "gpu": "h100-sxm",
        "gpus": 8,
        "task": "sft",
        "method": "full",
    }
    plans = {}
    for sharding in ("zero2", "fsdp2"):
        run = run_of(DEFAULTS | fields | {"framework": "trl", "sharding": sharding})
        plans[sharding] = plan(run.model, run.recipe, run.machine)
    rows = {row["setting"]: row for row in comparing.differences(plans)}
    assert rows["zero"]["fsdp2"] == "none"
    assert "partitions gradients yes" in rows["zero"]["zero2"]
    assert not re.search(
        r"[A-Z]\w+\(|True|False", str([list(row.values()) for row in rows.values()])
    )


def test_the_relation_of_cache_and_longest_request_is_said() -> None:
    seen = {}
    for model, gpu, context in (
        ("qwen2.5-7b", "rtx-4090", 2048),
        ("llama-3.1-8b", "h100-sxm", 8192),
        ("gemma-3-12b", "rtx-5090", 8192),
        ("llama-3.1-70b", "rtx-4090", 2048),
    ):
        values = DEFAULTS | serving.FIXED | {"model": model, "gpu": gpu, "context": context}
        view = jobs.served(run_of(values).sent(), 0)
        assert view is not None
        seen[serving.relation(view)] = (view.longest, view.figures.kv_tokens, view.made_for)
    (usual, less), (whole, all_), (windows, more), (none, no) = seen.items()
    assert "95% of starts" in usual
    assert 0 < less[0] < less[1]
    assert "made for" in whole
    assert all_[0] == all_[2]
    assert "last tokens" in windows
    assert more[0] > more[1]
    assert "No request" in none
    assert no[0] == 0
    at = open_page("serve")
    assert usual in [caption.value for caption in at.caption]
    assert make_machine("rtx-4090").label in at.caption[1].value.replace("\\", "")
