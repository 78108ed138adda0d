"""FedProx's partition: a few labels a client, in log-normal amounts; invariants are in test_partition.py."""

from typing import Any

import numpy as np
import pytest

from fedcommons.config.flat import choose
from fedcommons.config.sections import Partition
from fedcommons.errors import UserError
from fedcommons.runs import inputs

N_CLASSES = 10
LABELS = np.repeat(np.arange(N_CLASSES), [*[129] * 5, *[130] * 5])


def lognormal(**values: Any) -> Partition:
    """The partition with these fields and constants."""
    named = {f"partition.{field}": value for field, value in values.items()}
    return choose({"partition.name": "labels_lognormal", **named}).partition


def counts_of_clients(**constants: Any) -> np.ndarray:
    """Class counts of 100 clients with 6,000 images of each class."""
    recipe = lognormal(n_clients=100, **constants)
    counts = inputs.deal(recipe, np.arange(60_000) % N_CLASSES, N_CLASSES, 0).class_counts
    assert counts is not None
    return counts


def test_fedprox_gives_client_i_the_labels_from_i_on_and_the_least_of_each() -> None:
    counts = counts_of_clients(spread=5.0, least=3)
    for i, client in enumerate(counts):
        assert set(np.flatnonzero(client)) == {i % 10, (i + 1) % 10}
    assert counts[counts > 0].min() == 3  # with a spread of 5 one client has nearly all others


def test_fedprox_amounts_are_log_normal_with_the_spread_asked_for() -> None:
    counts = counts_of_clients(spread=0.5, least=1)
    logarithms = np.log(counts[counts > 0] - 1.0)  # 200 draws, each label's 20 shifted by their sum
    within = logarithms.std() * np.sqrt(200 / 199)
    assert abs(within - 0.5) < 4 * 0.5 / np.sqrt(2 * 200)
    equal = counts_of_clients(spread=0.0)
    assert set(equal[equal > 0]) <= {299, 300, 301}  # cuts of a sum of floats


@pytest.mark.parametrize(
    ("said", "constants"),
    [("per_client must be 6 to 10, got 5", {"n_clients": 5, "per_client": 5}),
     ("per_client must be 1 to 10, got 11", {"n_clients": 20, "per_client": 11}),
     ("26 clients with 5 images each of label 0 need more than the 129", {"n_clients": 130})],
)  # fmt: skip
def test_fedprox_labels_that_cannot_be_dealt_are_refused(said: str, constants: dict[str, int]) -> None:
    with pytest.raises(UserError, match=said):
        inputs.deal(lognormal(**constants), LABELS, N_CLASSES, 0)
