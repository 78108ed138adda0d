"""Processor time to prepare a sweep: from its options to the configs that Ray Tune's trials get.

python benchmarks/preparation.py [--cells 1000] [--before FOLDER] [--repeats 3]

The sweeps vary alpha, p, the seed and the learning rate on digits. FOLDER: a checkout of another version, whose times
are the base of the ratio; both versions run in turns. Goal: 3 ms per run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
GRID = (10, 5, 4, 5)
"""Numbers of values of alpha, p, the seed and, per 1,000 runs, the learning rate."""


def words(setting: str, cells: int, out: str) -> list[str]:
    """Return the command line of a sweep with the sharing strategy ``setting``."""
    alphas, ps, seeds, rates = GRID[0], GRID[1], GRID[2], max(1, GRID[3] * cells // 1000)
    lists = {"alpha": alphas, "p": ps, "lr": rates}
    spaces = [f"--space={name}={','.join(f'{0.5 * (i + 1) / n:.4g}' for i in range(n))}" for name, n in lists.items()]
    return [
        f"--sharing={setting}",
        *spaces,
        f"--seeds={','.join(map(str, range(seeds)))}",
        f"--out={out}",
        "--wandb=off",
    ]


def prepare(setting: str, cells: int) -> float:
    """Return the milliseconds of processor time per run; libraries are imported before."""
    import tune as script
    from fedcommons.cli.display import Display
    from fedcommons.config import dotted
    from fedcommons.runtime.libraries import import_libraries
    from fedcommons.tune import sweep

    import_libraries(with_wandb=False)
    with TemporaryDirectory() as out, Display(quiet=True) as display:
        started = time.process_time()
        trials = script.cells(script.arguments([*words(setting, cells, f"{out}/out"), f"--artifacts={out}/artifacts"]))[
            0
        ]
        sweep.todo(trials, Path(out) / "out", display)
        for trial in trials:
            json.dumps(dotted.to_dict(sweep.with_absolute_paths(trial.config)))
        return 1000 * (time.process_time() - started) / len(trials)


def measured(folder: Path, setting: str, cells: int) -> float:
    """Return the result of ``prepare`` with the code in ``folder``, in a new process with one thread."""
    path = os.pathsep.join(map(str, (folder / "platform", folder, folder / "sweeps")))
    done = subprocess.run(
        [sys.executable, __file__, "--setting", setting, "--cells", str(cells)], check=True, capture_output=True,
        encoding="utf-8", env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1000, help="number of runs, a multiple of 200")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="checkout of another version")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each version")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting:
        print(prepare(options.setting, options.cells))
        return
    from round_time import machine

    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; {options.cells} runs")
    print("| sharing | ms per run | before | before / now |\n|---|---|---|---|")
    for setting in ("shuffled_real", "shuffled_synthetic"):
        pairs = [
            [measured(folder, setting, options.cells) for folder in (ROOT, options.before) if folder]
            for _ in range(options.repeats)
        ]
        now, *before = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio = f"{statistics.median(pair[1] / pair[0] for pair in pairs):.1f}" if before else ""
        print(f"| {setting} | {now:.2f} | {''.join(f'{each:.2f}' for each in before)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
