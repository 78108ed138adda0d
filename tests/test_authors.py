"""Preset ``authors``: the numbers of Fedssyn's released code (github.com/lyn1874/fedssyn at 4ceefff).

``names.json`` has a hash over the configs of all its cells.
"""

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


@pytest.mark.parametrize(
    ("data", "n", "seen", "synthetic", "epochs", "local_epochs"),
    [
        ("cifar10", 10, 3375, 5000, 450, 10), ("cifar10", 40, 845, 1125, 450, 30), ("cifar10", 100, 385, 500, 499, 30),
        ("cifar100", 40, 845, 1125, 499, 40), ("cifar100", 100, 385, 1000, 499, 40),
    ],
)  # fmt: skip
def test_images_and_epochs(data: str, n: int, seen: int, synthetic: int, epochs: int, local_epochs: int) -> None:
    config = cell(data, "fedavg", n, {10: 1.0, 40: 0.2, 100: 0.1}[n], 0.1)
    n_own = 45000 // n
    assert config.generator is not None
    assert int(config.generator.rho * n_own) == seen
    assert contribution(config.sharing.p, 45000, n, n_own) == synthetic
    assert (config.generator.epochs, config.client.epochs) == (epochs, local_epochs)
    assert (config.client.batch_size, config.client.drop_last) == (128, True)
    assert (config.generator.schedule, config.generator.sampling_steps) == ("squaredcos_cap_v2", 250)
    check(config)


def test_feddyns_weight_its_unsquared_term_and_fields_that_are_not_set() -> None:
    assert cell("cifar10", "feddyn", 10, 1.0, 0.1, "local_synthetic").client.lr == 0.1
    assert cell("cifar10", "fedavg", 10, 1.0, 0.1, "local_synthetic").client.lr == 0.05
    assert cell("cifar10", "feddyn", 10, 1.0, 0.1, "real").flat["feddyn.alpha"] == 0.001
    assert cell("cifar10", "feddyn", 10, 1.0, 0.1).flat["feddyn.alpha"] == 0.01
    assert not cell("cifar100", "feddyn", 10, 1.0, 0.1, "real").flat["feddyn.squared"]
    assert presets.experiment("paper", "cifar10", {"algorithm": "feddyn"}).flat["feddyn.squared"]
    assert "sharing.p" not in cell("cifar10", "fedavg", 10, 1.0, 0.1, "real").flat


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
