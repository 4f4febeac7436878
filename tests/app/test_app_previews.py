"""What a pasted link shows: tags in the HTML, a picture, a badge; nothing of a hostile link is run."""

import asyncio
import re
from html import unescape
from typing import Any

import pytest
from starlette.requests import Request

from app import previews, web
from app.previews import Preview, key_of, preview, with_preview
from planner.errors import VramwiseError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.report.picture import sentence
from planner.run.runfile import make_recipe

LINK = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "method": "lora", "context": "8192"}


def tags(html: str) -> dict[str, str]:
    """Return the page's named tags, as a bot reads them."""
    found = re.findall(r'<meta (?:property|name)="([^"]+)" content="([^"]*)"', html)
    return {name: unescape(text) for name, text in found}


def answered(path: str, query: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of the app's answer; None passes to Streamlit."""
    sent: list[dict[str, Any]] = []

    async def streamlit(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 0})

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(b"host", b"plan.example"), *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items())]  # fmt: skip
    scope = {
        "type": "http", "method": "GET", "path": path, "query_string": query.encode(),
        "headers": raw, "scheme": "http", "server": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    asyncio.run(web.LinkPreviews(streamlit)(scope, None, send))  # type: ignore[arg-type]
    start = sent[0]
    named = {k.decode(): v.decode() for k, v in start.get("headers", [])}
    return start["status"], named, b"".join(m.get("body", b"") for m in sent).decode()


def test_a_links_run_is_in_the_html_that_a_bot_gets() -> None:
    query = "&".join(f"{key}={value}" for key, value in LINK.items())
    status, _, html = answered("/", query, x_forwarded_proto="https")
    found = plan(
        catalogue_model("llama-3.1-8b"),
        make_recipe(task="grpo", method="lora", context=8192),
        make_machine("h100-sxm"),
    )
    assert status == 200
    seen = tags(html)
    assert seen["og:title"] == "llama-3.1-8b, GRPO with LoRA, 8,192 tokens: fits"
    assert seen["og:description"].startswith(sentence(found))
    assert seen["og:url"] == f"https://plan.example/?{query}"
    assert seen["og:image"].startswith("https://plan.example/preview.png?")
    assert seen["twitter:card"] == "summary_large_image"
    assert f"<title>{seen['og:title']}</title>" in html
    assert 'src="./static/js/' in html  # and it is still the app


def test_the_picture_of_a_link_is_of_its_run() -> None:
    picture = preview("/", LINK).picture.partition("?")[2]
    again = key_of("/", dict(part.split("=") for part in picture.split("&")))
    assert again == key_of("/", LINK)
    assert previews.png(again).startswith(b"\x89PNG")
    assert previews.planned(again)[0].model.name == "llama-3.1-8b"


@pytest.mark.parametrize("path", previews.PAGES)
def test_every_page_has_a_title_and_a_description_of_its_own(path: str) -> None:
    status, headers, html = answered(path)
    assert status == 200
    assert headers["cache-control"] == "no-cache"
    assert previews.PAGES[path][0] in tags(html)["og:title"]
    assert tags(html)["description"] == previews.PAGES[path][1]


def test_a_link_to_serve_shows_the_server() -> None:
    found = preview("/serve", {"model": "llama-3.1-8b", "gpu": "rtx-4090", "context": "8192"})
    assert found.title == "llama-3.1-8b, serving, 8,192 tokens: fits"
    assert "task=serve" in found.picture


@pytest.mark.parametrize("path", ["/_stcore/health", "/static/js/index.js", "/nowhere"])
def test_everything_else_is_streamlits(path: str) -> None:
    assert answered(path)[0] == 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"model": '"><script>alert(1)</script>'},
        {"model": "owner/name"},  # would need the hub
        {"model": "llama-3.1-8b", "context": "9" * 5000},
        {"gpu": "\x00", "context": "-1"},
        {"model": "llama-3.1-8b", "task": "serve", "context": "10000000"},  # vLLM refuses
    ],
)
def test_hostile_and_impossible_links_show_the_page(parameters: dict[str, str]) -> None:
    found = preview("/", parameters)
    html = with_preview(web.index_html(), found, base="http://a/", address='http://a/?"><script>')
    assert "<script>alert" not in html
    assert '?"><script>' not in html
    assert "og:title" in tags(html)


def test_a_forged_host_stays_text() -> None:
    scope = {
        "type": "http",
        "headers": [(b"host", b'a"><script>x')],
        "scheme": "javascript",
        "path": "/",
    }
    html = with_preview(web.index_html(), Preview("t", "d", "p"), base=web.base_of(Request(scope)), address="a")  # fmt: skip
    assert '"><script>x' not in html
    assert tags(html)["og:image"].startswith("http://")


def test_badges_reports_and_tables_of_links() -> None:
    badge = previews.badge(key_of("/", {**LINK, "method": "qlora", "task": "sft"}))
    assert "QLoRA, 8K context: fits 10 GB" in badge
    assert "not in the catalogue" in previews.badge(key_of("/", {"model": "owner/name"}))
    assert "<h2>Every phase</h2>" in previews.report(key_of("/", LINK))
    assert "What gives more room" in previews.report(key_of("/serve", LINK))
    with pytest.raises(VramwiseError, match="owner/name is not in the catalogue"):
        previews.report(key_of("/", {"model": "owner/name"}))
