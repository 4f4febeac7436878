"""Recommend: for a GPU the models that fit, and for a model the GPUs."""

import streamlit as st

from app import answer, finding, inputs, runs, words
from planner.errors import VramwiseError

if "go" in st.session_state:
    wanted = "serve" if inputs.state("task") == "serve" else "will_it_fit"
    st.switch_page(f"app_pages/{wanted}.py", query_params=st.session_state.pop("go"))

try:
    if st.session_state["look_for"] == finding.GPUS:
        finding.gpus()
        finding.layouts()
    else:
        finding.models()
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
except VramwiseError as error:
    words.problem(error)
