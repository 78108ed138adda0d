"""The report as a file: its numbers are those of run folders, groups are never averaged, nobody's text is markup."""

import json
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from fedcommons import experiment, report, run
from fedcommons.errors import UserError
from fedcommons.reports import contents, intervals, page
from fedcommons.reports.gathered import gather
from fedcommons.reports.groups import grouped
from fedcommons.reports.intervals import Column
from fedcommons.sweeping import runner

FIELDS = {
    "wandb": "off",
    "federation.rounds": 2,
    "client.epochs": 1,
    "measure.every": 1,
    "data.limit": 80,
    "alpha": 0.1,
}
HOSTILE = "<img src=x onerror=alert(1)>\"'</script><script>alert(2)</script>"


def quiet(text: str) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds, a run on fewer examples, one with late clients."""
    out = tmp_path_factory.mktemp("runs")
    for algorithm in ("fedavg", "fedprox"):
        for seed in (1, 0):
            fields = {**FIELDS, "algorithm": algorithm, "seed": seed}
            run(experiment("smoke", values=fields), out / f"{algorithm}-{seed}", say=quiet)
    run(experiment("smoke", values={**FIELDS, "data.limit": 60}), out / "fewer", say=quiet)
    late = {"straggler.rule": "fastest", "straggler.k": 3}
    run(experiment("smoke", values={**FIELDS, **late}), out / "late", say=quiet)
    return out


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return page.page([folder], None, quiet)


def summary(path: Path) -> dict[str, Any]:
    return json.loads((path / "summary.json").read_text(encoding="utf-8"))


def rows(html: str) -> dict[str, str]:
    """The rows of runs, by the names of their folders."""
    found = re.findall(r'<tr id="run-\d+".*?</tr>', html, re.S)
    return {re.findall(r"<th[^>]*>(.*?)</th>", row)[0]: row for row in found}


def test_numbers_of_runs_are_those_of_their_summaries(folder: Path, html: str) -> None:
    found = rows(html)
    assert len(found) == 6
    for name, row in found.items():
        told = re.findall(r'<data value="([^"]+)">', row)
        of = summary(folder / name)
        for field in ("last_accuracy", "best_accuracy", "validation_accuracy", "bytes_up", "bytes_down"):
            assert repr(of[field]) in told or repr(float(of[field])) in told, (name, field)


def test_a_cell_has_the_mean_and_the_interval_of_its_runs_and_leads_to_them(folder: Path, html: str) -> None:
    names = list(rows(html))
    accuracies = [100 * summary(folder / f"fedprox-{seed}")["last_accuracy"] for seed in (0, 1)]
    mean, half = fmean(accuracies), 12.706204736 * abs(accuracies[0] - accuracies[1]) / 2  # t of one degree of freedom
    text = f"{mean:.1f} ({mean - half:.1f} to {mean + half:.1f})"
    (row,) = [r for r in re.findall(r"<tr data-cell.*?</tr>", html, re.S) if text in r and "fedprox" in r]
    numbers = [int(n) for n in re.findall(r'data-runs="([\d ]+)"', row)[0].split()]
    assert [names[n] for n in numbers] == ["fedprox-0", "fedprox-1"]
    assert f'<a href="#run-{numbers[0]}">{text}</a>' in row


def test_every_link_has_its_target(html: str) -> None:
    ids = set(re.findall(r' id="([^"]+)"', html))
    links = re.findall(r'href="#([^"]+)"', html.partition('<script type="application/json"')[0])
    assert len(links) > 50
    assert set(links) <= ids


def test_runs_of_other_data_or_stragglers_stand_in_groups_of_their_own(html: str) -> None:
    results = html.partition('<section id="results">')[2].partition("</section>")[0]
    titles = [unescape(text) for text in re.findall(r'<tr class="title">.*?<span>(.*?)</span>', results)]
    assert len(titles) == 3
    assert sum("data.limit = 60" in title for title in titles) == 1
    assert sum("straggler.k = 3" in title for title in titles) == 1
    assert len(re.findall(r"<tr data-cell", results)) == 4


def test_runs_on_other_partitions_or_other_content_are_never_averaged(folder: Path, tmp_path: Path) -> None:
    for name in ("here", "there"):
        for seed in (0, 1):
            shutil.copytree(folder / f"fedavg-{seed}", tmp_path / name / f"fedavg-{seed}")

    def change(path: Path, found: str, put: str) -> None:
        path.write_text(path.read_text(encoding="utf-8").replace(found, put), encoding="utf-8")

    for seed in (0, 1):
        of = tmp_path / "there" / f"fedavg-{seed}"
        held = summary(of)["partition"]
        change(of / "summary.json", held, held[::-1])
        change(of / "partition.json", held, held[::-1])
    runs, _ = gather([tmp_path], quiet)
    groups = grouped(runs, quiet)
    assert [len(group.cells[0].runs) for group in groups] == [2, 2]
    ends = [f"partitions of {tmp_path / name}" for name in ("here", "there")]
    assert [group.title.rpartition(", ")[2] for group in groups] == ends
    for seed in (0, 1):
        of = tmp_path / "there" / f"fedavg-{seed}" / "partition.json"
        change(of, json.loads(of.read_text(encoding="utf-8"))["data"], "0123456789abcdef")
    runs, _ = gather([tmp_path], quiet)
    groups = grouped(runs, quiet)
    assert [group.title.rpartition(", ")[2] for group in groups][1] == "data 0123456789abcdef"


def test_a_missed_target_is_said_and_has_no_interval() -> None:
    column = Column("rounds_to_target", "", digits=1)
    assert intervals.text_of_rounds([10.0, 12.0], 1, column) == "missed by 1 of 3, else 11.0"
    assert intervals.text_of_rounds([], 3, column) == "missed by 3 of 3"
    assert intervals.text_of_rounds([10.0, 12.0], 0, column) == "11.0 (0.0 to 23.7)"


def test_an_interval_is_cut_off_where_no_mean_can_lie() -> None:
    accuracy, loss = Column("last_accuracy", "", 100, 1), Column("test/loss", "")
    assert intervals.text([0.9, 1.0], accuracy) == "95.0 (31.5 to 100.0)"
    assert intervals.text([1.0, 3.0], loss) == "2 (0 to 14.7)"
    assert intervals.text([-1.0, 1.0], loss) == "0 (-12.7 to 12.7)"
    assert intervals.interval([0.9, 1.0], accuracy.most / accuracy.scale)[1] == 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12345.0, "12300"),
        (0.5, "0.5"),
        (1.2345e-7, "1.23e-7"),
        (2.5e9, "2.50e9"),
        (-0.00012345, "-0.000123"),
    ],
)
def test_numbers_in_short(value: float, text: str) -> None:
    assert intervals.number(value, None) == text


def hostile(folder: Path, tmp_path: Path) -> Path:
    """A run whose texts are markup, in a folder whose name is."""
    of = tmp_path / "x<b onclick=alert(3)>&y" / "run"
    shutil.copytree(folder / "fedavg-0", of)
    told = summary(of)
    told["setting"] = told["config"]["sharing.setting"] = HOSTILE
    told["privacy"]["in_words"] = [HOSTILE, "\u202eturned\x1b[31m"]
    (of / "summary.json").write_text(json.dumps(told), encoding="utf-8")
    facts = json.loads((of / "environment.json").read_text(encoding="utf-8"))
    (of / "environment.json").write_text(json.dumps({**facts, "machine": HOSTILE}), encoding="utf-8")
    return of.parent


def test_texts_of_others_are_no_markup(folder: Path, tmp_path: Path) -> None:
    html = page.page([hostile(folder, tmp_path), folder], HOSTILE, quiet)
    assert "<img src=x" not in html
    assert "<b onclick" not in html
    assert "alert(2)</script>" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert html.count("<script") == html.count("</script>") == 3
    assert HOSTILE in unescape(html)


def test_a_text_in_the_place_of_a_number_is_left_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedavg-0", tmp_path / "run")
    told = summary(tmp_path / "run")
    told["privacy"]["in_words"] = 5
    odd = {"zeta_sq": "many", "bytes_lost": None, "clients/accuracy_mean": "x", "L_max": True}
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**told, **odd}), encoding="utf-8")
    html = page.page([tmp_path], None, quiet)
    assert "many" not in rows(html)["run"]
    assert repr(told["last_accuracy"]) in rows(html)["run"]


def test_no_address_is_loaded_and_only_known_scripts_run(html: str) -> None:
    policy = unescape(re.findall(r'Content-Security-Policy" content="([^"]+)"', html)[0])
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert len(re.findall(r"'sha256-[\w+/=]+'", policy)) == 2
    body = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert not re.findall(r"(?:src|href)=\"(?!#|data:image/png)", body)
    assert len(html) < 5e6


def test_what_cannot_be_read_is_named_on_screen_and_page(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedavg-0", tmp_path / "good")
    shutil.copytree(folder / "fedavg-1", tmp_path / "bad")
    told = summary(tmp_path / "bad")
    (tmp_path / "bad" / "summary.json").write_text(json.dumps({**told, "p": "x"}), encoding="utf-8")
    said: list[str] = []
    out = report(tmp_path, out=tmp_path / "report.html", say=said.append)
    assert len(said) == 1
    assert "bad" in said[0]
    assert f"<li>{said[0]}</li>" in unescape(out.read_text(encoding="utf-8"))


def test_a_growing_folder_is_shown_as_far_as_it_is(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedavg-0", tmp_path / "fedavg-0")
    shutil.copytree(folder / "fedavg-1", tmp_path / "fedavg-1")
    (tmp_path / "fedavg-1" / "summary.json").unlink()
    lines = (tmp_path / "fedavg-1" / "rounds.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "fedavg-1" / "rounds.jsonl").write_text(
        "".join(lines[:2]) + lines[2][:30], encoding="utf-8"
    )  # a line half written
    html = page.page([tmp_path], None, quiet)
    assert ">1 of 2</a>" in html
    assert "<td>unfinished</td>" in rows(html)["fedavg-1"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("report.txt", "--out names an HTML file such as report.html"),
        ("taken.html", "is no report of fedcommons and stays as it is"),
        ("folder.html", "is a folder; name a file in it"),
        ("nowhere/report.html", "there is no folder"),
        ("pipe.html", "is a pipe"),
    ],
)
def test_a_place_that_is_no_reports_is_refused_before_any_work(name: str, said: str, tmp_path: Path) -> None:
    import os

    (tmp_path / "taken.html").write_text("<p>mine</p>", encoding="utf-8")
    (tmp_path / "folder.html").mkdir()
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(UserError, match=re.escape(said)):
        report(tmp_path / "no such folder", out=tmp_path / name)
    assert (tmp_path / "taken.html").read_text(encoding="utf-8") == "<p>mine</p>"


@pytest.mark.parametrize(("make", "said"), [(True, "holds no run"), (False, "is not a folder")])
def test_a_folder_without_runs_is_refused_and_an_earlier_report_stays(make: bool, said: str, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text(page.MARK, encoding="utf-8")
    if make:
        (tmp_path / "of").mkdir()
    with pytest.raises(UserError, match=said):
        report(tmp_path / "of", out=out)
    assert out.read_text(encoding="utf-8") == page.MARK


def test_curves_are_thinned_to_what_a_browser_can_draw_and_keep_their_ends() -> None:
    rounds: list[float | None] = [float(r) for r in range(201)]
    curve = {"round": rounds, "accuracy": [r / 200 for r in range(201)], "loss": [None] * 201, "bytes": rounds}
    whole, every = contents.thin([curve])
    assert every == 1
    assert whole[0][0] == rounds
    found, every = contents.thin([curve] * 1000)
    assert every == 4
    assert found[0][0][:3] == [0, 4, 8]
    assert found[0][0][-1] == 200
    assert sum(len(one[0]) for one in found) < 1.1 * contents.POINTS


def test_lines_beyond_the_most_are_in_the_csv_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcommons.reports import cell_tables

    monkeypatch.setattr(cell_tables, "SHOWN", 2)
    monkeypatch.setattr(cell_tables, "LATEX", 1)
    html = page.page([folder], None, quiet)
    results = html.partition('<section id="results">')[2].partition("</section>")[0]
    assert results.count("<tr data-cell") == 2
    assert "Shown: the first 2 of 4 lines. The CSV has all." in results
    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.S)[0])
    assert len(data["files"]["results"]["csv"]) == 5


def test_csv_and_latex_are_those_of_pandas_with_a_line_for_each_of_the_table(folder: Path, html: str) -> None:
    import io

    import pandas as pd

    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.S)[0])
    assert {"results", "bytes", "convergence", "privacy", "runs", "late"} <= data["files"].keys()
    table = pd.read_csv(io.StringIO("\n".join(data["files"]["results"]["csv"])))
    mine = table.loc[table["method"] == "fedprox", :].iloc[0]
    accuracies = [summary(folder / f"fedprox-{seed}")["last_accuracy"] for seed in (0, 1)]
    assert mine["last_accuracy"] == pytest.approx(fmean(accuracies), rel=1e-12)
    assert mine["last_accuracy_low"] < min(accuracies)
    for files in data["files"].values():
        lines = len(files["csv"]) - 1
        assert files["latex"][0].startswith(r"\begin{tabular}")
        assert files["tail"][-1] == r"\end{tabular}"
        assert len([line for line in files["latex"] if line.endswith(r"\\")]) == lines + 1


def test_a_pools_picture_is_shown_and_what_is_none_is_not(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    of = tmp_path / "run"
    shutil.copytree(folder / "fedavg-0", of)
    told = summary(of)
    told["setting"] = told["config"]["sharing.setting"] = "shuffled_synthetic"
    (of / "summary.json").write_text(json.dumps(told), encoding="utf-8")
    media = of / "wandb" / "offline-run-1" / "files" / "media" / "images" / "media"
    media.mkdir(parents=True)
    file = media / "pool_2_ab.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"no picture" * 9)
    assert "data:image/png" not in page.page([of], None, quiet)
    Image.new("L", (40, 30), 77).save(file)
    assert page.page([of], None, quiet).count('<img src="data:image/png;base64,') == 1
    Image.new("L", (5000, 30), 77).save(file)
    assert "data:image/png" not in page.page([of], None, quiet)


def test_the_command_writes_it_and_says_where(
    folder: Path, tmp_path: Path, sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert sweeps("report").report([str(folder), "--out", str(out), "--title", "Mine & yours"]) == 0
    assert "<title>Mine &amp; yours</title>" in out.read_text(encoding="utf-8")
    assert capsys.readouterr().out.startswith(f"{out}: ")


def test_a_sweep_writes_it_and_a_page_that_cannot_be_made_stops_nothing(folder: Path, tmp_path: Path) -> None:
    class Said:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def say(self, text: str) -> None:
            self.lines.append(text)

    shutil.copytree(folder / "fedavg-0", tmp_path / "fedavg-0")
    display: Any = Said()
    runner.write_page(tmp_path, "table1", display)
    assert "<title>fedcommons report: table1</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not display.lines
    (tmp_path / "report.html").write_text("somebody's own", encoding="utf-8")
    runner.write_page(tmp_path, "table1", display)
    assert display.lines[0].startswith("report.html was not written: ")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "somebody's own"
