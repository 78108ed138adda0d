"""A sweep gives back all the memory of Ray's object store that it took."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedcommons.config import presets
from fedcommons.config.flat import override
from fedcommons.sweeping import sweep as tuning
from fedcommons.sweeping.display import Display

pytestmark = pytest.mark.ray

SMALL = {"federation.rounds": 1, "data.limit": 100, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off"}
ACTORS = {"federation.executor": "ray_actors", "federation.actors": 1}  # no more than a trial in one process reserves


def taken() -> float:
    """Bytes in the object stores of all nodes."""
    import ray

    return ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0.0)


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it holds before long: nodes report what is taken now and then."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_every_byte_in_the_object_store_is_seen(ray_session: None) -> None:
    """Else the test below would find any store empty."""
    import ray

    assert soon(lambda: taken() == 0)
    reference = ray.put(b"some bytes")
    assert soon(lambda: 0 < taken() < 1000)
    del reference
    assert soon(lambda: taken() == 0)


def test_after_a_sweep_of_20_trials_the_object_store_is_empty_again(ray_session: None, tmp_path: Path) -> None:
    """Most of them in one process, some with actors of their own, one with generators."""
    small = presets.experiment("smoke", "digits", {**SMALL, "artifacts": str(tmp_path / "artifacts")})
    configs = [replace(small, seed=seed) for seed in range(20)]
    configs[:2] = [override(c, ACTORS) for c in configs[:2]]
    configs[2] = override(configs[2], {"sharing.setting": "shuffled_synthetic"})
    cells = [tuning.cell(c, {"seed": "seed"}) for c in configs]
    left = tuning.todo(cells, tmp_path / "sweep", Display())
    with tuning.open_sweep(tmp_path / "sweep", resume=False):
        outcome = tuning.run_cells(left, tmp_path / "sweep", Display())
    assert outcome.failures == {}
    assert outcome.generators_trained == 4
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 20
    assert soon(lambda: taken() == 0)
