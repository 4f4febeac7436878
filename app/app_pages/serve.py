"""Serve: what a vLLM server holds on a machine, and what makes it start."""

import streamlit as st

from app import answer, cached, inputs, runs, serving, words
from planner.answers.serving import PREFIX
from planner.errors import VramwiseError

try:
    run = serving.run_from_state()
    result = cached.plan_of(run)
    view = cached.served(run, int(st.session_state.get("shared_prefix", PREFIX) or 0))
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
    st.stop()
except VramwiseError as error:
    words.problem(error)
    st.stop()

if view is None:
    st.info("This model keeps no cache that a server could run out of.")
    st.stop()
serving.verdict(view, result)
serving.changes(run, view)
left, right = st.columns([3, 2], gap="medium")
with left:
    serving.requests(view)
with right:
    serving.budget(view)
serving.adapters(view)
words.section("A prefix that all requests share")
serving.shared_prefix()
serving.prefix(view)
serving.command(run)
