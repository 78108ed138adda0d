"""Makes result pages' numbers anew by the commands of the pages, and compares them with those that are committed.

make nightly PART=pages                                          # as many pages as an hour holds
make nightly PART=pages ARGS="--minutes 600"                     # more of them, also those of more than an hour
make nightly PART=pages ARGS="--pages quadratics,figure3_small_digits"

Pages that never ran come first, then those that ran longest ago; of equal ones, the cheapest. ``pages.yaml`` names for
each page, and for further runs of a page, the command, its minutes on two idle cores, and what is compared: a committed
CSV and the file that the command writes. The CSV may have ``rows``, the columns that tell its rows apart, and
``tolerance``, how far other columns may be off, in any row. On one kind of machine and the same versions all
differences are 0; elsewhere training rounds otherwise.

Comparisons of docs/comparisons.csv that use these CSV files alone are computed anew, paired by seed. A comparison is
reported if its seeds or its verdict differ, or if its new mean lies outside its committed 95 % interval. If the
committed interval has no width (one seed, or equal differences), the new mean must have the same sign.

A page runs in a folder of ``--out`` that this script makes and marks with the commit. An interrupted run is continued
at the same commit alone; a folder without the mark is not changed.

The outcomes stand in ``regenerated.csv``; the exit code is 1 if a page differs. ``docs/_ext/results.py`` makes tables.
"""

import argparse
import csv
import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = HERE / "regenerated.csv"
sys.path.insert(0, str(HERE.parent / "_ext"))

import comparisons  # noqa: E402

COLUMNS = ("page", "date", "minutes", "torch", "machine", "outcome")
MARK = "nightly.txt"
"""A file with the commit, in each folder that this script made."""
LEAST_SEEDS = 3
"""What *holds* needs where a seed is expensive; with it a verdict changes wherever one with a larger number does."""


def pages() -> dict[str, dict[str, Any]]:
    """Return what ``pages.yaml`` says of each page that has something to compare; further runs: by their first CSV."""
    facts = yaml.safe_load((HERE / "pages.yaml").read_text(encoding="utf-8"))
    every = {page: entry for page, entry in facts.items() if "compare" in entry}
    further = [run for entry in facts.values() for run in entry.get("runs", []) if "compare" in run]
    return every | {next(iter(run["compare"])).removesuffix(".csv"): run for run in further}


def within(budget: float, minutes: Mapping[str, float], dates: Mapping[str, str]) -> list[str]:
    """Return the pages that ran longest ago, as many as ``budget`` minutes hold; of equal dates the cheapest first.

    A page of more minutes than remain is left out. dates: of the last run, by page; missing or empty: never.
    """
    chosen, spent = [], 0.0
    for page in sorted(minutes, key=lambda name: (dates.get(name, ""), minutes[name], name)):
        if spent + minutes[page] <= budget:
            chosen, spent = [*chosen, page], spent + minutes[page]
    return chosen


def differences(
    committed: pd.DataFrame, generated: pd.DataFrame, rows: Sequence[str], tolerance: Mapping[str, float]
) -> list[str]:
    """A sentence for each column that is further off than its tolerance, or one if ``generated`` lacks committed rows.

    rows: columns that identify a row. A number on one side only is further off than any tolerance.
    """
    expected, other = (frame.set_index(list(rows)).sort_index() for frame in (committed, generated))
    other = other.loc[other.index.isin(expected.index), :]  # a command may have further rows since the page was written
    if not expected.index.equals(other.index):
        return [f"other rows: {len(expected)} committed, {len(other)} generated"]
    faults = []
    for column, most in tolerance.items():
        a, b = expected[column], other[column]
        off = (a - b).abs().where(a.notna() | b.notna(), 0.0).fillna(float("inf")).to_numpy()
        if off[worst := int(off.argmax())] > most:
            where = expected.reset_index()[list(rows)].iloc[worst].tolist()
            faults.append(f"{column} is {off[worst]:.4g} off at {', '.join(map(str, where))} (allowed: {most:g})")
    return faults


def changed(docs: Path, folder: Path) -> list[str]:
    """Return a sentence for each comparison whose new mean differs, as the module's docstring says.

    folder: has CSV files with the names of the committed ones; comparisons of other files are left out.
    """
    result, again = [], dict[str, comparisons.Comparison]()
    for line in comparisons.rows(docs / "comparisons.csv"):
        name = line["name"]
        if all((folder / file).exists() for file in line["csv"].split()):
            old = comparisons.named(docs)[name]
            try:
                new = again[name] = comparisons.compare(line, folder, again)
            except (KeyError, NameError, ValueError) as error:
                result.append(f"{name}: {type(error).__name__}: {error}")
                continue
            is_near = old.low <= new.mean <= old.high if old.low < old.high else sign(old.mean) == sign(new.mean)
            verdicts = {comparisons.verdict(c, LEAST_SEEDS) for c in (old, new)}
            if not is_near or len(verdicts) > 1 or new.seeds != old.seeds:
                result.append(f"{name} is {new:4}, committed: {old:4}")
    return result


