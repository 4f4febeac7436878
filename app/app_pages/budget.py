"""Budget: memory, hours and dollars of a run over cards, layouts and settings, and what a budget leaves."""

import streamlit as st

from app import answer, budgets, inputs, runs, words
from planner.errors import VramwiseError

if "go" in st.session_state:
    st.switch_page("app_pages/will_it_fit.py", query_params=st.session_state.pop("go"))

try:
    budgets.show(inputs.run_from_state())
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
except VramwiseError as error:
    words.problem(error)
