"""Experiments with the networks and data of the papers, for a machine with one GPU, in pieces of some minutes.

python benchmarks/gpu_jobs.py table1 --data-dir DIR               # a second call continues; the table is printed last
python benchmarks/gpu_jobs.py table1 --data-dir DIR --rehearse    # tiny numbers, to try the job on a CPU
python benchmarks/gpu_jobs.py table1 --data-dir DIR -- --seeds 1  # further options of the job's sweeps

A job makes the runs of sweeps (table1.py and others) one after another in this process, without Ray. A finished job
gets a row in docs/results/gpu_jobs.csv: job, date, commit, GPU, seconds and numbers. Exit code 3: the time was over.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fedcommons.cli.display import create_display
from fedcommons.errors import UserError
from fedcommons.runs import experiment
from fedcommons.tune import grid
from fedcommons.tune.gpu_share import with_share
from fedcommons.tune.study import Study

SWEEPS = Path(__file__).resolve().parents[1] / "sweeps"
_CELL = (
    "table1 --dataset cifar10 --algorithms fedavg --alphas 0.01 --target 0.44 --federations 10:1 --lrs 0.05 "
    "--without-references --client.graphs true"
)
_POOL = (
    "--federation.rounds 15 --generator.steps 1500 --generator.prediction v_prediction --generator.sampler ddim "
    "--generator.sampling_steps 50 --generator.precision bf16"
)
_FEDDM = "feddm --dataset mnist --alphas 0.01 --ipcs= --radii= --sigmas= --image-rates= --rates="
JOBS = {
    "table1": (
        f"{_CELL} --settings shuffled_synthetic {_POOL}",
        f"{_CELL} --settings server_synthetic {_POOL}".replace("fedavg", "one_shot"),
        f"{_CELL} --settings real --federation.rounds 60",
    ),
    "feddm": (f"{_FEDDM} --algorithms feddm --federation.rounds 15", f"{_FEDDM} --algorithms fedavg"),
    "private": ("private_fedssyn --dataset cifar10 --epsilons 10 --sigmas= --algorithms fedavg",),
    "feddpms": ("feddpms --dataset fmnist --sigmas= --quotas=",),
}
"""Name of a job -> its sweeps, each as the script's name and its options."""


def rehearsed(words: Sequence[str]) -> list[str]:
    """Return the options with tiny numbers: preset smoke, 2 rounds, 300 training examples, no CUDA graphs."""
    lost = ("--federation.rounds", "--generator.", "--client.graphs")
    pairs = [w for i, w in enumerate(words) if not w.startswith(lost) and not (i and words[i - 1].startswith(lost))]
    return [*pairs, "--preset", "smoke", "--federation.rounds", "2", "--data.limit", "300"]


def run(sweep: str, out: Path, more: Sequence[str], tiny: bool) -> None:
    """Run the sweep's unfinished runs in ``out``, and print its table also if a run is interrupted."""
    script, *words = sweep.split()
    study: Study = getattr(import_module(script), script)
    words = rehearsed(words) if tiny else [*words, "--preset", "paper"]
    options = study.arguments(
        [*words, "--seeds", "0", "--federation.executor", "serial", "--artifacts", str(out.parent / "artifacts"), *more]
    )
    entries = study.configurations(options)
    with create_display(options) as display:
        try:
            for cell in grid.once(entry.cell for entry in entries):
                began = time.monotonic()
                experiment.run(cell.config, out / cell.name, resume=True, say=display.say, with_share=with_share)
                display.say(f"{cell.name}: {time.monotonic() - began:.0f} s")
        finally:
            study.report(entries, options, out, display)


def main(argv: Sequence[str]) -> int:
    own, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--data-dir", required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the runs and generators")
    parser.add_argument("--seconds", type=int, default=480, help="time after which the job stops")
    parser.add_argument("--rehearse", action="store_true", help="tiny numbers, for a CPU")
    options = parser.parse_args(own)
    sys.path[0] = str(SWEEPS)  # in place of this folder, which has files of the same names
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(options.seconds)
    try:
        for i, sweep in enumerate(JOBS[options.job]):
            run(sweep, options.out / f"{options.job}-{i}", ["--data-dir", options.data_dir, *more], options.rehearse)
    except KeyboardInterrupt:
        print("Stopped; the same command continues from the last checkpoints.")
        return 3
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
