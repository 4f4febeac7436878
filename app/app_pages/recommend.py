"""Recommend: for a GPU the models that fit, and for a model the GPUs."""

import streamlit as st

from app import answer, finding, inputs, runs
from planner.errors import VramwiseError

if "go" in st.session_state:
    st.switch_page("app_pages/will_it_fit.py", query_params=st.session_state.pop("go"))

direction = st.segmented_control(
    "Look for",
    ["models for my GPU", "GPUs for my model"],
    default="models for my GPU",
    key="look_for",
    bind="query-params",
    required=True,
    label_visibility="collapsed",
)
try:
    if direction == "GPUs for my model":
        with st.sidebar:
            finding.model_filters()
        finding.gpus()
    else:
        with st.sidebar:
            finding.gpu_filters()
        finding.models()
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
except VramwiseError as error:
    answer.problem(error)
