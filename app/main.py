"""The app: a router over the pages. Every number on them is the planner's."""

from pathlib import Path

import streamlit as st

from app import draw, inputs, links, shared, sharing

PAGES = Path(__file__).parent / "app_pages"
# Longer than the row of all names has room for. (A string here would be written on the page.)
HEADINGS = {"explain": "Explain an error"}

# Before the pages are named: without an icon by then a browser fetches the page's from a font's host.
st.set_page_config(page_icon=str(PAGES.with_name("favicon.png")), layout="wide")
page = st.navigation(
    [
        st.Page(
            PAGES / "will_it_fit.py",
            title="Will it fit?",
            default=True,
            help="One run on one machine: what takes the memory, when, and what would make it fit.",
        ),
        st.Page(
            PAGES / "serve.py",
            title="Serve",
            help="What vLLM serves on a card: requests at once, the longest one, and what makes it start.",
        ),
        st.Page(
            PAGES / "recommend.py",
            title="Recommend",
            help="For a GPU, the models and settings that fit; for a model, the GPUs.",
        ),
        st.Page(
            PAGES / "budget.py",
            title="Budget",
            help="Memory, hours and dollars of a run over cards: drag what you have.",
        ),
        st.Page(
            PAGES / "compare.py",
            title="Compare",
            help="Frameworks side by side, and the published 510.8 GB to 54.3 GB taken apart.",
        ),
        st.Page(
            PAGES / "recording.py",
            title="Recording",
            help="Upload a recording, a run's metrics or a torch snapshot; see planned beside measured.",
        ),
        st.Page(
            PAGES / "explain.py",
            title="Explain",
            help="Paste an out-of-memory message or a log: its cause, how sure, and what to change.",
        ),
        st.Page(
            PAGES / "accuracy.py",
            title="Accuracy",
            help="Every published measurement against the planner, the worst first.",
        ),
    ],
    position="hidden" if st.context.is_embedded else "top",
)
heading = HEADINGS.get(page.url_path, page.title)
st.set_page_config(page_title=f"{heading.rstrip('?')} · vramwise")
if st.context.is_embedded:  # a frame in another page: the answer alone, without settings
    sharing.embedded()
    st.stop()
if "link_notices" not in st.session_state:
    parameters = st.query_params.to_dict()
    st.session_state["link_notices"] = links.check_link(parameters)
    inputs.from_link(parameters)
    refused = links.refused_keys(parameters)
    if refused:  # start again without them, before a widget takes the link's word for it
        kept = [key for key in parameters if key not in refused]
        st.switch_page(page, query_params={key: st.query_params.get_all(key) for key in kept})
st.title(heading, anchor=False)
for notice in st.session_state["link_notices"]:
    st.warning(notice, icon=":material/link_off:")
draw.looks()
shared.before(page.url_path)
page.run()
