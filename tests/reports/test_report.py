"""The report as a file and as a page that follows its folders: numbers of run folders, who may read it."""

import csv
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from statistics import fmean
from threading import Thread
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from report_runs import change, copies, quiet, small_runs, summary

from fedcommons import UserError, report
from fedcommons.reports import intervals, page, series, tables
from fedcommons.reports.cells import cells
from fedcommons.reports.collect import gather, grouped
from fedcommons.reports.live_server import Server, Watched
from fedcommons.reports.tables import Column
from fedcommons.tune import main
from fedcommons.tune.sweep import Outcome

HOSTILE = "<img src=x onerror=alert(1)>\"'</script><script>alert(2)</script>"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds, a run on fewer examples, one with stragglers."""
    runs = {f"{name}-{seed}": {"algorithm": name, "seed": seed} for name in ("fedavg", "fedprox") for seed in (1, 0)}
    late = {"straggler.rule": "fastest", "straggler.k": 3}
    return small_runs(tmp_path_factory.mktemp("runs"), {**runs, "fewer": {"data.limit": 60}, "late": late})


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return page.page([folder], None, quiet)


FEW, MANY = {0: 2, 1: 3, 2: 3}, {0: 24, 1: 25, 2: 25}
"""Rounds to the target by seed."""
VERDICTS = [
    ({"real": MANY, "merf": FEW}, "merf, fedavg needs 2.7 rounds instead of 24.7 to reach 80 %; 3 seeds, all"),
    ({"real": MANY, "merf": {0: 2, 1: 3, 2: None}}, ">11.7 (missed by 1 of 3) rounds instead of 24.7"),
    ({"real": MANY, "merf": {1: 5, 3: 1}, "shuffled_real": FEW}, "With shuffled_real"),
    ({"real": MANY, "merf": MANY, "shuffled_real": FEW}, "in 1 of all 2 comparisons"),
    ({"merf": MANY, "shuffled_real": FEW}, ""),
]  # fmt: skip
FACTS = {"data.name": "digits", "algorithm": "fedavg", "client.lr": 0.1, "lr": 0.1, "partition": "a", "rounds": 30,
         "target": 0.8, "last_accuracy": 0.5, "status": "finished"}  # fmt: skip


@pytest.mark.parametrize(("rounds", "words"), VERDICTS)
def test_the_verdict_compares_sharing_seed_by_seed(rounds: dict[str, dict[int, Any]], words: str) -> None:
    of_runs = [(name, seed, reached) for name, by_seed in rounds.items() for seed, reached in by_seed.items()]
    runs = pd.DataFrame(of_runs, columns=pd.Index(["sharing.setting", "seed", "rounds_to_target"]))
    text = tables.verdict([cells(runs.assign(**FACTS, run=[str(run) for run in of_runs]))])
    assert words in text
    assert bool(text) == bool(words)


def rows(html: str) -> dict[str, str]:
    """The rows of runs, by the names of their folders."""
    every = re.findall(r'<tr id="run-\d+".*?</tr>', html, re.S)
    return {re.findall(r"<th[^>]*>(.*?)</th>", row)[0]: row for row in every}


def test_rows_are_of_summaries_and_cells_and_files_have_the_mean_and_interval(folder: Path, html: str) -> None:
    assert len(rows(html)) == 6
    for name, row in rows(html).items():
        values, content = re.findall(r'<data value="([^"]+)">', row), summary(folder / name)
        for field in ("last_accuracy", "best_accuracy", "validation_accuracy", "bytes_up", "bytes_down"):
            assert repr(content[field]) in values or repr(float(content[field])) in values, (name, field)
    accuracies = [100 * summary(folder / f"fedprox-{seed}")["last_accuracy"] for seed in (0, 1)]
    mean, half = fmean(accuracies), 12.706204736 * abs(accuracies[0] - accuracies[1]) / 2  # t of one degree of freedom
    text = f"{mean:.1f} ({mean - half:.1f} to {mean + half:.1f})"
    cell_rows = re.findall(r"<tr data-cell.*?</tr>", html, re.S)
    (row,) = [r for r in cell_rows if text in r and "fedprox" in r]
    numbers = [int(n) for n in re.findall(r'data-runs="([\d ]+)"', row)[0].split()]
    assert [list(rows(html))[n] for n in numbers] == ["fedprox-0", "fedprox-1"]
    links = re.findall(r'href="#([^"]+)"', html.partition('<script type="application/json"')[0])
    assert set(links) <= set(re.findall(r' id="([^"]+)"', html))
    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.S)[0])
    assert data["looks"]["colour"] == {name: series.looks([name])[name][0] for name in ("fedavg", "fedprox")}
    (fedprox,) = [line for line in csv.DictReader(data["files"]["results"]["csv"]) if line["method"] == "fedprox"]
    assert float(fedprox["last_accuracy"]) == pytest.approx(mean / 100, rel=1e-12)
    for file in data["files"].values():
        assert len([line for line in file["latex"] if line.endswith(r"\\")]) == len(file["csv"])


def test_runs_of_other_data_stragglers_or_partitions_are_apart(folder: Path, html: str, tmp_path: Path) -> None:
    results = html.partition('<section id="results">')[2].partition("</section>")[0]
    titles = [unescape(text) for text in re.findall(r'<tr class="title">.*?<span>(.*?)</span>', results)]
    assert [sum(part in title for title in titles) for part in ("", "data.limit = 60", "straggler.k = 3")] == [3, 1, 1]
    for seed in (0, 1):
        shutil.copytree(folder / f"fedavg-{seed}", tmp_path / "here" / f"fedavg-{seed}")
        path = shutil.copytree(folder / f"fedavg-{seed}", tmp_path / "there" / f"fedavg-{seed}")
        name = summary(path)["partition"]
        for file in (path / "summary.json", path / "partition.json"):
            file.write_text(file.read_text().replace(name, name[::-1]))
    groups = grouped(gather([tmp_path], quiet)[0], quiet)
    assert [len(group.cells[0].runs) for group in groups] == [2, 2]
    titles = [group.title.rpartition(", ")[2] for group in groups]
    assert titles == [f"partitions of {tmp_path / name}" for name in ("here", "there")]
    split = small_runs(tmp_path / "split", {f"{seed}": {"data.split": "random", "seed": seed} for seed in (0, 1)})
    assert [len(group.cells[0].runs) for group in grouped(gather([split], quiet)[0], quiet)] == [2]


def test_an_interval_ends_at_a_metrics_limits_and_a_missed_target_has_no_interval() -> None:
    def text(column: Column, *numbers: float | None) -> str:
        runs = pd.DataFrame({column.name: numbers, "rounds": [20] * len(numbers)}, dtype=float)
        return tables.over_seeds(runs, column, with_interval=True)[0]

    rounds = Column("rounds_to_target", "", digits=1)
    accuracy, loss = Column("last_accuracy", "", 100, 1), Column("test/loss", "")
    assert text(rounds, 10, 12) == "11.0 (0.0 to 23.7)"
    assert text(rounds, 10, 12, None) == ">14 (missed by 1 of 3)"
    assert text(rounds, 10, 11, None, None) == ">15.2 (missed by 2 of 4)"
    assert text(rounds, None) == ">20"
    assert text(accuracy, 0.9, 1.0) == "95.0 (31.5 to 100.0)"
    assert text(loss, 1, 3) == "2 (0 to 14.7)"
    assert text(loss, -1, 1) == "0 (-12.7 to 12.7)"
    assert [text(accuracy, *numbers) for numbers in ((), (0.9,), (0.5, 0.5))] == ["-", "90.0", "50.0"]
    numbers = {12345.0: "12300", 1e-4: "0.0001", 9.9e-5: "9.90e-5", 999999.0: "1000000", 1e6: "1.00e6"}
    assert {value: intervals.number(value, None) for value in numbers} == numbers


def test_texts_of_others_are_no_markup(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "x<b onclick=alert(3)>&y" / "run"
    shutil.copytree(folder / "fedavg-0", run)
    old = summary(run)
    privacy = {**old["privacy"], "in_words": [HOSTILE, "\u202eturned\x1b[31m"]}
    change(run / "summary.json", setting=HOSTILE, config={**old["config"], "sharing.setting": HOSTILE}, privacy=privacy)
    change(run / "environment.json", machine=HOSTILE)
    html = page.page([run.parent, folder], HOSTILE, quiet)
    assert [text for text in ("<img src=x", "<b onclick", "alert(2)</script>", "\x1b", "\u202e") if text in html] == []
    assert html.count("<script") == html.count("</script>") == 3
    assert HOSTILE in unescape(html)
    policy = unescape(re.findall(r'Content-Security-Policy" content="([^"]+)"', html)[0])
    assert [part for part in ("default-src 'none'", "connect-src 'none'") if part not in policy] == []
    assert len(re.findall(r"'sha256-[\w+/=]+'", policy)) == 2  # only known scripts run, and no address is loaded
    body = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert not re.findall(r"(?:src|href)=\"(?!#|data:image/png)", body)


def test_damaged_and_unfinished_runs(folder: Path, tmp_path: Path) -> None:
    odd, bad = copies(folder / "fedavg-0", tmp_path, "odd", "bad")
    (unfinished,) = copies(folder / "fedavg-1", tmp_path, "unfinished")
    change(odd / "summary.json", privacy={**summary(odd)["privacy"], "in_words": 5}, zeta_sq="many")
    change(bad / "summary.json", p="x")
    (unfinished / "summary.json").unlink()
    (unfinished / "rounds.jsonl").write_text((unfinished / "rounds.jsonl").read_text()[:-30])
    messages: list[str] = []
    html = report(tmp_path, out=tmp_path / "report.html", say=messages.append).read_text(encoding="utf-8")
    (text,) = messages
    assert str(bad) in text
    assert "many" not in rows(html)["odd"]
    assert repr(summary(odd)["last_accuracy"]) in rows(html)["odd"]
    assert "<td>unfinished</td>" in rows(html)["unfinished"]


def test_a_place_that_is_no_reports_and_a_folder_without_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "taken.html").write_text("<p>mine</p>", encoding="utf-8")
    for name, part in (("report.txt", "HTML file"), ("taken.html", "no report"), ("nowhere/report.html", "no folder")):
        with pytest.raises(UserError, match=part):
            report(tmp_path / "no such folder", out=tmp_path / name)
    assert (tmp_path / "taken.html").read_text(encoding="utf-8") == "<p>mine</p>"
    (out := tmp_path / "report.html").write_text(page.MARK, encoding="utf-8")
    with pytest.raises(UserError, match="not a folder"):
        report(tmp_path / "none", out=out)
    assert out.read_text(encoding="utf-8") == page.MARK  # an earlier report stays


def test_a_valid_pool_picture_is_shown_in_the_report_and_an_invalid_file_is_not(folder: Path, tmp_path: Path) -> None:
    (path,) = copies(folder / "fedavg-0", tmp_path, "run")
    setting = "shuffled_synthetic"
    change(path / "summary.json", setting=setting, config={**summary(path)["config"], "sharing.setting": setting})
    media = path / "wandb" / "offline-run-1" / "files" / "media" / "images" / "media"
    media.mkdir(parents=True)
    file = media / "pool_2_ab.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"no picture" * 9)
    assert "data:image/png" not in page.page([path], None, quiet)
    for width, n_images in ((40, 1), (5000, 0)):
        Image.new("L", (width, 30), 77).save(file)
        assert page.page([path], None, quiet).count('<img src="data:image/png;base64,') == n_images


def test_a_command_keeps_a_users_file(folder: Path, tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    out = tmp_path / "report.html"
    assert sweeps("report").report([str(folder), "--out", str(out), "--title", "Mine & yours"]) == 0
    assert "<title>Mine &amp; yours</title>" in out.read_text(encoding="utf-8")
    messages: list[str] = []
    display: Any = ModuleType("display")
    display.say = messages.append
    out.write_text("a file of the user", encoding="utf-8")
    options = sweeps("table1").arguments(["--out", str(tmp_path)])
    assert main.conclude(Outcome({}, 0, {"run": "it failed"}), options, "table1", display) == 1
    assert "was not written" in messages[0]
    assert not [text for text in messages if "table1.md" in text]  # no run was finished, so there is no such file
    assert out.read_text(encoding="utf-8") == "a file of the user"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start a server that watches an empty folder."""
    instance = Server(Watched([tmp_path]))
    thread = Thread(target=instance.serve_forever, args=(0.05,))
    thread.start()
    yield instance
    instance.shutdown()
    instance.server_close()
    thread.join()


