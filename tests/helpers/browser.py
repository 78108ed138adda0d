"""Debian's Chromium in headless mode, driven by playwright, for tests of HTML pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=60_000)  # of milliseconds; on a busy machine five seconds are too few
CHROMIUM = shutil.which("chromium")

needed = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")
"""A mark of files whose tests need the browser, besides ``pytest.mark.browser``."""

_FLAGS = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
"""Without ``_FLAGS``, Chromium contacts Google's hosts on its own."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a new browser and close it at the end; for root, Chromium must start without a sandbox."""
    root = ["--no-sandbox"] if os.getuid() == 0 else []
    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=CHROMIUM, args=[*root, *_FLAGS]) as browser,
    ):
        yield browser


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """Open the page at this address; at the end, check that it logged no error and loaded all files."""
    faults: list[str] = []
    with browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("requestfailed", lambda request: faults.append(f"not loaded: {request.url}"))
        page.goto(url, wait_until="load")
        yield page
    assert not faults
