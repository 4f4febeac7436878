"""Recording: what a run really used, and planned beside measured."""

import streamlit as st

from app import measuring, words

found = measuring.uploaded()
if found is None:
    st.info(
        "Make one with `vramwise trace MODEL --save recording.json` (no GPU needed), "
        "`vramwise profile run -- CMD`, or `torch.cuda.memory._dump_snapshot(FILE)`.",
        icon=":material/lightbulb:",
    )
    st.stop()
for sentence in found.findings:
    st.warning(words.escape(words.in_app(sentence)))
if found.recording is None:
    measuring.steps(found)
    st.stop()
measuring.headline(found.recording)
measuring.timeline(found.recording)
measuring.phase_bars(found.recording)
planned = measuring.planned_run()
if planned is not None:
    measuring.beside(*planned, found.recording)
measuring.largest(found.recording)