def sign(number: float) -> int:
    return (number > 0) - (number < 0)


def regenerate(facts: Mapping[str, Any], data: str, out: Path) -> list[str]:
    """Run a page's command; return what differs, nothing if all agrees. Runs in ``out`` are continued."""
    script, *words = shlex.split(facts["command"].replace("DIR", data))
    says = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    )
    again = ["--resume"] if "--resume" in says.stdout else []
    done = subprocess.run([sys.executable, script, *words, *again, "--out", str(out)], cwd=ROOT, check=False)
    if done.returncode:
        return [f"the command ended with exit code {done.returncode}"]
    faults, renamed = [], out / "committed_names"
    renamed.mkdir(exist_ok=True)
    for name, how in facts["compare"].items():
        frame = pd.read_csv(shutil.copy(out / how["file"], renamed / name))
        if "tolerance" in how:
            off = differences(pd.read_csv(HERE / name), frame, how["rows"], how["tolerance"])
            faults += [f"{name}: {what}" for what in off]
    return faults + changed(HERE.parent, renamed)


def outcome(facts: Mapping[str, Any], data: str, folder: Path) -> list[str]:
    """Run a page in its folder; return what differs, or why the page could not run. Runs that differ are kept."""
    backup = folder.with_name(f"{folder.name}.differs")
    if foreign := [each.name for each in (folder, backup) if each.exists() and not (each / MARK).exists()]:
        return [f"--out has a folder {foreign[0]} that this script did not make"]
    try:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, encoding="utf-8")
        if folder.exists() and (folder / MARK).read_text(encoding="utf-8") != commit:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(commit, encoding="utf-8")
        faults = regenerate(facts, data, folder / "runs")
    except (OSError, KeyError, TypeError, ValueError, subprocess.CalledProcessError) as error:
        faults = [f"{type(error).__name__}: {error}".replace(f"{folder}{os.sep}", "")]
    # A later call must not resume runs that have ended.
    if faults and folder.exists():
        shutil.rmtree(backup, ignore_errors=True)
        folder.rename(backup)
    shutil.rmtree(folder, ignore_errors=True)
    return faults


def last_runs() -> dict[str, dict[str, str]]:
    """Return the row of each page in ``regenerated.csv``; a page without a row never ran."""
    with RECORD.open(encoding="utf-8") as file:
        by_page = {row["page"]: row for row in csv.DictReader(file)}
    return {page: by_page.get(page, {"page": page, "date": "", "outcome": "never"}) for page in sorted(pages())}


def record(page: str, minutes: float, faults: Sequence[str]) -> None:
    """Put the page's row into ``regenerated.csv``, in place of an earlier one."""
    import torch

    row = {
        "page": page, "date": datetime.date.today().isoformat(), "minutes": f"{minutes:.1f}",
        "torch": torch.__version__, "machine": platform.machine(), "outcome": "; ".join(faults) or "agrees",
    }  # fmt: skip
    whole = pd.DataFrame((last_runs() | {page: row}).values(), columns=COLUMNS)
    (new := RECORD.with_suffix(".new")).write_text(whole.to_csv(index=False), encoding="utf-8")
    new.rename(RECORD)


def main(argv: Sequence[str]) -> int:
    there = pages()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="what all pages may take together (default: 60)")
    parser.add_argument("--pages", help="these pages, separated by commas, whatever they take")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "nightly", help="where runs go, a folder a page")
    parser.add_argument("--dry-run", action="store_true", help="name the pages and their commands, and stop")
    options = parser.parse_args(argv)
    data = os.environ.get("FEDCOMMONS_DATA", "")
    without_data = [page for page in there if "DIR" in there[page]["command"].split() and not data]
    minutes = {page: float(facts["minutes"]) for page, facts in there.items()}
    if options.pages:
        chosen = options.pages.split(",")
        if lacking := [page for page in chosen if page not in there]:
            parser.error(f"--pages: there is no page {lacking[0]!r}; there are {', '.join(there)}.")
        if lacking := [page for page in chosen if page in without_data]:
            parser.error(f"{lacking[0]} needs data that were downloaded: name their folder in FEDCOMMONS_DATA.")
    else:
        dates = {page: row["date"] for page, row in last_runs().items()}
        chosen = within(options.minutes, {page: minutes[page] for page in there if page not in without_data}, dates)
        for reason, pages_of in (
            ("FEDCOMMONS_DATA names no folder of data", without_data),
            (f"longer than --minutes {options.minutes:g}", [page for page in there if minutes[page] > options.minutes]),
        ):
            print(f"Left out, {reason}: {', '.join(pages_of) or 'no page'}.", flush=True)
    bad = 0
    for page in chosen:
        print(f"{page}: {minutes[page]:g} min: python {there[page]['command']}", flush=True)
        if options.dry_run:
            continue
        started = time.perf_counter()
        faults = outcome(there[page], data, options.out.resolve() / page)
        record(page, (time.perf_counter() - started) / 60, faults)
        print(f"{page}: {'; '.join(faults) or 'agrees'}", flush=True)
        bad += bool(faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
