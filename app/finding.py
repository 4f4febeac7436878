"""The two halves of "Recommend": filters in the sidebar, a heat map and a table that open page 1."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from app import cached, finder, inputs, maps, runs, sidebar, spread
from app.draw import draw
from app.inputs import state
from app.knobs import BY_KEY
from app.words import escape, in_app
from planner.answers.cards import Card
from planner.answers.ranking import RULE
from planner.answers.recommend import Recommendation
from planner.answers.spent import RULE as RULE_OF_CARDS
from planner.run.framework import pick
from planner.run.recipe import Recipe
from planner.run.runfile import make_recipe
from planner.units import format_bytes

MODELS, GPUS = "models for my GPU", "GPUs for my model"
FEW, MANY = 16, 80
"""Rows shown first, and at most."""
FEW_CARDS = 48
"""Pairs of a GPU and a method shown first, the smallest GPUs."""
SETTINGS_OF = "Settings are the least slow that fit, and leave the result as it is."
LEAST = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def direction() -> str:
    """Show which way to look, and return it."""
    chosen = st.segmented_control(
        "Look for",
        [MODELS, GPUS],
        default=MODELS,
        key="look_for",
        bind="query-params",
        required=True,
        label_visibility="collapsed",
    )
    return str(chosen)


def filters(wanted: str) -> None:
    """Show what is there and what to look for."""
    if wanted == GPUS:
        _model_filters()
    else:
        _gpu_filters()


def _gpu_filters() -> None:
    sidebar.machine_widgets()
    sidebar.knob("task", {})
    sidebar.framework_widget()
    st.selectbox(
        "At least this context", LEAST, index=LEAST.index(2048), key="least", bind="query-params"
    )
    st.select_slider(
        "Billions of parameters", finder.SIZES, (finder.SIZES[0], finder.SIZES[-1]), key="sizes",
        format_func=lambda size: f"{size:g}",
    )  # fmt: skip
    st.text_input(
        "Name contains", "", key="search", max_chars=60, bind="query-params", placeholder="qwen"
    )


def models() -> None:
    """Show the heat map model x method, and the same as a table."""
    section, machine = inputs.machine_from_state()
    most = MANY if st.session_state.get("show_all") else FEW
    with st.spinner("Planning what could fit best ..."):
        shown = cached.recommended(
            section.model_dump_json(),
            state("task"),
            int(st.session_state["least"]),
            state("framework"),
            (st.session_state["search"] or "").lower().strip(),
            tuple(st.session_state["sizes"]),
            most,
        )
    for reason in finder.refusals_for(section, state("task"), state("framework")):
        st.caption(escape(in_app(reason)))
    if not shown:
        st.info("Nothing fits. Try a shorter context, another size or more GPUs.")
        return
    names = list(dict.fromkeys(row.model for row in shown))
    _said_instead(shown[0].recipe)
    st.markdown(
        f"The best **{len(names)} models** that fit {escape(machine.label)} for **{state('task')}**, "
        "the best first. Colour and number: the longest context. "
        f"Click a cell, or a row of the table, to open it in *{_opens()}*."
    )
    _ranked(RULE)
    if len(shown) == most or most == MANY:
        st.toggle(f"Show up to {MANY} rows", key="show_all")
    _heat_map(shown, names)
    _table(shown)


def _ranked(rule: str) -> None:
    """Keep the rule of the order at hand, for who asks."""
    with st.expander("How they are ranked"):
        st.write(escape(rule[0].upper() + rule[1:]))


def _said_instead(recipe: Mapping[str, Any]) -> None:
    """Say whose settings are shown where the framework that nobody chose has no such task."""
    task, framework = state("task"), state("framework")
    if task != "serve" and finder.without(task, framework):
        ours, shown = pick(framework).title, pick(recipe.get("framework")).title
        st.caption(escape(f"{ours} has no {task} of its own: planned under {shown}."))


def _heat_map(shown: list[Recommendation], names: list[str]) -> None:
    methods = list(dict.fromkeys(row.method for row in shown))
    columns = list(finder.METHODS) if set(methods) <= set(finder.METHODS) else methods
    draw(
        maps.heat_map(finder.heat_rows(shown), columns=columns, models=names),
        key="heat",
        on_select=_open_cell,
        alt=f"Longest context for {len(names)} models and {', '.join(columns)}; the table below has the same.",
    )


def _table(shown: list[Recommendation]) -> None:
    frame = pd.DataFrame(
        [
            (r.model, r.parameters / 1e9, r.method, r.context, r.batch, r.settings, format_bytes(r.peak_bytes),
             *finder.spent_said(r.spent).values())
            for r in shown
        ],
        columns=["model", "billions", "method", "context", "batch", "settings", "peak", finder.TIME, finder.DOLLARS],
    )  # fmt: skip
    st.session_state["table_rows"] = [(r.model, r.method, r.recipe) for r in shown]
    st.dataframe(
        frame,
        hide_index=True,
        width="stretch",
        key="table",
        on_select=_open_row,
        selection_mode="single-row",
        column_config={
            "billions": st.column_config.NumberColumn(format="%.2f"),
            "context": st.column_config.NumberColumn(format="localized"),
        },
        alt="Models that fit, with method, longest context, largest batch, settings, peak, time and dollars.",
    )
    st.caption(finder.SPENT_OF)
    _named([f"{r.model}, {r.method}, {r.context:,} tokens" for r in shown], _open_model)


def _named(labels: list[str], opened: Callable[[int], None]) -> None:
    """Offer the same rows by name: for who neither points at a cell nor ticks a row."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            "Or pick a row", range(len(labels)), index=None, key="named_row",
            format_func=lambda row: labels[row] if isinstance(row, int) and row < len(labels) else "",
            placeholder="by name", width=420,
        )  # fmt: skip
        st.button(
            f"Open in {_opens()}", key="open_named", disabled=chosen is None,
            on_click=opened, args=(chosen or 0,),
        )  # fmt: skip


