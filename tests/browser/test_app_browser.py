"""The app in a real headless Chromium: plan, levers, links, uploads, clicks, phone, keyboard."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.axe import violations
from tests.browser.driving import PAGES, chromium, go, open_browser, running_app, settle
from tests.browser.screenshots import example_recording
from trainer.config import read_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]
PHONE = {"width": 390, "height": 844}
SCREENS = 3
"""Of a phone, that a page may take."""
DESKTOP = {"width": 1360, "height": 1000}
DOES_NOT_FIT = "?model=llama-3.1-8b&framework=trl&method=lora&context=4096&batch=8"
EIGHT_GPUS = "?model=llama-3.1-8b&gpu=h100-sxm&gpus=8&task=sft&method=full&context=4096"
FOUR_STAGES = (
    "?model=llama-3.2-1b&gpu=h100-sxm&gpus=4&task=sft&method=full&framework=megatron"
    "&context=512&sharding=megatron&stages=4&accumulation=4"
)
PUBLISHED = "compare?compare=510.8+GB+to+54.3+GB"
FULLEST = (
    DOES_NOT_FIT,
    EIGHT_GPUS,
    FOUR_STAGES,
    "serve?model=llama-3.1-70b&gpu=rtx-4090",
    "recommend?look_for=GPUs+for+my+model&model=llama-3.1-8b&gpu=h100-sxm&gpus=8&task=sft",
    "compare?compare=my+runs&"
    + "&".join(f"pin=model%3Dllama-3.2-1b%26batch%3D{batch}" for batch in range(1, 7)),
    PUBLISHED,
)
"""Pages with as much on them as a link can put there."""
AXOLOTL = b"""base_model: Qwen/Qwen2.5-3B
adapter: lora
sequence_len: 4096
micro_batch_size: 2
lora_r: 32
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_app() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=DESKTOP, accept_downloads=True)
    yield context.new_page()
    context.close()


def verdict(page: Any) -> str:
    text = page.locator(".st-key-verdict h2").inner_text()
    return next(word for word in ("Does not fit", "Tight", "Fits") if word in text)


def peak(page: Any) -> str:
    return page.locator('.st-key-verdict [data-testid="stMetricValue"]').first.inner_text()


@pytest.mark.slow
def test_levers_until_it_fits_then_the_link_restores_it(
    page: Any, browser: Any, address: str
) -> None:
    go(page, f"{address}/{DOES_NOT_FIT}")
    assert "Does not fit" in verdict(page)
    for _ in range(8):
        if "Does not fit" not in verdict(page):
            break
        before = peak(page)
        page.locator(".st-key-lever_0 button").first.click()
        page.wait_for_function(
            "before => document.querySelector('.st-key-verdict [data-testid=stMetricValue]')"
            "?.innerText !== before",
            arg=before,
        )
        settle(page)
    assert "Does not fit" not in verdict(page)
    assert "batch=8" not in page.url  # the browser's address follows the levers
    page.get_by_role("tab", name="Take it away").click()
    page.get_by_role("tab", name="Link").click()
    link = page.locator('[data-testid="stCode"]', has_text=address).last.inner_text().strip()
    other = browser.new_context(viewport=DESKTOP).new_page()
    go(other, link)
    assert (verdict(other), peak(other)) == (verdict(page), peak(page))
    go(other, page.url)
    assert (verdict(other), peak(other)) == (verdict(page), peak(page))
    other.context.close()


@pytest.mark.slow
def test_a_laptop_owner_leaves_with_a_run_file_the_trainer_takes(
    page: Any, address: str, tmp_path: Path
) -> None:
    go(page, f"{address}/")
    page.get_by_role("link", name="Recommend").click()
    settle(page)
    box = page.get_by_role("combobox", name=re.compile("GPU"))
    box.first.click()
    box.first.press_sequentially("rtx-4090-laptop")  # while rtx-4090 is chosen
    page.keyboard.press("Enter")
    page.get_by_text("NVIDIA GeForce RTX 4090 Laptop GPU").wait_for()
    settle(page)
    page.locator(".st-key-heat .mark-rect path").nth(3).click()
    page.locator(".st-key-verdict").wait_for()
    settle(page)
    assert verdict(page) == "Fits"
    assert "gpu=rtx-4090-laptop" in page.url
    page.get_by_role("tab", name="Take it away").click()
    with page.expect_download() as download:
        page.locator(".st-key-download button").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    run, train = read_run(file)
    assert run.machine.gpu == "rtx-4090-laptop"
    assert run.recipe.task == "grpo"
    assert train.rewards


