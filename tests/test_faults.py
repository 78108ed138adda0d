"""A random fault campaign: whatever is asked for, and whatever happens, there is a result or a sentence, and no loss.

As a script: python tests/test_faults.py [--seed 0] [--lines 1000] [--only lines|kills|disks|writers] [--index K]
A fault is printed with its number: with the same seed and --only PART --index NUMBER that one is tried again, alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

if TYPE_CHECKING:
    from faults.runs import Found

PARTS = ("lines", "kills", "disks", "writers")
KINDS = ("traceback", "silent", "lost", "leftover", "hang", "crash", "sentence")
SHORTENED = 40  # kinds of faults whose lines are tried again without the parts that they may not need


@pytest.mark.parametrize("part", PARTS)
def test_nothing_ends_in_a_traceback_in_silence_or_in_a_loss(part: str) -> None:
    done = subprocess.run([sys.executable, __file__, "--only", part], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def lines(root: Path, seed: int, n: int, index: int | None) -> int:
    """The command lines; how many faults there were."""
    from faults import options
    from faults.lines import Lines

    campaign = Lines(root / "lines", seed, options.scripts())
    if index is not None:
        return campaign.show(index)
    counts, found = campaign.run(range(n))
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    report(found, campaign.shortest)
    return len(found)


def trials(part: str, root: Path, seed: int, index: int | None) -> int:
    """Kills, full disks or second writers; how many faults there were."""
    from faults import disks, kills, options, writers
    from faults.runs import Runs

    scripts = options.scripts()
    runs = Runs(root / part, scripts["run"])
    n = {"kills": kills.N, "disks": disks.N, "writers": writers.N}[part]
    numbers = range(n) if index is None else range(index, index + 1)
    found: list[Found] = []
    made = {
        "kills": lambda: kills.trials(runs, seed, numbers),
        "disks": lambda: disks.trials(runs, seed, numbers),
        "writers": lambda: writers.trials(runs, scripts["table1"], seed, numbers),
    }
    for number, (line, faults) in zip(numbers, made[part](), strict=True):
        print(f"{part} {number}: {line}: {', '.join(f.fault.what for f in faults) or 'well'}", flush=True)
        found += faults
    report(found, lambda one: one.line)
    return len(found)


def report(found: "Sequence[Found]", shortest: "Callable[[Found], str]") -> None:
    """Faults alike together, those of which there are most first."""
    alike = defaultdict(list)
    for one in found:
        alike[one.fault.kind, one.fault.what].append(one)
    print(", ".join(f"{kind}: {len({f.number for f in found if f.fault.kind == kind})}" for kind in KINDS))
    ordered = sorted(alike.items(), key=lambda item: (KINDS.index(item[0][0]), -len(item[1])))
    for i, ((kind, what), several) in enumerate(ordered):
        first = several[0]
        line = shortest(first) if i < SHORTENED and kind != "hang" else first.line
        print(f"\n{len(several)} x {kind}: {what}\n  numbers {', '.join(str(f.number) for f in several[:8])}")
        print(f"  {line}\n  {first.fault.detail}".rstrip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=1000, help="command lines")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--index", type=int, help="with --only: try this one alone, and show all of it")
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    sys.path.append(str(Path(__file__).parent.parent / "sweeps"))  # where papers have what the sweeps import
    import torch

    import fedcommons

    print(f"of {Path(str(fedcommons.__file__)).parent}")
    torch.set_num_threads(1)  # only the thread that forks lives on in a fork
    wrong = 0
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    for part in [given.only] if given.only else PARTS:
        print(f"\n{part}, seed {given.seed}", flush=True)
        if part == "lines":
            wrong += lines(root, given.seed, given.lines, given.index)
        else:
            wrong += trials(part, root, given.seed, given.index)
    if given.index is None:
        shutil.rmtree(root)
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
