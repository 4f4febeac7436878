"""Explain an error: paste or upload a message, a stack trace or a whole log."""

import streamlit as st

from app import explaining, runs, words
from planner.errors import VramwiseError


def use_example() -> None:
    """Fill the box with a message as torch prints it."""
    st.session_state["pasted"] = explaining.EXAMPLE


with st.sidebar:
    st.caption("All optional: the log is read for them first.")
    model = st.text_input("Model", "", key="explain_model", max_chars=120, placeholder="qwen2.5-7b")
    gpu = st.selectbox(
        "GPU", runs.gpu_options()[:-1], index=None, key="explain_gpu", placeholder="as the log says"
    )
    config = st.file_uploader(
        "The run's config, of any tool",
        type=["json", "yaml", "yml", "sh", "py", "ipynb", "txt"],
        key="explain_config",
        max_upload_size=explaining.MAX_CONFIG_MIB,
    )
text = st.text_area(
    "Message, stack trace or log",
    key="pasted",
    height=160,
    max_chars=explaining.MAX_PASTED,
    placeholder="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ...",
    help="Read here, never stored and never sent anywhere.",
)
log = st.file_uploader(
    "Or a log file",
    type=list(explaining.LOG_TYPES),
    key="explain_log",
    max_upload_size=explaining.MAX_LOG_MIB,
)
imported = None
try:
    imported = explaining.config_of(config)
except VramwiseError as error:  # the log is read all the same
    words.problem(error)
    st.caption("Read without the config.")
try:
    found = explaining.read(
        text or "", log, imported, model=explaining.known_model(model or ""), gpu=gpu
    )
except VramwiseError as error:
    words.problem(error)
    st.stop()
if imported is not None:
    explaining.import_report(imported)
if found is None:
    st.button(
        "Show me an example", key="example", icon=":material/lightbulb:", on_click=use_example
    )
elif not found.scan.lines:
    st.info("There is nothing to read in it.")
else:
    explaining.show(found)
