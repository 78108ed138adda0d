"""Other people's run folders, read in all the ways in which a run's folder is read."""

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from faults import cases, damage, places
from faults.cases import Case
from faults.places import RUNS, TINY
from faults.processes import Ended
from faults.runs import Script
from faults.verdicts import Fault, last, shown

import fedcommons as fc

NAMES = (
    "run",
    "run",
    "run",
    "run",
    "run",
    "ru\x1b[31mn",
    "ru\nn",
    "ru\udcffn",
    "r" * 200,
    " ",
    "-run",
    "ru‮n",
    "ru,n",
    "~",
)
"""Of a run's folder."""


def make(seed: int, number: int, scripts: Mapping[str, Script], templates: Path) -> Case:
    """The case of this number."""
    rng = random.Random(f"strangers {seed} {number}")
    kind, way = (
        rng.choice(list(RUNS)),
        rng.choice([w for w in WAYS for _ in range(1 if w == "disclosure" else 9)]),
    )
    name = rng.choice(NAMES) if way in ("compare", "load", "disclosure", "saved", "many") else "run"
    finished, times, again = rng.random() < 0.6, rng.choice((1, 1, 1, 2)), rng.randrange(10**9)
    if way == "saved":
        finished = True

    def furnish(here: Path) -> str:
        run = here / "runs" / name
        (here / "runs").mkdir()
        places.copy(templates / kind, run)
        places.copy(templates / "store", here / "store")
        if not finished:
            (run / "summary.json").unlink()
        places.copy(templates / "plain", here / "runs" / "good")
        for place in (here, run):
            (place / "evil.py").write_text(damage.MODULE)
        damages = random.Random(again)
        said = [damage.damage(run, damages) for _ in range(times)]
        if damages.random() < 0.04:
            _aside(run, damages)
            said.append("all of it")
        return " and ".join(said)

    def judge(here: Path, ended: Ended) -> list[Fault]:
        return WAYS[way][1](here, ended, kind)

    what = f"{way} {kind}{'' if finished else ', unfinished'} in {shown(name)}: "
    return Case(what, WAYS[way][0](scripts, kind, name), furnish, judge)


def _aside(run: Path, rng: random.Random) -> None:
    """Something else in the folder's place."""
    whole = run.with_name("whole")
    shutil.move(run, whole)
    way = rng.choice(("link", "fifo", "file", "loop"))
    if way == "link":
        run.symlink_to(whole)
    elif way == "fifo":
        os.mkfifo(run)
    elif way == "file":
        run.write_text("x", encoding="utf-8")
    else:
        run.symlink_to(run.name)


Made = Callable[[Mapping[str, Script], str, str], Callable[[], object]]
Judge = Callable[[Path, Ended, str], list[Fault]]


def _resume(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    fields = {**TINY, **RUNS[kind], "out": f"runs/{name}"}
    return cases.line(scripts["run"], *(t for n, v in fields.items() for t in (f"--{n}", v)), "--resume")


def _configured(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["run"], "--config", f"runs/{name}/config.yaml", "--out", f"runs/{name}", "--resume")


def _anew(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["run"], "--config", f"runs/{name}/config.yaml", "--out", "runs/anew")


def _replay(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["run"], "--replay", f"runs/{name}", "--round", "2", "--client", "1")


def _compare(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["compare"], f"runs/{name}", "runs/good", "--x", "client.lr", "--out", "out")


def _many(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["compare"], "runs", "--x", "client.lr", "--out", "out")


def _saved(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["communication_saved"], "--from", "runs", "--out", "out")


def _disclosure(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    return cases.line(scripts["disclosure"], "--also", f"runs/{name}", "--preset", "smoke", "--dry-run", "--out", "out")


def _load(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    def read() -> str:
        runs, rounds, clients = fc.load_runs("runs"), fc.load_rounds("runs"), fc.load_clients("runs")
        for metric in ("last_accuracy", "rounds_to_target", "MB"):
            fc.means(runs, metric)
        return f"{len(runs)} {len(rounds)} {len(clients)} {runs.to_csv()!a} {rounds.to_csv()!a}"

    return cases.api(read)


def _result(scripts: Mapping[str, Script], kind: str, name: str) -> Callable[[], object]:
    def read() -> str:
        result = fc.run(experiment(kind), f"runs/{name}")
        return f"{len(result.rounds)} rounds, {type(result.model).__name__}"

    return cases.api(read)


def experiment(kind: str) -> fc.Experiment:
    """That of a run of ``RUNS``."""
    fields = {n: v for n, v in {**TINY, **RUNS[kind]}.items() if n not in ("preset", "out")}
    return fc.experiment("smoke", values={n: _value(v) for n, v in fields.items()})


def _value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _whole(here: Path, ended: Ended, kind: str) -> list[Fault]:
    return cases.whole(here, ended, "runs/run")


def _new(here: Path, ended: Ended, kind: str) -> list[Fault]:
    return cases.whole(here, ended, "runs/anew")


def _answered(here: Path, ended: Ended, kind: str) -> list[Fault]:
    whole = "norm of" in ended.out and "reply: accepted" in ended.out
    return [] if whole else [Fault("silent", "a replay without an answer", last(ended.out))]


def _compared(here: Path, ended: Ended, kind: str) -> list[Fault]:
    return [] if (here / "out/compare.csv").read_text().count("\n") > 1 else [Fault("silent", "nothing in compare.csv")]


def _tabled(here: Path, ended: Ended, kind: str) -> list[Fault]:
    return [] if list((here / "out").glob("*.csv")) else [Fault("silent", "no table", last(ended.out))]


def _printed(here: Path, ended: Ended, kind: str) -> list[Fault]:
    return [] if len(ended.out) > 20 else [Fault("silent", "no answer")]


WAYS: Mapping[str, tuple[Made, Judge]] = {
    "resume": (_resume, _whole), "config": (_configured, _whole), "anew": (_anew, _new), "replay": (_replay, _answered),
    "compare": (_compare, _compared), "many": (_many, _compared), "saved": (_saved, _tabled),
    "disclosure": (_disclosure, _printed), "load": (_load, _printed), "result": (_result, _printed),
}  # fmt: skip
"""How a folder is read, and whether what comes of it is whole."""
