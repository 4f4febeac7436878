"""Compare: frameworks, one's own runs, and the published table taken apart."""

import streamlit as st

from app import comparing, inputs, jobs, pins, runs, words
from planner.errors import VramwiseError

mode = st.session_state["compare"]
if mode == comparing.PUBLISHED:
    comparing.waterfalls()
    st.stop()

named = {}
if mode == comparing.FRAMEWORKS:
    st.markdown("The run of the sidebar as each framework would hold it in memory.")
    wanted = st.multiselect(
        "Frameworks",
        runs.framework_options(),
        list(jobs.side_by_side(inputs.state("task"))),
        key="frameworks",
        max_selections=8,
        bind="query-params",
    )
    try:
        own = inputs.run_from_state()
        for name in wanted:
            recipe = own.recipe.model_copy(update={"framework": name})
            named[name] = inputs.run_from_state(recipe)
    except VramwiseError as error:
        words.problem(error)
else:
    pins.write_link()
    st.button(
        "Add the run of the sidebar", key="pin_here", icon=":material/keep:", on_click=pins.add
    )
    for index, pin in enumerate(pins.pinned()):
        left, right = st.columns([6, 1], vertical_alignment="center")
        try:
            run, notices = pins.run_of(pin)
        except VramwiseError as error:
            words.problem(error)
        else:
            label = (
                f"{index + 1}. {run.model.name} {run.recipe.method.value} {run.recipe.framework}"
            )
            named[label] = run
            left.markdown(words.escape(label))
            for notice in notices:
                left.warning(notice)
        right.button("Remove", key=f"unpin_{index}", on_click=pins.remove, args=(index,))
    if not pins.pinned():
        st.info("No runs yet: add the one of the sidebar, change it, add it again.")

plans, problems = comparing.planned(named)
for problem in problems:
    st.warning(words.escape(problem))
if plans:
    comparing.bars(plans, key="compare_chart")
    comparing.table(plans, key="compare_table")
    if len(plans) > 1:
        comparing.differences_table(plans, key="differences")