def ask(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    """Status, content and headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.status, answer.read().decode(), dict(answer.headers)
    connection.close()
    return content


HOSTS = ("evil.example:{port}", "127.0.0.1:1", "127.0.0.1:{port}.evil.example")
PATHS = ("/", "/{short}/", "/{token}x/", "/state", "/{token}/run/summary.json", "/{token}/../../etc/passwd")


def test_only_a_get_with_the_token_and_this_host_is_answered(server: Server) -> None:
    token, port = server.token, server.server_port
    for path in PATHS:
        assert ask(server, path.format(token=token, short=token[:-1]))[:2] == (404, ""), path
    for host in HOSTS:
        assert ask(server, f"/{token}/", host=host.format(port=port))[:2] == (403, ""), host
    assert ask(server, f"/{token}/", "POST")[:2] == (501, "")
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(b"\x00\xff\n\n\r\n\r\n")  # bytes that are no request end nothing
    assert ask(server, f"/{token}/")[0] == 200


def test_a_page_follows_its_folder(server: Server, folder: Path, tmp_path: Path) -> None:
    finished = folder / "fedavg-0"
    assert len(server.token) >= 32
    assert server.socket.getsockname()[0] == "127.0.0.1"
    page, state = f"/{server.token}/", f"/{server.token}/state"
    status, html, headers = ask(server, page)
    assert (status, headers["Cache-Control"], headers["Referrer-Policy"]) == (200, "no-store", "no-referrer")
    assert "holds no run" in html
    before = ask(server, state)[1]
    shutil.copytree(finished, tmp_path / "a", ignore=shutil.ignore_patterns("summary.json"))
    now = ask(server, state)[1]
    assert now != before
    html = ask(server, page)[1]
    assert f'data-state="{now}"' in html
    assert "<td>unfinished</td>" in html
    assert "connect-src 'self'" in html
    shutil.copy(finished / "summary.json", tmp_path / "a")
    assert "<td>unfinished</td>" not in ask(server, page)[1]


def test_the_command_prints_its_address_and_ends_on_a_signal(folder: Path) -> None:
    command = [sys.executable, "-c", "from fedcommons.cli import main; main.main()", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/\n", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "Traceback" not in errors
