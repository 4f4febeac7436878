"""What leaves the app: a report that opens offline, a frame in another page, tags that a bot reads."""

import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from tests.browser.driving import chromium, open_browser, running_app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]
BOT = {"User-Agent": "Slackbot-LinkExpanding 1.0 (+https://api.slack.com/robots)"}
LINK = "model=llama-3.1-8b&gpu=rtx-4090&method=qlora&context=8192"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_app() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_without_a_network_and_asks_for_nothing(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    target = tmp_path / "plan.html"
    line = "plan llama-3.1-8b --task serve --gpu rtx-4090 --context 8192"
    assert main([*shlex.split(line), "--html", str(target)]) == 0
    context = browser.new_context(color_scheme=scheme, offline=True, java_script_enabled=False)
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(target.as_uri())
    assert asked == [target.as_uri()]
    assert said == []
    assert page.inner_text("h1") == "llama-3.1-8b, serving, 8,192 tokens"
    assert "What gives more room" in page.inner_text("main")
    wide, seen = page.locator("svg").bounding_box()["width"], page.viewport_size["width"]
    assert 0.5 * seen < wide <= seen
    page.locator("details summary").first.click()
    assert page.locator("details[open] td").first.is_visible()
    context.close()


def test_a_pasted_link_has_its_run_in_the_html(address: str) -> None:
    asked = urllib.request.Request(f"{address}/?{LINK}", headers=BOT)
    html = urllib.request.urlopen(asked, timeout=60).read().decode()
    assert 'property="og:title" content="llama-3.1-8b, GRPO with QLoRA, 8,192 tokens: fits"' in html
    (picture,) = re.findall(r'property="og:image" content="([^"]+)"', html)
    answer = urllib.request.urlopen(picture.replace("&amp;", "&"), timeout=60)
    assert answer.headers["content-type"] == "image/png"
    assert answer.read().startswith(b"\x89PNG")


def test_a_frame_shows_the_answer_and_no_settings(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 700, "height": 560})
    page.set_content(
        f'<iframe src="{address}/?{LINK}&embed=true" width="700" height="560"></iframe>'
    )
    frame = page.frame_locator("iframe")
    frame.get_by_text("Fits: ").wait_for(timeout=60_000)
    assert frame.get_by_text("llama-3.1-8b, GRPO with QLoRA, 8,192 tokens").is_visible()
    assert frame.get_by_text("Open in vramwise").is_visible()
    assert frame.get_by_role("spinbutton").count() == 0
    assert frame.get_by_text("Recommend").count() == 0
    page.close()
