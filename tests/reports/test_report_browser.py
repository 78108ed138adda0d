"""The report in a real browser: it draws, filters, sorts and saves, makes no request, and runs no text of a user."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import browser
import pytest
from playwright.sync_api import Browser, Page, expect
from report_runs import change, quiet, small_runs, summary

from fedcommons import report

pytestmark = [pytest.mark.browser, browser.needed]

THREE = {"federation.rounds": 3, "target": 0.99}
HOSTILE = "<img src=x onerror=\"document.title='run'\">'</script><script>document.title='run'</script>"
LINES = '.chart[data-kind="rounds"] svg path[aria-roledescription="line mark"]'
"""The lines of the curves of accuracy over rounds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods at two alphas with two or three seeds each; one has a hostile statement, one reached its target."""
    runs = {
        f"{name}-{alpha:g}-{seed}": {"algorithm": name, "alpha": alpha, "seed": seed, **THREE}
        for name in ("fedavg", "fedprox")
        for alpha in (0.1, 1.0)
        for seed in ((0, 1, 2) if (name, alpha) == ("fedavg", 1.0) else (0, 1))
    }
    out = small_runs(tmp_path_factory.mktemp("runs"), runs)
    for seed in range(3):
        file = out / f"fedavg-1-{seed}" / "rounds.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if seed == 1:
            lines[2]["test/accuracy"] = 1.0
        timed = [line | ({"server/time": 1.5 * line["round"]} if line["round"] else {}) for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in timed))
    path = out / "fedavg-1-0"
    change(path / "summary.json", privacy={**summary(path)["privacy"], "in_words": [HOSTILE]})
    return out


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = report(folder, out=tmp_path_factory.mktemp("out") / "report.html", title=HOSTILE, say=quiet)
    return file.as_uri()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.chromium() as started:
        yield started


def texts(page: Page, table: str, column: str) -> list[str]:
    """This column of the lines that are shown."""
    at = page.locator(f'table[data-name="{table}"] thead th').all_inner_texts()
    place = next(i for i, head in enumerate(at) if head.startswith(column))
    rows = page.locator(f'table[data-name="{table}"] tr[data-line]:visible').all()
    return [row.locator("th, td").nth(place).inner_text() for row in rows]


def see_all(page: Page) -> None:
    """Scroll through the page: charts are drawn when they come near."""
    for chart in page.locator(".chart").all():
        if chart.is_visible():
            chart.scroll_into_view_if_needed()
            chart.locator("svg").wait_for()


def tick(page: Page, dim: str, value: str) -> None:
    box = page.locator("#filters details", has_text=f"{dim}:")
    box.locator("summary").click()
    box.get_by_label(value, exact=True).check()
    page.keyboard.press("Escape")


def test_it_draws_every_chart_without_a_request_and_runs_no_text(chromium: Browser, url: str) -> None:
    with browser.opened(chromium, url) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        see_all(page)
        assert page.locator(".chart svg").count() == 9
        assert page.locator('.chart[data-kind="time"]').count() == 1  # in the group with a run that has times
        assert page.locator(LINES).count() == 4
        assert not asked
        assert page.title() == page.locator("h1").inner_text() == HOSTILE
        assert page.locator("#privacy").get_by_text(HOSTILE).count() == 1
        link = page.locator('table[data-name="results"] tr[data-line]').first.locator('td[data-c="last_accuracy"] a')
        link.click()
        names = page.locator("tr.hit th").all_inner_texts()
        assert names == [f"fedavg-0.1-{seed}" for seed in (0, 1)]


def test_no_table_is_cut_and_equal_lines_are_seen(chromium: Browser, url: str, tmp_path: Path) -> None:
    with browser.opened(chromium, url) as page:
        boxes = page.locator(".box").evaluate_all("all => all.map(box => [box.scrollWidth, box.clientWidth])")
        assert [whole for whole, seen in boxes if whole > seen] == []
        heads = page.locator('table[data-name="runs"] thead th:visible')
        few = heads.count()
        page.get_by_role("button", name="all columns").click()
        assert heads.count() > few
    small_runs(tmp_path, {"a": {"algorithm": "fedavg"}, "b": {"algorithm": "fedprox", "fedprox.mu": 0.0}})
    with browser.opened(chromium, report(tmp_path, out=tmp_path / "equal.html", say=quiet).as_uri()) as page:
        see_all(page)
        widths = page.locator(LINES).evaluate_all("all => all.map(line => line.getAttribute('stroke-width'))")
        assert widths == ["5", "2"]


def test_an_interval_in_brackets_is_not_broken(chromium: Browser, url: str, tmp_path: Path) -> None:
    interval, html = r"\([\d.]+ to [\d.]+\)", Path(url.removeprefix("file://")).read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(re.sub(f">[^<]*{interval}</a>", ">3 to 4</a>", html, count=1), encoding="utf-8")
    with browser.opened(chromium, (tmp_path / "page.html").as_uri()) as page:
        first, *cells = page.locator("td[data-c] a", has_text=" to ").evaluate_all("all => all.map(a => a.innerHTML)")
    assert first == "3 to 4"
    assert {bool(re.fullmatch(rf"[\d.]+ <span>{interval}</span>", cell)) for cell in cells} == {True}


def test_filters_apply_to_tables_curves_and_files(chromium: Browser, url: str, folder: Path, tmp_path: Path) -> None:
    with browser.opened(chromium, url) as page:
        see_all(page)
        tick(page, "method", "fedprox")
        tick(page, "alpha", "0.1")
        assert texts(page, "results", "method") == ["fedprox"]
        expect(page.locator(f".group:not([hidden]) {LINES}")).to_have_count(1)
        two = [100 * summary(folder / f"fedprox-0.1-{seed}")["last_accuracy"] for seed in (0, 1)]
        mean, half = fmean(two), 12.706204736 * abs(two[0] - two[1]) / 2  # t with one degree of freedom
        interval = f"{mean:.1f} ({max(mean - half, 0):.1f} to {min(mean + half, 100):.1f})"
        assert texts(page, "results", "last accuracy") == [interval]
        with page.expect_download() as started:
            page.locator("#results .files").get_by_role("button", name="CSV").click()
        started.value.save_as(tmp_path / "csv")
        lines = csv.DictReader((tmp_path / "csv").read_text().splitlines())
        assert [line["method"] for line in lines] == ["fedprox"]
        page.get_by_role("button", name="show all").click()
        expect(page.locator("#filters output")).to_have_text("9 of 9 runs")
        tick(page, "method", "fedavg")
        tick(page, "alpha", "1")
        assert texts(page, "results", "rounds to target") == [">2.7 (missed by 2 of 3)"]
        tick(page, "seed", "0")
        tick(page, "seed", "1")
        assert texts(page, "results", "rounds to target") == [">2.5 (missed by 1 of 2)"]
