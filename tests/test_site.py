"""The site, built as ``make docs`` does, and every page of it opened in a browser."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import chromium, needed
from playwright.sync_api import Page

ROOT = Path(__file__).parent.parent
pytestmark = needed

OURS = ("file:", "data:")
RAW = ("$", "\\frac", "\\sum", "<!--", "{toctree}")
"""Marks that no page shows outside of code."""

SEEN = """() => {
  const shown = document.querySelector('article').cloneNode(true);
  shown.querySelectorAll('pre, code, math').forEach(one => one.remove());
  return {
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    ids: [...document.querySelectorAll('[id]')].map(one => one.id),
    empty: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    odd: document.querySelectorAll('.system-message, .problematic, merror').length,
    text: shown.textContent,
  };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of its pages. Warnings are errors."""
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", f"{out}/read", "-b", "html"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])}
    words += [str(ROOT / "docs"), f"{out}/html"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out / "html"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.new_page()


def test_every_page_is_whole(site: Path, page: Page) -> None:
    """No error, no network, no empty picture, no raw equation, no broken link or anchor."""
    wrong: list[str] = []
    here = ""
    page.on("console", lambda line: wrong.append(f"{here}: {line.text}") if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(f"{here}: {error}"))
    page.on("requestfailed", lambda request: wrong.append(f"{here}: not loaded: {request.url}"))
    page.on("request", lambda asked: None if asked.url.startswith(OURS) else wrong.append(f"{here}: {asked.url}"))
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    ids: dict[Path, set[str]] = {}
    links: list[tuple[str, str]] = []
    for path in pages:
        here = path.relative_to(site).as_posix()
        page.goto(path.as_uri(), wait_until="load")
        seen = page.evaluate(SEEN)
        ids[path] = {*seen["ids"], ""}
        links += [(here, unquote(link)) for link in seen["links"] if link.startswith("file:")]
        wrong += [f"{here}: empty picture {one}" for one in seen["empty"]]
        wrong += [f"{here}: raw {mark}" for mark in RAW if mark in seen["text"]]
        wrong += [f"{here}: marked as wrong"] * bool(seen["odd"])
    for where, link in links:
        target = urlsplit(link)
        file = Path(target.path)
        is_there = target.fragment in ids[file] if file in ids else file.is_file() and file.is_relative_to(site)
        wrong += [] if is_there else [f"{where}: broken link {link}"]
    assert not wrong, "\n".join(wrong[:50])
