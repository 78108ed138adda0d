"""Two Ray nodes give the bits of one process, for every algorithm, with dropout and augmentation on.

This file is also the driver: run as a script it plays all of them on two actors, each on a node of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedcommons.config import parts
from fedcommons.config.parts import KINDS
from fedcommons.core.algorithm import Algorithm, needed
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD
from fedcommons.core.worker import Worker
from fedcommons.federation import cluster
from fedcommons.federation.evaluation import ModelTask
from fedcommons.testing import digits
from fedcommons.testing.comparing import bits

pytestmark = pytest.mark.ray

ALGORITHMS = {name: parts.make("algorithm", name, {}) for name in KINDS["algorithm"].known}
MOST = max(ALGORITHMS.values(), key=lambda algorithm: len(needed(algorithm)))  # whose module serves them all
PLAIN = digits(dropout=0.3, method=MOST).training(LocalSGD(epochs=2, batch_size=5, augment=True))
FEDERATION = replace(PLAIN, data=replace(PLAIN.data, pool=PLAIN.data.clients, serves=True))  # some servers need a pool
PLAN = FEDERATION.plan(3, participation=0.8, blocks=4)


def digest(name: str, executor: Executor | None = None) -> str:
    """Of the weights and all else that is there after the last round."""
    last, _ = FEDERATION.play(ALGORITHMS[name], PLAN, executor)[-1]
    return sha256(b"".join(key.encode() + values for key, values in sorted(bits(last).items()))).hexdigest()


@dataclass(frozen=True)
class As:
    """An executor's workers, but with this algorithm: actors take seconds to start, so they serve all of them."""

    algorithm: Algorithm
    inner: Executor

    def map(self, function: Callable[[Any, Any, Any], Any], shared: Any, jobs: Sequence[Any]) -> list[Any]:
        """See ``Executor``."""
        return self.inner.map(partial(_with, self.algorithm, function), shared, jobs)

    def close(self) -> None:
        """See ``Executor``."""


def _with(algorithm: Algorithm, function: Callable[[Any, Any, Any], Any], worker: Worker, shared: Any, job: Any) -> Any:
    return function(replace(worker, algorithm=algorithm), shared, job)


def node(worker: Worker, shared: ModelTask, job: int) -> str:
    """Where the actor lies."""
    import ray

    return ray.get_runtime_context().get_node_id()


def main(path: Path) -> None:
    """Write to ``path`` the nodes of the two actors, and what every algorithm comes to on them."""
    import ray
    from ray.cluster_utils import Cluster

    from fedcommons.federation.ray_actors import RayActors

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = str(nodes.address)
    cluster.connect()
    actors = RayActors(FEDERATION.build(ALGORITHMS["fedavg"]), FEDERATION.data, 2, 0)
    found = {
        "nodes": actors.map(node, ModelTask(FEDERATION.model), [0, 1]),
        "digests": {name: digest(name, As(algorithm, actors)) for name, algorithm in ALGORITHMS.items()},
    }
    path.write_text(json.dumps(found), encoding="utf-8")
    actors.close()
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``main`` writes."""
    path = tmp_path_factory.mktemp("two_nodes") / "found.json"
    # a Ray of its own; the name is short because sockets lie there
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, __file__, str(path)], capture_output=True, text=True, timeout=400,
            env={**os.environ, "RAY_TMPDIR": scratch},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_the_actors_lie_on_two_nodes(found: dict[str, Any]) -> None:
    assert len(set(found["nodes"])) == 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_nodes_give_the_bits_of_one_process(name: str, found: dict[str, Any]) -> None:
    assert found["digests"][name] == digest(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
