"""Processor time of whole commands, as ratios to ``import pytorch_lightning`` alone, interleaved in one run.

python benchmarks/start.py [--data-dir DIR] [--repeats 5] [--csv FILE]

The times are those of a command's process and of the processes for which it waits. ``first round``: the preset
``smoke`` until the end of round 1. ``LR_MNIST``: 100 rounds, see lr_mnist.py. Goals: a first round of at most 1.15, and
LR_MNIST of at most 1.4.
"""

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

BASE, MARK = "import pytorch_lightning alone", "processor seconds:"


class FirstRound:
    """A tracker that prints the processor seconds of this process at the end of round 1."""

    def log(self, round: int, metrics: Mapping[str, object]) -> None:
        if round == 1:
            print(MARK, sum(os.times()[:2]), flush=True)

    def finish(self, summary: Mapping[str, object] | None) -> None:
        pass


def commands() -> dict[str, list[str]]:
    """Return name -> words of each command, without the options of its folder."""
    from lr_mnist import SETTINGS

    run = str(Path(__file__).resolve().parent.parent / "sweeps" / "run.py")
    first = [run, "--preset", "smoke", "--tracking.tracker", f"{Path(__file__).resolve()}:FirstRound"]
    whole = [run, *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value)))]
    whole += ["--data.limit", "null"]
    return {
        BASE: ["-c", "import pytorch_lightning"],
        "--help": [run, "--help"],
        "refusal of a field": [run, "--federation.executor", "ray_actors", "--federation.actors", "100"],
        "first round": first,
        "first round, --wandb off": [*first, "--wandb", "off"],
        "LR_MNIST": whole,
        "LR_MNIST, --wandb off": [*whole, "--wandb", "off"],
    }


def seconds(words: list[str], folder: Path) -> float:
    """Run Python with ``words`` in ``folder`` and return the processor seconds that it needed, or that it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode not in (0, 2):
        raise SystemExit(f"{words}: {done.stderr.strip()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return float(printed[0]) if printed else sum(after[:2]) - sum(before[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="folder of MNIST; default: FEDCOMMONS_DATA")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file too")
    options = parser.parse_args()
    if options.data_dir:
        os.environ["FEDCOMMONS_DATA"] = str(Path(options.data_dir).absolute())
    from round_time import machine

    print(machine())
    todo = commands()
    took: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(options.repeats):
        for name, words in todo.items():
            with TemporaryDirectory() as folder:
                took[name].append(seconds(words, Path(folder)))
            print(f"{name}: {took[name][-1]:.2f} s", file=sys.stderr)
    rows = [["command", "processor seconds", "ratio to the import"]]
    for name, values in took.items():
        ratio = statistics.median(value / base for value, base in zip(values, took[BASE], strict=True))
        rows.append([name, f"{statistics.median(values):.3g}", f"{ratio:.2f}"])
    print("\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * 3, *rows[1:]]))
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
