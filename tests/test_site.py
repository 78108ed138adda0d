"""The site, built as ``make docs`` does, and every page of it opened in a browser."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlencode, urlsplit

import pytest
from browser import chromium, needed, opened

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.browser, needed]

SEEN = (ROOT / "tests" / "helpers" / "page.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without a warning, or that of SITE, which ``make docs`` has built like that."""
    if site := os.environ.get("SITE"):
        return ROOT / site
    html = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", html]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return html


def test_every_page_is_whole(site: Path) -> None:
    """Each page loads without warning, error, network, empty picture, broken link or anchor; three widths show all."""
    wrong: list[str] = []
    links: list[tuple[Path, str]] = []
    ids: dict[Path, set[str]] = {}
    with chromium() as browser, opened(browser, (site / "index.html").as_uri()) as page:
        page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri(), wait_until="load")
            for width in (400, 800, 1280):
                page.set_viewport_size({"width": width, "height": 900})
                seen = page.evaluate(SEEN)
                wrong += [f"{path} at {width} pixels: {fault}" for fault in seen["wrong"]]
            ids[path] = {*seen["ids"], ""}
            links += [(path, unquote(link)) for link in seen["links"] if link.startswith("file:")]
    assert len(ids) > 60
    for path, link in links:
        target, file = urlsplit(link), Path(urlsplit(link).path)
        is_there = target.fragment in ids[file] if file in ids else file.is_file() and file.is_relative_to(site)
        wrong += [] if is_there else [f"{path}: broken link {link}"]
    assert not wrong, "\n".join(wrong[:50])


def test_a_search_shows_the_wanted_page_among_the_first_three(site: Path) -> None:
    """The queries were written without knowledge of the site; its index entries were written for them."""
    with (ROOT / "tests" / "queries.csv").open(encoding="utf-8", newline="") as file:
        queries = {row["query"]: row["page"] for row in csv.DictReader(file)}
    missed: dict[str, list[str]] = {}
    with chromium() as browser, browser.new_page() as page:
        for query, wanted in queries.items():
            page.goto(f"{(site / 'search.html').as_uri()}?{urlencode({'q': query})}")
            page.wait_for_function("/found|match/.test(document.querySelector('.search-summary')?.innerText)")
            links = page.eval_on_selector_all("ul.search > li > a", "all => all.map(a => a.getAttribute('href'))")
            pages = dict.fromkeys(re.split("[?#]", link)[0].removesuffix(".html") for link in links)
            if wanted not in [*pages][:3]:
                missed[query] = [*pages][:3]
    assert not missed


def test_a_click_on_a_head_sorts_the_rows() -> None:
    """Numbers sort by value, a cell without a value comes last in both directions, and the keyboard clicks too."""
    ascending = ["-2", "9.5 ± 1", "10", "1,000", "-"]
    with chromium() as browser, browser.new_page() as page:
        page.set_content(f"<table class=sortable><thead><tr><th>n<tbody>{'<tr><td>'.join(['', *sorted(ascending)])}")
        page.add_script_tag(path=ROOT / "docs" / "_static" / "sortable.js")
        page.keyboard.press("Tab")
        for way, wanted in (("ascending", ascending), ("descending", [*ascending[-2::-1], "-"])):
            page.keyboard.press("Enter")
            assert page.locator("th").get_attribute("aria-sort") == way
            assert page.locator("td").all_inner_texts() == wanted
