"""Passing a run on: files, a badge, a frame for another page, and the view inside such a frame."""

from collections.abc import Callable
from urllib.parse import urlencode

import streamlit as st

from app import charts, links, previews
from app.draw import draw
from app.runs import Run
from app.words import MARKS, escape
from planner.errors import VramwiseError
from planner.plan import Plan
from planner.report.picture import sentence, title
from planner.report.png import picture_png
from planner.report.tables import csv_text, markdown
from planner.units import format_bytes

FRAME_HEIGHT = 560
HERE = "http://127.0.0.1:8501/"


def show(run: Run, result: Plan, values: dict[str, object]) -> None:
    """Show what can be passed on; each file is made when somebody asks for it."""
    made: tuple[tuple[str, str, str, Callable[[], str | bytes]], ...] = (
        ("Report (HTML)", "plan.html", "text/html", lambda: previews.report_of(run, result)),
        ("Picture (PNG)", "plan.png", "image/png", lambda: picture_png(result)),
        ("Table (CSV)", "plan.csv", "text/csv", lambda: csv_text(result)),
        ("Table (Markdown)", "plan.md", "text/markdown", lambda: markdown(result)),
        ("Badge (SVG)", "badge.svg", "image/svg+xml", lambda: previews.badge_of(run, result)),
    )
    with st.container(horizontal=True):
        for label, name, kind, make in made:
            st.download_button(
                label, make, file_name=name, mime=kind, key=f"pass_{name}", on_click="ignore",
                icon=":material/download:",
            )  # fmt: skip
    if run.private:
        st.caption("Your uploaded model is in no link, so that a badge or a frame cannot show it.")
        return
    base = (st.context.url or HERE).split("?")[0]
    query = urlencode(links.link_parameters(values))
    root = base if base.endswith("/") else base.rsplit("/", 1)[0] + "/"
    st.caption("A badge for a README, and a frame for another page:")
    badge = f"[![memory]({root}badge.svg?{query})]({root}?{query})"
    st.code(badge, language="markdown", wrap_lines=True)
    address = f"{root}?{query}&embed=true" if query else f"{root}?embed=true"
    frame = (
        f'<iframe src="{address}" title="vramwise" width="100%" height="{FRAME_HEIGHT}"></iframe>'
    )
    st.code(frame, language="html", wrap_lines=True)


def embedded() -> None:
    """Show a link's run as it stands in another page: the verdict and the bars, no settings."""
    key = previews.key_of("/", st.query_params.to_dict())
    try:
        _, result = previews.planned(key)
    except VramwiseError as error:
        st.error(escape(error.message), icon=":material/error:")
        return
    colour, icon, word = MARKS[result.verdict]
    st.markdown(f"**{escape(title(result))}** :{colour}[{icon} **{word}**]")
    st.caption(escape(sentence(result)))
    sizes = ", ".join(f"{p.name} {format_bytes(p.total_bytes)}" for p in result.phases)
    draw(
        charts.phase_bars(result),
        alt=f"GPU memory by phase against {format_bytes(result.capacity_bytes)}: {sizes}.",
        key="embedded_chart",
        figures=charts.term_rows(result),
        columns=("phase", "term", "size", "formula"),
    )
    base = (st.context.url or HERE).split("?")[0]
    st.markdown(f"[Open in vramwise]({base}?{urlencode(key)})")
