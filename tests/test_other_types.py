"""Examples that are no images, floats and tokens, through sharing: their bytes, generators that draw them, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.accounting.communication import images_nbytes
from fedcommons.config import presets
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError
from fedcommons.runs.experiment import run
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.raw_copies import RawCopies
from fedcommons.sharing.shuffled_real import ShuffledReal
from fedcommons.sharing.stage import share

PARTS = """
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from fedcommons.generators.generator import TrainedGenerator
from fedcommons.seeds import generator, numpy_generator


def table():
    draws = numpy_generator("a table of floats")
    x, y = draws.normal(size=(240, 30)).astype("float32"), draws.integers(0, 3, 240)
    x[:, 0] += y - 1
    return (x[:200], y[:200]), (x[200:], y[200:])


def sentences():
    draws = numpy_generator("sentences of tokens")
    x, y = draws.integers(0, 50, (240, 8)), draws.integers(0, 3, 240)
    return (x[:200], y[:200]), (x[200:], y[200:])


class Last(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.last = nn.Linear(shape[0], n_classes)

    def forward(self, x):
        return self.last(x.float())


@dataclass(frozen=True)
class Repeats:
    \"\"\"Draws the mean of a class, or its first example; ``as_images`` is wrong on purpose.\"\"\"

    epochs: int = 1
    as_images: bool = False
    sampling: ClassVar[tuple[str, ...]] = ("as_images",)

    def fit(self, examples, n_classes, seed, epochs, *, flip=False):
        of = [examples.x[examples.y == c] for c in range(n_classes)]
        x = examples.x
        means = torch.stack([(p.mean(0) if x.is_floating_point() else p[0]) if len(p) else x[0] for p in of])
        return {epoch: TrainedGenerator({"means": means}) for epoch in epochs}

    def sample(self, weights, shape, n_classes, labels, seed):
        drawn = weights["means"][labels]
        return drawn.to(torch.uint8) if self.as_images else drawn
"""


@pytest.fixture
def lab(tmp_path: Path) -> str:
    (tmp_path / "lab.py").write_text(PARTS)
    return str(tmp_path / "lab.py")


def experiment(lab: str, data: str, **values: Any):
    fields = {
        "data.name": f"{lab}:{data}", "data.limit": None, "model.name": f"{lab}:Last", "partition.name": "iid",
        "partition.n_clients": 4, "federation.rounds": 1, "tracking.wandb": "off",
        "artifacts": str(Path(lab).parent / "store"), **values,
    }  # fmt: skip
    return presets.experiment("smoke", values=fields)


@pytest.mark.parametrize(("dtype", "itemsize"), [("uint8", 1), ("float32", 4), ("int64", 8), ("float64", 8)])
@pytest.mark.parametrize("stage", [ShuffledReal(0.5), RawCopies(0.5, d=2)], ids=str)
def test_bytes_of_shared_examples_are_those_of_their_type(dtype: str, itemsize: int, stage: Any) -> None:
    store = Examples(torch.zeros(80, 30, dtype=getattr(torch, dtype)), torch.arange(80) % 2)
    start = Dealt(Clients(store, list(np.arange(80).reshape(4, 20))), 2, False, 0)
    shared = share(stage, start)
    moved = 40 if isinstance(stage, ShuffledReal) else int(shared.traffic.once / (30 * itemsize + 1) / 2)
    assert start.itemsize == itemsize
    assert moved
    assert shared.traffic.once == 2 * images_nbytes(moved, (30,), itemsize) == 2 * moved * (30 * itemsize + 1)
    sizes = {n: replace(start, n_classes=n).label_nbytes for n in (1, 2, 256, 257, 65_536, 65_537)}
    assert list(sizes.values()) == [1, 1, 1, 2, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize(("data", "itemsize", "shape"), [("table", 4, 30), ("sentences", 8, 8)])
def test_a_generator_may_draw_examples_of_any_type(
    lab: str, data: str, itemsize: int, shape: int, tmp_path: Path
) -> None:
    values = {"sharing.setting": "shuffled_synthetic", "generator.name": f"{lab}:Repeats"}
    config = experiment(lab, data, **values)
    summary = run(config, tmp_path / "run", say=lambda _: None)
    drawn = round(summary["p"] / (1 - summary["p"]) * 180)  # a tenth of 200 is held out
    assert drawn > 0
    assert summary["bytes_once"] == 2 * drawn * (shape * itemsize + 1)
    assert run(config, tmp_path / "again", say=lambda _: None) == summary  # from the store


def test_a_generator_that_draws_another_type_is_named(lab: str, tmp_path: Path) -> None:
    values = {"sharing.setting": "shuffled_synthetic", "generator.name": f"{lab}:Repeats", "generator.as_images": True}
    with pytest.raises(ClientError, match=r"Repeats drew torch.uint8 .* torch.float32 \(30,\)"):
        run(experiment(lab, "table", **values), tmp_path / "run", say=lambda _: None)
