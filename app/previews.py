"""What a pasted link shows before anybody opens it: title, description and picture of its run.

Bots run no JavaScript, so that these stand in the HTML itself (app/web.py answers with it). Nothing in a link
is trusted: it is read as the app reads it, what is wrong is left out, and no link causes a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from urllib.parse import urlencode

from app import cached, links, runs
from app.runs import Run
from planner.answers.smallest import smallest_gb
from planner.errors import VramwiseError
from planner.plan import Plan
from planner.report.page import page
from planner.report.picture import HEIGHT, WIDTH, sentence, title
from planner.report.png import picture_png
from planner.report.svg import badge_label, badge_message, badge_svg
from planner.report.tables import csv_text, markdown
from planner.run.recipe import Task
from planner.run.runfile import run_file_text

NAME = "vramwise"
PAGES = {
    "/": ("Will it fit?", "GPU memory of an LLM fine-tune or GRPO run, byte by byte: will it fit, what takes the memory, when, and what would make it fit."),
    "/serve": ("Serve", "What vLLM serves on a card: tokens of KV cache, requests at once, the longest request, and what makes it start."),
    "/recommend": ("Recommend", "For a GPU, the models and settings that fit; for a model, the GPUs."),
    "/budget": ("Budget", "Memory, hours and dollars of a run over cards, layouts and settings: what nothing beats, and what your budget leaves."),
    "/compare": ("Compare", "Frameworks side by side, and the published 510.8 GB to 54.3 GB taken apart."),
    "/recording": ("Recording", "A recording, a run's metrics or a torch snapshot, planned beside measured."),
    "/explain": ("Explain an error", "An out-of-memory message or a log: its cause, how sure, and what to change."),
    "/accuracy": ("Accuracy", "Every published measurement against the planner, the worst first."),
}  # fmt: skip
"""Title and description of every page: of its address, and of a link without a run."""
RUN_PAGES = ("/", "/serve")
MOST_CHARS = 4000
KEPT = 128

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """What a link shows."""

    title: str
    description: str
    picture: str
    """Its address below the app's own; "" = none."""


def key_of(path: str, parameters: Mapping[str, str]) -> Key:
    """Return the settings of a link that are settings, as what a plan is kept under."""
    taken = {name: text for name, text in parameters.items() if name in runs.DEFAULTS}
    if sum(len(text) for text in taken.values()) > MOST_CHARS:
        return ()
    if path == "/serve":
        taken |= {"task": Task.SERVE.value, "framework": "vllm"}
    return tuple(sorted(taken.items()))


@lru_cache(KEPT)
def planned(key: Key) -> tuple[Run, Plan]:
    """Return the run that a link describes, planned; raises VramwiseError when it cannot be."""
    run = runs.run_of(links.read_link(dict(key)))
    return run, cached.plan_of(run)


def preview(path: str, parameters: Mapping[str, str]) -> Preview:
    """Return what a link to a page shows."""
    name, about = PAGES[path]
    general = Preview(
        f"{name} - {NAME}" if path != "/" else f"{NAME}: {name}", about, "preview.png"
    )
    key = key_of(path, parameters)
    if path not in RUN_PAGES or not any(name in runs.DEFAULTS for name in parameters) or not key:
        return general
    try:
        _, found = planned(key)
    except VramwiseError:
        return general
    said = sentence(found)
    why = found.why[0].upper() + found.why[1:]
    return Preview(
        f"{title(found)}: {found.verdict}", f"{said}. {why}.", f"preview.png?{urlencode(key)}"
    )


def with_preview(html: str, found: Preview, *, base: str, address: str) -> str:
    """Return Streamlit's page with the tags that bots read; `base` ends in a slash."""
    picture = f"{base}{found.picture}"
    tags = {
        "og:type": "website",
        "og:site_name": NAME,
        "og:title": found.title,
        "og:description": found.description,
        "og:url": address,
        "og:image": picture,
        "og:image:width": str(WIDTH),
        "og:image:height": str(HEIGHT),
        "og:image:alt": found.description,
    }
    named = {
        "description": found.description,
        "twitter:card": "summary_large_image",
        "twitter:title": found.title,
        "twitter:description": found.description,
        "twitter:image": picture,
    }
    lines = [f'<meta property="{key}" content="{escape(text)}" />' for key, text in tags.items()]
    lines += [f'<meta name="{key}" content="{escape(text)}" />' for key, text in named.items()]
    start, end = html.index("<title>"), html.index("</title>")
    head = f"<title>{escape(found.title)}</title>\n    " + "\n    ".join(lines)
    return html[:start] + head + html[end + len("</title>") :]


@lru_cache(KEPT)
def png(key: Key) -> bytes:
    """Return the picture of a link."""
    return picture_png(planned(key)[1])


@lru_cache(KEPT)
def badge(key: Key) -> str:
    """Return the badge of a link; one that cannot be planned says so."""
    try:
        run, found = planned(key)
    except VramwiseError:
        return badge_svg(NAME, "not in the catalogue", "tight")
    return badge_of(run, found)


def badge_of(run: Run, found: Plan) -> str:
    """Return the badge of a planned run."""
    least = smallest_gb(run.model, run.recipe, run.machine)
    message = badge_message(found, least)
    return badge_svg(badge_label(found), message, "fits" if least is not None else found.verdict)


def report(key: Key) -> str:
    """Return the report of a link as one HTML file."""
    run, found = planned(key)
    return report_of(run, found)


def report_of(run: Run, found: Plan) -> str:
    """Return the report of a planned run."""
    from planner.answers.advise import levers
    from planner.answers.serving import serving_view
    from planner.report.serving import serving_text

    served = serving_view(run.model, run.recipe, run.machine, found)
    return page(
        found,
        levers=[] if served else levers(run.model, run.recipe, run.machine, found),
        served=serving_text(served) if served else "",
        run_yaml=run_file_text(run.file),
    )


TABLES = {"plan.csv": csv_text, "plan.md": markdown}
