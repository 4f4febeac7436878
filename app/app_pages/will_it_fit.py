"""Will it fit? One run on one machine, explained."""

import streamlit as st

from app import answer, inputs, runs, sharing, spread
from planner.answers import advise
from planner.errors import VramwiseError
from planner.plan import plan

try:
    run = inputs.run_from_state()
    result = plan(run.model, run.recipe, run.machine)
except runs.NeedsLookUp:
    answer.offer_look_up(str(inputs.state("model")))
    st.stop()
except VramwiseError as error:
    answer.problem(error)
    st.stop()

levers = advise.levers(run.model, run.recipe, run.machine, result)
answer.verdict_card(run, result)
spread.best(run)
spread.ranks(result)
left, right = st.columns([3, 2], gap="medium")
with left:
    answer.phases(result)
    answer.curve(run, result)
with right:
    answer.lever_buttons(run, result, levers)
    answer.largest(run, result)
answer.peak_table(result)
answer.host(result)
answer.exports(run)
private = st.session_state.get(inputs.UPLOADED) is not None
sharing.show(run, result, inputs.values(), private=private)