@pytest.mark.slow
def test_cards_are_typed_with_their_count(page: Any, address: str) -> None:
    go(page, f"{address}/?model=llama-3.2-1b")
    box = page.get_by_role("combobox", name=re.compile("GPU"))
    box.first.click()
    box.first.press_sequentially("8 x h100")
    page.keyboard.press("Enter")
    page.locator(".st-key-verdict", has_text="8 x NVIDIA H100").wait_for()
    assert "gpu=h100-sxm" in page.url
    assert "gpus=8" in page.url


@pytest.mark.slow
def test_a_model_is_typed_in_ones_own_words(page: Any, address: str) -> None:
    go(page, f"{address}/")
    box = page.get_by_role("combobox", name=re.compile("Model"))
    box.first.click()
    box.first.press_sequentially("llama 3.1 8b")
    page.keyboard.press("Enter")
    page.locator(".st-key-verdict", has_text="llama-3.1-8b").wait_for()


@pytest.mark.slow
def test_a_foreign_config_is_uploaded(page: Any, address: str) -> None:
    go(page, f"{address}/")
    page.get_by_text("Start from a file").click()
    page.locator(".st-key-config_file input[type=file]").set_input_files(
        {"name": "config.yml", "mimeType": "text/yaml", "buffer": AXOLOTL}
    )
    page.get_by_text("Filled in from a config of axolotl").wait_for()
    settle(page)
    assert "framework=axolotl" in page.url
    assert "rank=32" in page.url


@pytest.mark.slow
def test_a_point_of_the_scatter_shows_its_row(page: Any, address: str) -> None:
    go(page, f"{address}/accuracy")
    page.locator(".st-key-scatter .mark-symbol.role-mark path").last.click(force=True)
    page.locator(".st-key-chosen_row").wait_for()
    assert "measured" in page.locator(".st-key-chosen_row").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(16, 20, 27)")]
)
def test_every_page_is_for_every_reader_and_asks_no_other_host(
    browser: Any, address: str, scheme: str, paper: str
) -> None:
    context = browser.new_context(viewport=DESKTOP, color_scheme=scheme)
    shown = context.new_page()
    asked: list[str] = []
    problems: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("pageerror", lambda error: problems.append(str(error)))
    titles = []
    for name in (*PAGES, *FULLEST):
        go(shown, f"{address}/{name}")
        titles.append(shown.title())
        assert violations(shown) == [], name
        levels = shown.eval_on_selector_all("h1, h2, h3", "all => all.map(h => +h.tagName[1])")
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), name
    go(shown, f"{address}/explain")
    shown.locator(".st-key-example button").click()
    shown.get_by_role("heading", name="What to change").wait_for()
    settle(shown)
    assert violations(shown) == [], "an explained error"
    colour = shown.evaluate(
        "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    )
    assert colour == paper
    own = (address, address.replace("http", "ws"), "data:", "blob:")
    assert [url for url in asked if not url.startswith(own)] == []
    assert problems == []
    assert len(set(titles)) == len(PAGES)
    context.close()


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    yield context.new_page()
    context.close()


def screens(phone: Any) -> float:
    """Return how many screens a page takes; none of it stands beside the screen."""
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    tall: int = phone.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    return tall / PHONE["height"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PAGES, *FULLEST])
def test_a_phone_scrolls_down_less_than_three_screens_and_never_sideways(
    phone: Any, address: str, path: str
) -> None:
    go(phone, f"{address}/{path}")
    assert screens(phone) <= SCREENS


@pytest.mark.slow
def test_what_a_phone_opens_takes_less_than_three_screens(
    phone: Any, address: str, tmp_path: Path
) -> None:
    go(phone, f"{address}/")
    for part in ("Largest that fit", "Against context", "Take it away"):
        phone.get_by_role("tab", name=part).click()
        settle(phone)
        assert screens(phone) <= SCREENS, part
    go(phone, f"{address}/explain")
    phone.locator(".st-key-example button").click()
    phone.get_by_role("heading", name="What to change").wait_for()
    settle(phone)
    assert screens(phone) <= SCREENS, "an explained error"
    go(phone, f"{address}/recording")
    phone.locator(".st-key-recording_file input[type=file]").set_input_files(
        str(example_recording(tmp_path))
    )
    phone.locator('[data-testid="stMetric"]').first.wait_for()
    settle(phone)
    assert screens(phone) <= SCREENS, "a recording"
    go(phone, f"{address}/accuracy")
    phone.locator(".st-key-scatter .mark-symbol.role-mark path").last.click(force=True)
    phone.locator(".st-key-chosen_row").wait_for()
    settle(phone)
    assert screens(phone) <= SCREENS, "a published figure"


