"""Makes result pages' numbers anew by the commands of the pages, and compares them with those that are committed.

make nightly PART=pages                                          # the cheapest pages, as many as an hour holds
make nightly PART=pages ARGS="--minutes 600"                     # more of them
make nightly PART=pages ARGS="--pages quadratics,figure3_small_digits"

``pages.yaml`` names for each page its command, its minutes on two idle cores, and what is compared: a committed CSV,
the file that the command writes, the columns that tell its rows apart, and how far each other column may be off, in
any row. On one kind of machine and the same versions all differences are 0; elsewhere training rounds otherwise. What
came of it stands in ``regenerated.csv``; the exit code is 1 if a page differs. ``docs/_ext/results.py`` makes tables.
"""

import argparse
import datetime
import os
import platform
import shlex
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


def pages() -> dict[str, dict[str, Any]]:
    """Return what ``pages.yaml`` says of each page that has something to compare."""
    facts = yaml.safe_load((HERE / "pages.yaml").read_text(encoding="utf-8"))
    return {page: entry for page, entry in facts.items() if "compare" in entry}


def within(budget: float, minutes: Mapping[str, float]) -> list[str]:
    """The cheapest pages, as many as ``budget`` minutes hold together."""
    chosen, spent = [], 0.0
    for page in sorted(minutes, key=lambda name: (minutes[name], name)):
        if (spent := spent + minutes[page]) <= budget:
            chosen.append(page)
    return chosen


def differences(
    committed: pd.DataFrame, made: pd.DataFrame, rows: Sequence[str], tolerance: Mapping[str, float]
) -> list[str]:
    """A sentence for each column that is further off than its tolerance, or one if the made frame lacks committed rows.

    rows: columns that tell the rows apart. A number on one side only is further off than any tolerance.
    """
    one, other = (frame.set_index(list(rows)).sort_index() for frame in (committed, made))
    other = other.loc[other.index.isin(one.index), :]  # a command may have further rows since the page was written
    if not one.index.equals(other.index):
        return [f"other rows: {len(one)} committed, {len(other)} made"]
    found = []
    for column, most in tolerance.items():
        a, b = one[column], other[column]
        off = (a - b).abs().where(a.notna() | b.notna(), 0.0).fillna(float("inf")).to_numpy()
        if off[worst := int(off.argmax())] > most:
            where = one.reset_index()[list(rows)].iloc[worst].tolist()
            found.append(f"{column} is {off[worst]:.4g} off at {', '.join(map(str, where))} (allowed: {most:g})")
    return found


def regenerate(page: str, facts: Mapping[str, Any], data: str, out: Path) -> list[str]:
    """Run a page's command; what differs, nothing if all agrees."""
    script, *words = shlex.split(facts["command"].replace("DIR", data))
    says = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    )
    again = ["--resume"] if "--resume" in says.stdout else []
    done = subprocess.run([sys.executable, script, *words, *again, "--out", str(out)], cwd=ROOT, check=False)
    if done.returncode:
        return [f"the command ended with exit code {done.returncode}"]
    found = []
    for name, how in facts["compare"].items():
        committed, made = pd.read_csv(HERE / name), pd.read_csv(out / how["file"])
        found += [f"{name}: {what}" for what in differences(committed, made, how["rows"], how["tolerance"])]
    return found


def record(page: str, minutes: float, found: Sequence[str]) -> None:
    """Put the page's row into ``regenerated.csv``, in place of an earlier one."""
    import torch

    row = {
        "page": page, "date": datetime.date.today().isoformat(), "minutes": f"{minutes:.1f}",
        "torch": torch.__version__, "machine": platform.machine(), "outcome": "; ".join(found) or "agrees",
    }  # fmt: skip
    old = pd.read_csv(RECORD, dtype=str) if RECORD.exists() else pd.DataFrame(columns=list(row))
    whole = pd.concat([old.loc[old["page"] != page], pd.DataFrame([row])]).sort_values("page")
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
    minutes = {page: float(facts["minutes"]) for page, facts in there.items()}
    chosen = options.pages.split(",") if options.pages else within(options.minutes, minutes)
    if lacking := [page for page in chosen if page not in there]:
        parser.error(f"--pages: there is no page {lacking[0]!r}; there are {', '.join(there)}.")
    data = os.environ.get("FEDCOMMONS_DATA", "")
    if lacking := [page for page in chosen if "DIR" in there[page]["command"].split() and not data]:
        parser.error(f"{lacking[0]} needs data that were downloaded: name their folder in FEDCOMMONS_DATA.")
    bad = 0
    for page in chosen:
        print(f"{page}: {minutes[page]:g} min: python {there[page]['command']}", flush=True)
        if options.dry_run:
            continue
        started = time.perf_counter()
        found = regenerate(page, there[page], data, options.out / page)
        record(page, (time.perf_counter() - started) / 60, found)
        print(f"{page}: {'; '.join(found) or 'agrees'}", flush=True)
        bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
