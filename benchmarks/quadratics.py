"""CPU seconds of the full grid of quadratics (31 step sizes x 41 shares p x 800 rounds), against a plain loop.

python benchmarks/quadratics.py [--rounds 50] [--json]

The plain loop makes one step after another in numpy, for one step size and one p (share of swapped samples), like the
released code; its seconds are extrapolated to the grid. The coefficient A_ij of sample j of client i is a d x d matrix,
as in that code, or a number, which favours the loop. Goal: at most 60 s for the grid on two cores, of which it uses
one. CPU seconds are compared, as they depend little on other load of the machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
from round_time import cpu_name

sys.path.append(str(Path(__file__).parent.parent / "sweeps"))

from papers.fedssyn import quadratics as q

SEED, P, ETA = 12988, 0.5, q.STEP_SIZES[6]


def loop(problem: q.Quadratics, rounds: int, gradient: Callable[[np.ndarray, int, int], np.ndarray]) -> float:
    """Return ||x - x*||^2 after ``rounds`` rounds of FedAvg; gradient: function of (x, client i, sample j)."""
    n_clients, n, d = problem.b.shape
    x = np.ones(d)
    for r in range(1, rounds + 1):
        local = np.tile(x, (n_clients, 1))
        for i in range(n_clients):
            for j in q.order(SEED, r, i, n):
                local[i] -= ETA * gradient(local[i], i, j)
        x = local.mean(0)
    return float(np.square(x - q.optimum(problem)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of the loop, of 1000 steps each")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, as the last line")
    options = parser.parse_args()
    print(f"{date.today()}, {cpu_name()}, {os.cpu_count()} cores, numpy {np.__version__}")

    quadratic = q.draw(SEED, 10, 0)
    problem = q.swap(quadratic, P, SEED)
    a, b = problem.a, problem.b
    matrices = a[..., None, None] * np.eye(q.SHAPE[2])
    scale = len(q.STEP_SIZES) * len(q.SHARES) * q.ROUNDS / options.rounds
    results, errors = {}, []
    for name, gradient in (
        ("loop, A a number", lambda x, i, j: a[i, j] * (a[i, j] * x - b[i, j])),
        ("loop, A a matrix", lambda x, i, j: matrices[i, j].T @ (matrices[i, j] @ x - b[i, j])),
    ):
        start = time.process_time()
        errors.append(loop(problem, options.rounds, gradient))
        results[name] = (time.process_time() - start) * scale
    wall, start = time.perf_counter(), time.process_time()
    grid = q.run([q.swap(quadratic, p, SEED) for p in q.SHARES], q.STEP_SIZES, q.ROUNDS, SEED)
    results["grid"] = time.process_time() - start
    print(f"grid: {time.perf_counter() - wall:.1f} s on the clock, with {os.getloadavg()[0]:.1f} processes running")
    assert np.allclose(grid[q.SHARES.index(P)][6, options.rounds], errors, rtol=1e-9)
    for name, seconds in results.items():
        print(f"{name}: {seconds:.4g} processor seconds, {seconds / results['grid']:.4g} times the grid's")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
