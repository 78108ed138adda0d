"""Accuracy of --dry-run: predicted and true processor seconds of thirteen runs, in one process.

python benchmarks/dry_run.py [NAME ...]

Processor time, unlike wall-clock time, depends little on other programs. Each run is predicted directly before it
runs. Goal: a factor, the larger of predicted / true and true / predicted, of at most 1.2.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.generators.image_cache import missing
from fedcommons.runs import build, experiment
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import cost, dry_run, small_rounds

RUNS: dict[str, dict[str, Any]] = {
    "FedAvg": {"federation.rounds": 20},
    "SCAFFOLD, sizes differ": {"algorithm": "scaffold", "partition.name": "dirichlet_niid", "partition.alpha": 0.1},
    "50 clients, participation 0.2": {"partition.n_clients": 50, "federation.participation": 0.2,
                                      "partition.alpha": 1.0},
    "stragglers with partial work": {"algorithm": "fedprox", "straggler.rule": "slow", "straggler.partial": "take"},
    "clients and smoothness measured": {"algorithm": "ditto", "evaluate.clients": True, "measure.every": 5,
                                        "measure.smoothness": True, "evaluate.every": 5},
    "DP-SGD": {"dp.local": True, "federation.rounds": 3},
    "batched": {"client.batched": True, "federation.blocks": 2},
    "MOON": {"algorithm": "moon"},
    "FedGEN": {"algorithm": "fedgen"},
    "FedDM": {"algorithm": "feddm", "federation.rounds": 5},
    "DENSE": {"algorithm": "dense"},
    "FedDPMS": {"algorithm": "feddpms", "model.name": "vae"},
    "synthetic pool": {"sharing.setting": "shuffled_synthetic", "generator.epochs": 5, "generator.sampling_steps": 20},
}  # fmt: skip
"""Name of a run -> its fields; the other fields are those of the preset ``small`` and of ``BASE``."""

BASE = {"federation.rounds": 10, "client.epochs": 3, "measure.every": 0, "tracking.wandb": "off"}


def predicted(config: Experiment) -> float:
    """Return the seconds that a dry run predicts, without the start of a process."""
    prepared, bill = build.build(config), dry_run.Bill()
    dry_run.add_trial(prepared, bill)
    for job in missing(Store(Path(config.artifacts)), prepared.requests):
        dry_run.add_generator(job, bill)
    return sum(map(sum, bill.phases.values()))


def main() -> None:
    for module in (cost, small_rounds):
        module.time = SimpleNamespace(perf_counter=time.process_time)  # pyright: ignore[reportAttributeAccessIssue]
    cost.overhead("off")
    print("| run | predicted, s | true, s | factor | time of the prediction, s |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or RUNS:
        with TemporaryDirectory() as folder:
            config = presets.experiment("small", "digits", {**BASE, **RUNS[name], "artifacts": f"{folder}/artifacts"})
            started = time.process_time()
            seconds = predicted(config)
            begun = time.process_time()
            experiment.run(config, Path(folder) / "run", say=lambda _: None)
            true = time.process_time() - begun
        factor = max(seconds / true, true / seconds)
        print(f"| {name} | {seconds:.1f} | {true:.1f} | {factor:.2f} | {begun - started:.1f} |", flush=True)


if __name__ == "__main__":
    main()
