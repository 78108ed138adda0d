"""Preset ``authors``: the numbers of Fedssyn's released code, cell by cell (github.com/lyn1874/fedssyn at 4ceefff)."""

import pytest

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.errors import UserError
from fedcommons.runs.checks import check
from fedcommons.runs.inputs import load
from fedcommons.sharing.needs import contribution
from papers.fedssyn.authors import authors, settled

POOL = "shuffled_synthetic"


def cell(data: str, algorithm: str, n: int, c: float, alpha: float, setting: str = POOL) -> Experiment:
    values = {"algorithm": algorithm, "partition.n_clients": n, "federation.participation": c, "partition.alpha": alpha,
              "sharing.setting": setting}  # fmt: skip
    return settled("authors", presets.experiment("authors", data, values), ())


SIZES = [
    ("cifar10", 10, 3375, 5000, 450, 10), ("cifar10", 40, 845, 1125, 450, 30), ("cifar10", 100, 385, 500, 499, 30),
    ("cifar100", 40, 845, 1125, 499, 40), ("cifar100", 100, 385, 1000, 499, 40),
]  # fmt: skip
"""Data set, clients, images that a generator sees, synthetic images of a client, generator epochs, local epochs."""


def test_images_and_epochs() -> None:
    for data, n, seen, synthetic, epochs, local_epochs in SIZES:
        config = cell(data, "fedavg", n, {10: 1.0, 40: 0.2, 100: 0.1}[n], 0.1)
        assert config.generator is not None
        assert int(config.generator.rho * (45000 // n)) == seen
        assert contribution(config.sharing.p, 45000, n, 45000 // n) == synthetic
        assert (config.generator.epochs, config.client.epochs) == (epochs, local_epochs)
        assert (config.client.batch_size, config.client.drop_last) == (128, True)
        assert (config.generator.schedule, config.generator.sampling_steps) == ("squaredcos_cap_v2", 250)
        check(config)


RATES = [
    ("cifar10", "fedavg", 10, 1.0, 0.01, "real", 0.1), ("cifar10", "fedavg", 10, 1.0, 0.1, "real", 0.05),
    ("cifar10", "fedavg", 10, 1.0, 0.1, "local_synthetic", 0.05), ("cifar100", "scaffold", 10, 0.4, 0.1, "real", 0.01),
    ("cifar10", "fedpvr", 10, 0.4, 0.1, "real", 0.01), ("cifar10", "fedprox", 100, 0.1, 0.1, "real", 0.05),
    ("cifar10", "feddyn", 10, 1.0, 0.1, "real", 0.01), ("cifar10", "feddyn", 10, 1.0, 0.1, "local_synthetic", 0.1),
    ("cifar10", "fedavg", 10, 1.0, 0.1, POOL, 0.1), ("cifar10", "scaffold", 10, 0.4, 0.1, POOL, 0.05),
    ("cifar10", "scaffold", 10, 1.0, 0.1, POOL, 0.1), ("cifar10", "fedprox", 100, 0.1, 0.01, POOL, 0.05),
    ("cifar10", "fedprox", 100, 0.1, 0.1, POOL, 0.1), ("cifar100", "feddyn", 40, 0.2, 0.1, POOL, 0.05),
    ("cifar100", "feddyn", 100, 0.1, 0.1, POOL, 0.1),
]  # fmt: skip


def test_learning_rates_and_the_weight_of_feddyn() -> None:
    for data, algorithm, n, c, alpha, setting, rate in RATES:
        assert cell(data, algorithm, n, c, alpha, setting).client.lr == rate
    assert cell("cifar10", "feddyn", 10, 1.0, 0.1, "real").flat["feddyn.alpha"] == 0.001
    assert cell("cifar10", "feddyn", 10, 1.0, 0.1).flat["feddyn.alpha"] == 0.01
    assert not cell("cifar100", "feddyn", 10, 1.0, 0.1, "real").flat["feddyn.squared"]
    assert presets.experiment("paper", "cifar10", {"algorithm": "feddyn"}).flat["feddyn.squared"]


def test_a_cell_outside_table_1_is_refused() -> None:
    for name, value in (("algorithm", "moon"), ("partition.alpha", 0.5), ("partition.n_clients", 20)):
        with pytest.raises(UserError, match="Table 1 only"):
            authors(override(cell("cifar10", "fedavg", 10, 1.0, 0.1), {name: value}))


def test_the_last_images_are_held_out() -> None:
    """On digits: the last tenth of the training images in their order."""
    data = presets.experiment("small", "digits").data
    at_random, last = load(data), load(override(Experiment(data=data), {"data.validation_from": "last"}).data)
    everything = load(override(Experiment(data=data), {"data.validation": 0.0}).data).train
    n = len(last.validation)
    assert n == len(at_random.validation) == int(0.1 * len(everything))
    assert bool((last.validation.x == everything.x[-n:]).all())
    assert bool((last.train.x == everything.x[:-n]).all())
    assert not bool((at_random.validation.x == last.validation.x).all())
