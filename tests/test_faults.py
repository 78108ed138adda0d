"""A random fault campaign: whatever is asked for, and whatever happens, there is a result or a sentence, and no loss.

As a script: python tests/test_faults.py [--seed 0] [--only PART] [--tried N] [--index K]
A fault is printed with its number: with the same seed and --only PART --index NUMBER that one is tried again, alone.
It ends with a table, which docs/security.md shows. As root it tries full disks and the network too.
"""

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

if TYPE_CHECKING:
    from faults.table import Tally

TRIED = {
    "lines": 1000, "options": 800, "yaml": 900, "own parts": 1000, "strangers": 900, "data": 400, "threads": 48,
    "network": 4, "kills": 20, "disks": 24, "writers": 16,
}  # fmt: skip
"""Parts of the campaign, and how many of each are tried."""

HEAVY = ("matplotlib.pyplot", "opacus.accountants", "pandas", "sklearn.datasets", "safetensors.torch", "torchvision")
"""Modules that runs import late."""

ALONE = {
    "yaml": "bombs", "own parts": "own", "strangers": "strangers", "data": "sets", "threads": "threads",
    "network": "network",
}  # fmt: skip
"""Parts whose cases have a folder of their own, and the modules that make them."""


@pytest.mark.parametrize("part", TRIED)
def test_nothing_ends_in_a_traceback_in_silence_or_in_a_loss(part: str) -> None:
    done = subprocess.run([sys.executable, __file__, "--only", part], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def lines(part: str, root: Path, seed: int, n: int, index: int | None) -> "Tally":
    """Command lines: random ones, or ones whose options contradict each other."""
    from faults import against, grammar, options, table
    from faults.lines import Lines

    campaign = Lines(root / part, seed, options.scripts(), grammar.make if part == "lines" else against.make)
    tally = table.Tally(part)
    if index is not None:
        tally.add(0, campaign.show(index))
        return tally
    for code, found in campaign.run(range(n)):
        tally.add(code, found)
    table.report(tally, campaign.shortest)
    return tally


def alone(part: str, root: Path, seed: int, n: int, index: int | None) -> "Tally":
    """Cases that have a folder of their own."""
    from faults import cases, options, table

    scripts, cores = options.scripts(), 1 if part in ("threads", "network") else 2
    templates = cases.templates(root / part / "templates", scripts["run"])
    make = import_module(f"faults.{ALONE[part]}").make
    campaign = cases.Campaign(root / part, lambda number: make(seed, number, scripts, templates))
    tally = table.Tally(part)
    if index is not None:
        tally.add(0, campaign.show(index))
        return tally
    for code, found in campaign.run(range(n), cores):
        tally.add(code, found)
        for one in found:
            print(f"{part} {one.number}: {one.line}: {one.fault.kind}: {one.fault.what}", flush=True)
        if tally.tried % 100 == 0:
            print(f"{tally.tried} tried, {len({f.number for f in tally.found})} of them wrong", flush=True)
    table.report(tally, lambda one: one.line)
    return tally


def trials(part: str, root: Path, seed: int, n: int, index: int | None) -> "Tally":
    """Kills, full disks or second writers."""
    from faults import disks, kills, options, table, writers
    from faults.runs import Runs

    scripts = options.scripts()
    runs = Runs(root / part, scripts["run"])
    numbers = range(n) if index is None else range(index, index + 1)
    made = {
        "kills": lambda: kills.trials(runs, seed, numbers),
        "disks": lambda: disks.trials(runs, seed, numbers),
        "writers": lambda: writers.trials(runs, scripts["table1"], seed, numbers),
    }
    tally = table.Tally(part)
    for number, (line, found) in zip(numbers, made[part](), strict=True):
        print(f"{part} {number}: {line}: {', '.join(f.fault.what for f in found) or 'well'}", flush=True)
        tally.add(0, found)
    table.report(tally, lambda one: one.line)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TRIED)
    parser.add_argument("--tried", type=int, help="with --only: so many in place of the default")
    parser.add_argument("--index", type=int, help="with --only: try this one alone, and show all of it")
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    sys.path.append(str(Path(__file__).parent.parent / "sweeps"))  # where papers have what the sweeps import
    import torch
    from faults import table

    import fedcommons

    print(f"of {Path(str(fedcommons.__file__)).parent}")
    for name in HEAVY:  # so that no fork has to
        import_module(name)
    for name in fedcommons.__all__:
        getattr(fedcommons, name)
    torch.set_num_threads(1)  # only the thread that forks lives on in a fork
    gc.collect()
    gc.freeze()  # so that forks share more
    root, began, tallies = Path(tempfile.mkdtemp(prefix="faults-")), time.monotonic(), []
    for part in [given.only] if given.only else TRIED:
        print(f"\n{part}, seed {given.seed}", flush=True)
        how = alone if part in ALONE else lines if part in ("lines", "options") else trials
        tallies.append(how(part, root, given.seed, given.tried or TRIED[part], given.index))
        print(f"{part}: {(time.monotonic() - began) / 60:.1f} minutes since the beginning", flush=True)
    gc.unfreeze()
    if given.index is None:
        shutil.rmtree(root, ignore_errors=True)
        print("", table.printed(tallies, f"python tests/test_faults.py --seed {given.seed}"), sep="\n")
    return int(any(tally.found for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