def _open_cell() -> None:
    chosen = st.session_state["heat"].selection.get("cell") or []
    if chosen:
        wanted = (chosen[0]["model"], chosen[0]["method"])
        for model, method, recipe in st.session_state.get("table_rows", []):
            if (model, method) == wanted:
                open_run(make_recipe(**recipe), model=model)


def _open_row() -> None:
    rows = st.session_state["table"].selection.rows
    known = st.session_state.get("table_rows", [])
    if rows and rows[0] < len(known):
        _open_model(rows[0])


def _open_model(row: int) -> None:
    model, _, recipe = st.session_state["table_rows"][row]
    open_run(make_recipe(**recipe), model=model)


def _opens() -> str:
    """Return the page that shows a row."""
    return "Serve" if state("task") == "serve" else "Will it fit?"


def open_run(recipe: Recipe | None = None, **chosen: Any) -> None:
    """Fill in page 1, with a whole recipe or single choices, and ask the page to switch to it."""
    kept = {key: state(key) for key in ("gpu", "gpus", "nodes", "vram", "ram")}
    if recipe is None:
        kept |= {key: state(key) for key in ("framework", "task")}
    for knob in BY_KEY.values():  # what was set for another run does not belong to this one
        st.session_state[knob.key] = knob.default
    if recipe is not None:
        inputs.set_recipe(recipe)
    for key, value in {**kept, **chosen}.items():
        st.session_state[key] = value
    st.session_state.pop(inputs.UPLOADED, None)
    st.session_state["go"] = {}


def _model_filters() -> None:
    sidebar.model_widget()
    sidebar.knob("task", {})
    sidebar.knob("context", {})
    sidebar.framework_widget()
    st.number_input("GPUs", 1, 65536, 1, 1, key="gpus", bind="query-params")
    st.multiselect("Kinds of GPU", runs.KINDS, ["consumer", "datacenter"], key="kinds")


def gpus() -> None:
    """Show which GPUs take a model, by method, with settings that fit."""
    run = inputs.run_from_state()
    tokens, kinds = int(state("context") or 2048), tuple(st.session_state["kinds"])
    most = None if st.session_state.get("all_cards") else FEW_CARDS
    with st.spinner("Planning for every GPU ..."):
        found = cached.cards(run, tokens, kinds, most) if kinds else []
    times = f"{run.machine.num_gpus} x " if run.machine.num_gpus > 1 else ""
    if not found:
        st.info(
            f"{run.model.name} at {tokens:,} tokens fits {times}no card of these kinds. "
            "Try a shorter context, more GPUs or other kinds."
        )
        return
    cards = list(dict.fromkeys(card.gpu for card in found))
    first = "The first " if len(found) == most else ""
    each = f", {run.machine.num_gpus} of each," if times else ""
    st.markdown(
        f"{first}**{len(cards)} kinds of GPU**{each} take **{escape(run.model.name)}** at {tokens:,} tokens "
        f"for **{state('task')}**. Colour and number: the memory that is left. "
        f"Click a cell, or a row of the table, to open it in *{_opens()}*."
    )
    _ranked(f"{RULE_OF_CARDS}. {SETTINGS_OF} {finder.SPENT_OF}")
    if found[0].setting:
        _said_instead(found[0].setting.recipe)
    rows = finder.card_rows(found)
    st.session_state["gpu_rows"] = found
    if most is None or len(found) == most:
        st.toggle("Show all of them", key="all_cards")
    draw(
        maps.card_map(rows, gpus=cards, columns=list(dict.fromkeys(row["method"] for row in rows))),
        key="gpu_heat",
        on_select=_open_gpu_cell,
        alt=f"Which GPUs take {run.model.name}; the table below has the same.",
    )
    frame = pd.DataFrame(rows)[
        ["gpu", "memory", "method", "peak", "left", finder.TIME, finder.DOLLARS, "settings"]
    ]
    st.dataframe(
        frame,
        hide_index=True,
        width="stretch",
        key="gpu_table",
        on_select=_open_gpu_row,
        selection_mode="single-row",
        alt="GPUs with memory, method, peak, memory left, time, dollars and settings.",
    )
    _named(
        [f"{runs.gpu_label(card.gpu)}, {card.method}" for card in found],
        lambda row: _open_gpu(st.session_state["gpu_rows"][row]),
    )


def layouts() -> None:
    """Show how the chosen number of the chosen GPU could divide the model."""
    if int(state("gpus") or 1) > 1:
        spread.layout_table(inputs.run_from_state())


def _open_gpu_cell() -> None:
    chosen = st.session_state["gpu_heat"].selection.get("cell") or []
    wanted = (chosen[0]["gpu"], chosen[0]["method"]) if chosen else None
    for card in st.session_state.get("gpu_rows", []):
        if (card.gpu, card.method) == wanted:
            _open_gpu(card)


def _open_gpu_row() -> None:
    rows = st.session_state["gpu_table"].selection.rows
    known = st.session_state.get("gpu_rows", [])
    if rows and rows[0] < len(known):
        _open_gpu(known[rows[0]])


def _open_gpu(card: Card) -> None:
    recipe = make_recipe(**card.setting.recipe) if card.setting else None
    open_run(recipe, model=state("model"), gpu=card.gpu)
