"""User-defined data sets that draw numbers are the same in every process; their content has a digest."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedcommons import experiment
from fedcommons import run as whole_run
from fedcommons.config import parts
from fedcommons.config.flat import choose, override
from fedcommons.config.sections import Data
from fedcommons.data.examples import Dataset, Examples
from fedcommons.runs import build
from fedcommons.runs.inputs import load
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.sweep import Trial, todo

TURNED = """
import random

import numpy as np
import torch


class Turned:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        noise = torch.randn(1, 8, 8) + random.random() + np.random.rand()
        return (4 * i + 9 * noise).clamp(0, 255).to(torch.uint8), i % 3


class Drawn:
    def __init__(self, seed, n: int = 50):
        draws = np.random.RandomState(seed)
        x, y = draws.standard_normal((n, 5)), draws.randint(0, 3, n)
        self.train, self.test, self.seed, self.normalised = (x[10:], y[10:]), (x[:10], y[:10]), seed, True


def with_a_default(seed: int = 3, n: int = 50):
    draws = np.random.default_rng(seed)
    return draws.standard_normal((n, 5)) , draws.integers(0, 3, n)
"""
TWO = {"partition.name": "iid", "partition.n_clients": 2, "model.name": "linear"}


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_data.py").write_text(TURNED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _state() -> tuple[object, ...]:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), list(keys), rest, random.getstate()


@pytest.mark.long
def test_a_random_transform_is_drawn_once_by_the_name_of_the_data_set(lab: Path, untimed: None) -> None:
    first = load(Data(name="my_data.py:Turned"))
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  (the one that transforms draw from)
    random.seed(1)
    before = _state()
    assert load(Data(name="my_data.py:Turned")).digest == first.digest
    assert _state() == before
    config = choose({"data.name": "my_data.py:Turned", "measure.every": 0, **TWO})
    configs = [override(config, {"seed": seed}) for seed in (0, 1)]
    assert {build.prepare(config).dataset.digest for config in configs} == {first.digest}
    screen = io.StringIO()
    with Display(Console(file=screen, width=1000)) as display:
        todo([Trial(f"seed={config.seed}", config) for config in configs], lab / "out", display)
    assert screen.getvalue().count("random rows") == 1  # a sweep reports it once


@pytest.mark.long
def test_a_seed_without_a_default_is_passed_and_the_same_in_all_runs_and_one_with_a_default_is_a_constant() -> None:
    assert set(parts.constants("data", "my_data.py:Drawn")) == {"n"}
    configs = [choose({"data.name": "my_data.py:Drawn", "seed": seed, **TWO}) for seed in (0, 1)]
    assert not any("data.seed" in config.flat for config in configs)
    assert len({build.prepare(config).dataset.digest for config in configs}) == 1
    assert choose({"data.name": "my_data.py:with_a_default"}).flat["data.seed"] == 3
    one, other = (load(choose({"data.name": "my_data.py:with_a_default", "data.seed": s}).data) for s in (3, 4))
    assert one.digest != other.digest


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool])
def test_the_hash_is_of_names_shapes_types_and_bytes(dtype: torch.dtype) -> None:
    def dataset(x: torch.Tensor, y: torch.Tensor, validation: int = 2, test: int = 3) -> Dataset:
        each = {"train": slice(5, None), "validation": slice(0, validation), "test": slice(0, test)}
        of_parts: dict[str, Any] = {name: Examples(x[rows], y[rows]) for name, rows in each.items()}
        return Dataset(name="mine", n_classes=3, mean=(0.0,), std=(1.0,), augment=False, **of_parts)

    x = (torch.arange(80).view(10, 2, 2, 2) % 2).to(dtype)
    y = torch.arange(10) % 3
    hashes = [dataset(x, y).digest]
    for part in ("train", "validation", "test"):
        changed = getattr(base := dataset(x, y), part)
        other_x, other_y = changed.x.clone(), changed.y.clone()
        other_x[-1, -1, -1, -1] = 1 - other_x[-1, -1, -1, -1].int()
        other_y[-1] += 1
        for examples in (Examples(other_x, changed.y), Examples(changed.x, other_y)):
            hashes.append(replace(base, **{part: examples}).digest)
    hashes += [other.digest for other in (dataset(x.flatten(2), y), dataset(x, y.int()), dataset(x, y, 2, 2))]
    assert len(set(hashes)) == len(hashes)
    in_another_order = x.transpose(2, 3).contiguous().transpose(2, 3)  # in memory
    assert dataset(in_another_order, y).digest == hashes[0]


COMPUTED = """
import numpy as np

X, Y = np.random.default_rng(0).integers(0, 256, (90, 8, 8)).astype(np.uint8), np.arange(90) % 3


class Images:
    train, test = (X[:60], Y[:60]), (X[60:], Y[60:])


class Rare:
    train, test, mean, std = (X[:60], np.where(np.arange(60) == 7, 3, Y[:60])), (X[60:], Y[60:]), 0.5, 0.3


class Stated(Images):
    mean, std, n_classes = 0.5, 0.3, 3


"""

SCALES, CLASSES = "mean and standard deviation of all clients' images", "number of classes of all clients"

FIELDS = {"model.name": "linear", "dp.local": True, "federation.rounds": 1, "client.epochs": 1, "data.limit": None,
          "measure.every": 0, "wandb": "off", "data.validation": 0.0}  # fmt: skip


@pytest.mark.long
def test_what_all_clients_examples_decide_before_round_1_is_released(lab: Path) -> None:
    """The sum of an image's pixels could be read off the mean; a run that discloses it reports no epsilon."""
    (lab / "mine.py").write_text(COMPUTED)
    rows: list[tuple[str, dict[str, object], list[str]]] = [
        ("Images", {}, [SCALES]), ("Images", {"data.standardise": False}, []),
        ("Stated", {}, []), ("Rare", {}, [CLASSES]),
    ]  # fmt: skip
    for data, more, uncovered in rows:
        config = experiment("smoke", values={**FIELDS, "data.name": f"mine.py:{data}", **more})
        releases = build.assemble(build.prepare(config)).shared.releases
        assert [(event.what, event.covered) for event in releases] == [((what,), False) for what in uncovered] * 4
    for data, leaks in (("Images", True), ("Stated", False)):
        messages: list[str] = []
        config = experiment("smoke", values={**FIELDS, "data.name": f"mine.py:{data}"})
        result = whole_run(config, lab / data, say=messages.append).summary["privacy"]
        assert json.loads((lab / data / "partition.json").read_text())["data"] == load(config.data).digest
        spent = result["epsilon_local_training_if_secret"]
        assert (result["epsilon_of_messages_if_secret"] is None) == (spent["largest"] is None) == leaks
        assert any(SCALES in line for line in messages) == leaks
        assert sum(line.startswith(SCALES) for line in result["uncovered"]) == leaks
