"""Serve: what a vLLM server holds on a machine, and what makes it start."""

import streamlit as st

from app import answer, inputs, runs, serving, words
from planner.answers.serving import PREFIX, serving_view
from planner.errors import VramwiseError
from planner.plan import plan

try:
    run = serving.run_from_state()
    result = plan(run.model, run.recipe, run.machine)
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
    st.stop()
except VramwiseError as error:
    words.problem(error)
    st.stop()

shared = int(st.session_state.get("shared_prefix", PREFIX) or 0)
view = serving_view(run.model, run.recipe, run.machine, result, shared_prefix=shared)
if view is None:
    st.info("This model keeps no cache that a server could run out of.")
    st.stop()
serving.verdict(view, result)
left, right = st.columns([3, 2], gap="medium")
with left:
    serving.requests(view)
    serving.budget(view)
with right:
    serving.changes(run, view)
serving.adapters(view)
words.section("A prefix that all requests share")
serving.shared_prefix()
serving.prefix(view)
serving.command(run)
