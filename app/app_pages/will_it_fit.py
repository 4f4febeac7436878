"""Will it fit? One run on one machine, explained."""

import streamlit as st

from app import answer, cached, details, inputs, runs, spread, words
from planner.errors import VramwiseError

try:
    run = inputs.run_from_state()
    result = cached.plan_of(run)
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
    st.stop()
except VramwiseError as error:
    words.problem(error)
    st.stop()

answer.verdict_card(run, result)
spread.best(run)
spread.ranks(result)
left, right = st.columns([3, 2], gap="medium")
with left:
    answer.phases(result)
with right:
    answer.lever_buttons(run, result)
details.show(run, result)
