"""CPU seconds per repetition of the gradient coding study: batched, and as a plain PyTorch loop with the same draws.

python benchmarks/gradient_coding.py --data-dir DIR [--repetitions 200] [--plain 2] [--json]

The authors' setting with one class per client: clients straggle with probability q = 0.5; a share c = 0.2 of the
examples is copied to d = 3 clients. Each of 50 rounds has the accuracy on 500 images, 15 draws of stragglers for the
second moment, and a step. The plain loop uses ``nn.Linear``, autograd and SGD in float32, with one backward pass per
draw, like the released code. Goal: 9 curves of 1000 repetitions (no copies) in 6 minutes on two cores. CPU seconds of
one torch thread are compared, as they depend little on other load of the machine.
"""

import argparse
import json
import os
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from round_time import cpu_name
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.config.schema import Data
from fedcommons.core.worker import set_up_process
from fedcommons.runs.build import load

sys.path.append(str(Path(__file__).parent.parent / "sweeps"))

from papers.agc.gradient_coding import Draws, Problem, Setting, draw, play, select_examples

GOAL = 6 * 60 * 2 / 9000  # CPU seconds per repetition: 6 minutes of two cores for 9000 repetitions


def loop(problem: Problem, setting: Setting, draws: Draws) -> tuple[list[float], list[float]]:
    """Run one repetition in plain PyTorch; return the accuracy and the second moment before each round."""
    x, test_x = problem.x[:, :-1].float(), problem.test_x[:, :-1].float()
    layer, holds = nn.Linear(x.shape[1], problem.n_classes), torch.from_numpy(draws.holds).float()
    with torch.no_grad():
        layer.weight.copy_(draws.start[:-1].T)
        layer.bias.copy_(draws.start[-1])
    optimizer = torch.optim.SGD(layer.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, setting.decay)
    weights, accuracy, moments = holds / holds.sum(0) / ((1 - setting.q) * len(x)), [], []

    def backward(z: Tensor) -> float:
        optimizer.zero_grad()
        if z.any():
            (F.cross_entropy(layer(x), problem.y, reduction="none") @ (z.float() @ weights)).backward()
        return sum(float(p.grad.square().sum()) for p in layer.parameters() if p.grad is not None)

    for answers, sampled in zip(torch.from_numpy(draws.answers), torch.from_numpy(draws.sampled), strict=True):
        with torch.no_grad():
            accuracy.append(float((layer(test_x).argmax(1) == problem.test_y).float().mean()))
        moments.append(sum(backward(z) for z in sampled) / len(sampled))
        backward(answers)
        if answers.any():
            optimizer.step()
            schedule.step()
    return accuracy, moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with MNIST")
    parser.add_argument("--repetitions", type=int, default=200, help="repetitions of the batched program")
    parser.add_argument("--plain", type=int, default=2, help="repetitions of the loop")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, as the last line")
    options = parser.parse_args()
    set_up_process()
    print(f"{date.today()}, {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}")

    dataset, setting = load(Data("mnist", options.data_dir, validation=0)), Setting("single_class", 0.5, 3, 0.2)
    problem = Problem.build(select_examples(dataset, 30, True, 0), dataset.test[slice(0, 500)], 10, 255.0)
    every = [draw(problem, setting, r, 0) for r in range(options.plain)]
    costs = {}
    start = time.process_time()
    plain = np.array([loop(problem, setting, draws) for draws in every])
    costs["loop"] = (time.process_time() - start) / options.plain
    start, wall = time.process_time(), time.perf_counter()
    played = play(problem, setting, range(options.repetitions), 0)
    costs["batched"] = (time.process_time() - start) / options.repetitions
    print(f"batched: {time.perf_counter() - wall:.1f} s on the clock, with {os.getloadavg()[0]:.1f} processes running")
    some = slice(options.plain)
    assert np.abs(played.accuracy[some] - plain[:, 0])[:, :5].max() < 0.01, "not the same program"
    assert np.allclose(played.second_moment[some, :5], plain[:, 1, :5], rtol=1e-3), "not the same program"
    costs["ratio"], costs["grid_minutes"] = costs["loop"] / costs["batched"], costs["batched"] * 9000 / 2 / 60
    print(f"loop: {costs['loop']:.3g} processor seconds a repetition, batched: {costs['batched']:.3g}, goal {GOAL:.2g}")
    print(
        f"ratio {costs['ratio']:.3g}; 9 curves of 1000 on two idle cores: {costs['grid_minutes']:.2g} minutes, goal 6"
    )
    if options.json:
        print(json.dumps(costs))


if __name__ == "__main__":
    sys.exit(main())
