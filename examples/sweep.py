"""A sweep in a script: two methods on non-IID and nearly IID clients, two seeds each, in parallel on Ray.

python examples/sweep.py              executes the eight runs; a second call reads their results
"""

import sys
from itertools import product

from fedcommons import experiment, means, sweep

QUICK = {"federation.rounds": 3, "data.limit": 200, "measure.every": 0, "wandb": "off"}
METHODS, ALPHAS, SEEDS = ("fedavg", "scaffold"), (0.1, 10.0), (0, 1)


def main(folder: str) -> None:
    """Run the sweep in this folder and print the mean accuracy over the seeds, per method and alpha."""
    described = [
        experiment("smoke", values={**QUICK, "algorithm": method, "alpha": alpha, "seed": seed})
        for method, alpha, seed in product(METHODS, ALPHAS, SEEDS)
    ]
    frame = sweep(described, folder)
    print(len(frame), "runs, in", folder)
    print(means(frame, ["last_accuracy"]).to_string(index=False))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example_sweep")
