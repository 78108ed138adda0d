"""Accuracy of --dry-run: predicted and measured seconds of two sweeps.

python benchmarks/predicted_cost.py

The sweeps are table 1 with two algorithms and figure 3 with three sharing strategies, both on digits with few rounds,
generators included. Each sweep is predicted directly before it runs. If other programs use the machine, the ratio
mainly shows how much their load varies. Goal: a ratio of measured to predicted seconds in [1/1.5, 1.5].
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

SWEEPS = Path(__file__).parent.parent / "sweeps"
SHORT = ["--federation.rounds=12", "--alphas=0.1", "--generator.epochs=40", "--measure.every=6"]
COMMANDS = {
    "table1": [*SHORT, "--algorithms=fedavg,scaffold"],
    "figure3": [*SHORT, "--settings=real,local_synthetic,shuffled_synthetic"],
}
UNITS = {"s": 1, "min": 60, "h": 3600}


def play(command: list[str]) -> tuple[str, float]:
    """Run a command; return its output and its wall-clock seconds."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout, time.perf_counter() - started


def main() -> None:
    for name, options in COMMANDS.items():
        with TemporaryDirectory() as folder:
            command = [sys.executable, str(SWEEPS / f"{name}.py"), *options, f"--out={folder}/out"]
            command += [f"--artifacts={folder}/artifacts"]
            said, asking = play([*command, "--dry-run"])
            found = re.search(r"In all about ([\d.e+]+) (\w+) here [^(]*(\(.*?\))", said)
            assert found is not None, said
            predicted = float(found[1]) * UNITS[found[2]]
            load = os.getloadavg()[0]
            said, seconds = play(command)
            parts = next((line for line in said.splitlines() if line.startswith("Time: ")), "")
            print(
                f"{name}: predicted in {asking:.0f} s: {predicted:.0f} s {found[3]}; took {seconds:.0f} s, ratio "
                f"{seconds / predicted:.2f}; load {load:.1f} before, {os.getloadavg()[0]:.1f} after. {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
