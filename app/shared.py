"""What the pages share: widgets made by the router keep their values from page to page.

Streamlit gives a widget that a page makes an identity of that page alone; one that the router
makes is the same on every page.
"""

import streamlit as st

from app import comparing, finding, serving, sidebar


def before(url_path: str) -> None:
    """Show the shared widgets of a page, before the page itself."""
    if url_path == "recommend":
        wanted = finding.direction()
        with st.sidebar:
            finding.filters(wanted)
    elif url_path == "compare":
        mode = comparing.mode()
        if mode != comparing.PUBLISHED:
            with st.sidebar:
                sidebar.show()
    elif url_path == "serve":
        with st.sidebar:
            serving.settings()
    elif url_path in ("", "budget"):
        with st.sidebar:
            sidebar.show()