def test_the_first_page_is_for_every_reader(browser: Any, address: str) -> None:
    context = browser.new_context(viewport=DESKTOP, color_scheme="dark")
    shown = context.new_page()
    go(shown, f"{address}/{DOES_NOT_FIT}")
    assert violations(shown) == []
    assert shown.title() == "Will it fit · vramwise"
    shown.set_viewport_size({"width": 1280, "height": 1000})
    shown.get_by_role("link", name="Accuracy").wait_for()  # the last page's name has room
    context.close()


def test_a_reader_without_a_mouse_hears_the_verdict_and_reaches_the_figures(
    page: Any, address: str
) -> None:
    go(page, f"{address}/{DOES_NOT_FIT}&gpu=h100-sxm")
    said = page.locator("[role=status][aria-live=polite]")
    before = said.text_content()
    assert "The peak is in" in before
    said.evaluate("region => { region.dataset.kept = 'yes' }")
    page.locator(".st-key-lever_0 button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "before => document.querySelector('[role=status][aria-live=polite]')?.textContent !== before",
        arg=before,
    )
    assert (
        said.get_attribute("data-kept") == "yes"
    )  # the same region: what changes in it is read out
    settle(page)
    opener = page.locator(".st-key-phase_chart_figures summary")
    opener.focus()
    page.keyboard.press("Enter")
    page.locator('.st-key-phase_chart_figures [data-testid="stDataFrame"]').wait_for()


@pytest.mark.slow
def test_eight_gpus_and_no_layout_are_divided_by_one_click(page: Any, address: str) -> None:
    go(page, f"{address}/{EIGHT_GPUS}")
    page.get_by_text("a whole copy on each of them").wait_for()
    page.locator(".st-key-best_layout button").click()
    page.wait_for_url("**sharding=**")
    settle(page)
    assert verdict(page) == "Fits"
    assert "gpu=h100-sxm" in page.url
    assert "gpus=8" in page.url


@pytest.mark.slow
def test_every_stage_of_a_pipeline_has_its_bar_and_recommend_its_layouts(
    page: Any, address: str
) -> None:
    go(page, f"{address}/{FOUR_STAGES}")
    assert "Fits" in verdict(page)
    page.get_by_text("the fullest, GPU ").first.wait_for()
    chart = page.locator('[data-testid="stVegaLiteChart"]').first
    marks = chart.locator(".mark-rect.role-mark path")
    marks.first.wait_for()
    heights = {round(mark.bounding_box()["y"]) for mark in marks.all()}
    assert len(heights) == 4  # a bar each: all stages differ by embeddings, layers or head
    page.get_by_role("link", name="Recommend").click()
    page.wait_for_url("**/recommend**")
    settle(page)
    page.get_by_text("GPUs for my model").first.click()
    page.get_by_text("the least traffic over slow links").wait_for()
    settle(page)
    page.locator('[data-testid="stDataFrame"]').last.wait_for()


@pytest.mark.slow
def test_a_powershell_log_is_explained_beside_a_config_that_cannot_be_read(
    page: Any, address: str
) -> None:
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB. GPU 0 has a total capacity of 79.10 GiB of which 9.06 GiB is free."
    go(page, f"{address}/explain")
    for key, name, content in (
        ("explain_config", "config.yml", b"\x00\x01\x02"),
        ("explain_log", "run.log", log.encode("utf-16")),
    ):
        page.locator(f".st-key-{key} input[type=file]").set_input_files(
            {"name": name, "mimeType": "text/plain", "buffer": content}
        )
    page.get_by_text("Read without the config").wait_for()
    page.get_by_text("The message as it was found").click()
    page.locator('[data-testid="stCode"]', has_text="15.66 GiB").first.wait_for()


@pytest.mark.slow
def test_two_tabs_are_two_runs_and_a_reload_keeps_each(page: Any, address: str) -> None:
    other = page.context.new_page()
    go(page, f"{address}/?context=4096&gpu=rtx-3090")
    go(other, f"{address}/?context=1024")
    assert peak(page) != peak(other)
    before = peak(page), peak(other)
    page.reload()
    settle(page)
    assert (peak(page), peak(other)) == before
    assert "gpu=rtx-3090" in page.url


def test_a_hostile_link_leaves_a_notice_and_a_clean_address(page: Any, address: str) -> None:
    go(page, f"{address}/?batch=-4&algorithm={'x' * 300}&rank=32&model=../../etc/passwd")
    assert page.locator('[data-testid="stAlert"]').count() == 3
    assert page.url.endswith("/?rank=32")
    assert verdict(page) == "Fits"
