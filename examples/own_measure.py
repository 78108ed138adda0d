"""A user-defined measure: how much a step in a random direction raises the server model's loss on the test set.

The engine writes the results, as ``measure/NAME``, to rounds.jsonl and to the frames of ``load_rounds`` and
``load_runs``.

python examples/own_measure.py        runs two rounds; measures before round 1 and after each round
python sweeps/run.py --measure.measure examples/own_measure.py:Sharpness --measure.every 1 --sharpness.radius 0.5
"""

from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
from torch.nn import functional as F

from fedcommons import RunData, Work, add, experiment, flatten, generator, norm, run, scale

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 1, "wandb": "off"}


@dataclass(frozen=True)
class Sharpness:
    """Mean rise of test loss f by steps of length r:  mean_k f(x + r d_k) - f(x);  x: model, d_k: unit vectors."""

    radius: Annotated[float, "(0, inf)"] = 1.0
    """r, length of a step"""
    directions: Annotated[int, "[1, 1e6]"] = 5
    """number of random directions"""

    def __call__(self, work: Work, data: RunData, round: int, seed: int) -> Mapping[str, float]:
        x, test, losses = work.snapshot(), data.sets["test"], []
        for k in range(self.directions + 1):
            draws = generator(seed, "direction", k)
            d = flatten({n: torch.randn(p.shape, generator=draws).to(p.device) for n, p in work.named.items()})
            work.load(add(x, scale(d, self.radius / norm(d))) if k else x)
            with torch.no_grad():
                losses.append(F.cross_entropy(work.module(test.x), test.y).item())
        return {"sharpness": sum(losses[1:]) / self.directions - losses[0], "worst": max(losses[1:]) - losses[0]}


if __name__ == "__main__":
    chosen = {"measure.measure": f"{__file__}:Sharpness", "measure.radius": 0.5}
    with TemporaryDirectory() as folder:
        result = run(experiment("smoke", values={**QUICK, **chosen}), folder, say=lambda text: None)
        print(result.rounds[["round", "measure/sharpness", "measure/worst"]].round(4).to_string(index=False))
