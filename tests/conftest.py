"""What the tests share: the two tiny federations of ``fedcommons.testing``, and a Ray.

Tests cannot import each other, so helpers are fixtures; their types are imported under TYPE_CHECKING only.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from fedcommons.testing import Federation, LeastSquares, federations

# Ray reads these when it is first imported, which no test does before the fixture below.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
torch.set_num_threads(1)  # as in a worker: more threads round differently


@pytest.fixture(scope="session")
def least_squares() -> Callable[..., LeastSquares]:
    """See ``federations.least_squares``."""
    return federations.least_squares


@pytest.fixture(scope="session")
def digits() -> Callable[..., Federation]:
    """See ``federations.digits``."""
    return federations.digits


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A real Ray on this machine, for tests marked ``ray``."""
    from fedcommons import cluster

    cluster.connect(num_cpus=4)
    yield
    import ray

    ray.shutdown()
