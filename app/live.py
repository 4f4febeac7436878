"""Says a changed answer to people who hear the page: one live region that stays where it is.

A region is only read out when it was there before its text changed, so the element is made once and
afterwards only its text is set.
"""

import streamlit as st

_SCRIPT = """
export default function ({ parentElement, data }) {
  let said = parentElement.querySelector("[role=status]")
  if (!said) {
    said = document.createElement("div")
    said.setAttribute("role", "status")
    said.setAttribute("aria-live", "polite")
    said.style.cssText = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap"
    parentElement.appendChild(said)
  }
  if (said.textContent !== data) said.textContent = data
}
"""


def say(text: str) -> None:
    """Have a screen reader say the text when it is another one than before."""
    region = st.components.v2.component("vramwise_live", js=_SCRIPT, isolate_styles=False)
    region(data=text, key="live", height=1)
