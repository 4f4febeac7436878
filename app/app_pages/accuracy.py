"""Accuracy: every published measurement beside the planner's figure, the worst first."""

import pandas as pd
import streamlit as st

from app import charts, scoring
from app.draw import draw
from app.words import escape, section
from planner.accuracy.score import summarise

result = scoring.accuracy()
sources = sorted({item.row.source for item in result.scored})
quantities = {scoring.quantity_words(name): name for name in result.by_quantity()}
linked = st.query_params.get("quantity") or ""
if linked in quantities.values():
    st.session_state["quantity"] = scoring.quantity_words(linked)  # as the table calls it
with st.sidebar:
    source = st.selectbox(
        "Source", sources, index=None, key="source", bind="query-params", placeholder="all sources"
    )
    quantity = st.selectbox(
        "Quantity", list(quantities), index=None, key="quantity", bind="query-params",
        placeholder="all quantities",
    )  # fmt: skip
items = scoring.filtered(result, source=source, quantity=quantities.get(quantity or ""))
if not items:
    st.info("No published figure of this quantity comes from this source.")
    st.stop()

statistics = summarise(items)
with st.container(horizontal=True, border=True):
    st.metric("Figures", f"{statistics.n:,}", help=f"of {result.rows:,} published ones")
    st.metric("Median error", f"{statistics.median_abs_error:.1%}")
    st.metric("90% are within", f"{statistics.p90_abs_error:.1%}")
    st.metric(
        "Bias",
        f"{round(statistics.bias, 3) + 0.0:+.1%}",
        help="Median signed error; plus: says too much.",
    )
    st.metric("In the interval", f"{statistics.interval_coverage:.0%}")

rows = {item.row.id: item for item in items}
section("The ten worst")
bad = scoring.worst(items)
picked = st.dataframe(
    pd.DataFrame([scoring.row(item) for item in bad])[["id", "miss", "quantity", "said", "source"]],
    hide_index=True,
    width="stretch",
    key="worst",
    on_select="rerun",
    selection_mode="single-row",
    column_config={
        "said": "measured and predicted",
        "miss": st.column_config.TextColumn(width="small"),
    },
    alt="The ten figures the planner misses most.",
)
section("Predicted against measured")
drawn = [scoring.row(item) for item in items if item.truth > 0 and item.prediction.value > 0]
chosen = draw(
    charts.scatter(drawn),
    key="scatter",
    on_select="rerun",
    alt=f"{len(drawn)} figures, predicted against measured; the dashed line is a perfect prediction.",
    figures=drawn,
    columns=("id", "quantity", "said", "miss", "source"),
)
point = chosen.selection.get("row") or []
name = point[0]["id"] if point else ""
if picked.selection.rows and picked.selection.rows[0] < len(bad):
    name = bad[picked.selection.rows[0]].row.id
if name in rows:
    item = rows[name]
    with st.container(border=True, key="chosen_row"):
        shown = scoring.row(item)
        section(f"{item.row.id}: {shown['miss']}")
        st.write(escape(f"{shown['quantity'].capitalize()}: {shown['said']}; {shown['inside']}."))
        if address := scoring.source_address(item):
            st.link_button("Where it was published", address, icon=":material/open_in_new:")
        st.dataframe(
            pd.DataFrame(scoring.facts(item).items(), columns=["column", "value"]),
            hide_index=True,
            width="stretch",
            key="row_facts",
            alt="Everything that the published figure's row says.",
        )
else:
    st.caption("Click a point, or tick a row of the ten worst, to see the figure and its source.")

section("By quantity")
st.dataframe(
    pd.DataFrame(scoring.by_quantity(items)),
    hide_index=True,
    width="stretch",
    key="by_quantity",
    alt="Number of figures, median and 90th percentile error, bias and coverage by quantity.",
)
with st.expander(f"{len(result.not_covered):,} published figures that cannot be expressed"):
    st.dataframe(
        pd.DataFrame(scoring.reasons(result), columns=["figures", "why"]),
        hide_index=True,
        width="stretch",
        key="reasons",
        alt="Why some published figures cannot be expressed.",
    )
