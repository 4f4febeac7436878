"""Starts the app and a headless Chromium: for the browser tests and for the pictures."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PAGES = ("", "serve", "recommend", "budget", "compare", "recording", "explain", "accuracy")
"""Every page's address: axe, the phone, the load and the pictures go through this list."""
START_S = 60
WORKERS = "1"
"""Beside the one for long jobs: what a machine of two cores gets."""
SETTLE_MS = 180_000
QUIET_MS = 400
"""A page is settled when its script has ended and nothing moved for this long."""


def chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return None


@contextmanager
def running_app(*, warm: str = "0", seen: list[int] | None = None) -> Iterator[str]:
    """Run the app on a free port of 127.0.0.1; yield its address. `seen` takes its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app", "--port", str(port), "--headless"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "VRAMWISE_APP_WORKERS": WORKERS, "VRAMWISE_APP_WARM": warm},
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    if seen is not None:
        seen.append(process.pid)
    try:
        _wait_until_up(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_until_up(address: str, process: "subprocess.Popen[str]") -> None:
    for _ in range(START_S * 10):
        if process.poll() is not None:
            raise RuntimeError(f"the app ended at once: {process.stderr.read()[-2000:]}")  # type: ignore[union-attr]
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=2) as answer:
                if answer.read() == b"ok":
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the app did not start in {START_S} s")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        yield browser
        browser.close()


def settle(page: Any) -> None:
    """Wait until the page's script has ended and its elements are drawn."""
    page.wait_for_selector("h1", timeout=SETTLE_MS)
    quiet = """() => document.querySelector('[data-testid="stApp"]')
        ?.getAttribute('data-test-script-state') === 'notRunning'
        && !document.querySelector('[data-testid="stSkeleton"], [data-stale="true"]')"""
    for _ in range(2):
        page.wait_for_function(quiet, timeout=SETTLE_MS)
        page.wait_for_timeout(QUIET_MS)


def go(page: Any, address: str) -> None:
    """Open an address and wait until it is drawn."""
    page.goto(address)
    settle(page)
