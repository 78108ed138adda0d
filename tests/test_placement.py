"""Where Ray's actors go: on what Slurm, the system and CUDA_VISIBLE_DEVICES leave to the run, or with a reason nowhere.

This file is also a program that starts one Ray after another: run as a script it prints what each of them has.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedcommons import experiment, sweep
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.worker import Worker
from fedcommons.errors import UserError
from fedcommons.federation import cluster
from fedcommons.federation.evaluation import ModelTask
from fedcommons.federation.ray_actors import RayActors
from fedcommons.runs.gpu_need import with_share
from fedcommons.testing import digits

pytestmark = pytest.mark.ray

FEDERATION = digits()
FEDAVG = FedAvg()


def actors(number: int, gpus_per_actor: float = 0, wait_s: float = 60) -> RayActors:
    return RayActors(FEDERATION.build(FEDAVG), FEDERATION.data, number, gpus_per_actor, wait_s)


def visible_gpus(worker: Worker, shared: ModelTask, job: int) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def main() -> None:
    """Print what Ray has where Slurm, a variable or the system limit it, beside another Ray, and with a GPU."""
    found: dict[str, Any] = {}
    with mock.patch.dict(os.environ, {"SLURM_CPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": ""}):
        found["of Slurm's task, without GPUs"] = has()
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "3,5"}):
        found["with half a GPU each"] = two_actors_on_a_gpu()
    with another_ray(num_cpus=1000):
        try:
            found["beside another Ray"] = has()
        except Exception as error:
            found["beside another Ray"] = repr(error)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found["on one core"] = has()
    print(json.dumps(found))


def has() -> dict[str, float]:
    """The cores and GPUs of the Ray that ``connect`` finds or starts."""
    import ray

    cluster.connect()
    resources = ray.cluster_resources()
    ray.shutdown()
    return {kind: resources.get(kind, 0) for kind in ("CPU", "GPU")}


@contextmanager
def another_ray(num_cpus: int) -> Iterator[None]:
    """As ``ray start`` leaves one running: Ray notes its address for whoever comes next."""
    from ray.cluster_utils import Cluster

    other = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus})
    yield
    other.shutdown()


def two_actors_on_a_gpu() -> dict[str, Any]:
    """What two actors see that ask for half of one GPU each, and what a third is told. The GPU need not be there.

    auto: the shares of eight processes that leave it to us, or ask for a half. What they need cannot be known here.
    """
    import ray

    ray.init(num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)
    two = actors(2, 0.5)
    seen = two.map(visible_gpus, ModelTask(FEDERATION.model), [0, 1])
    try:
        actors(1, 0.5, wait_s=3)
        said = ""
    except UserError as error:
        said = str(error)
    of_fields = [{"federation.gpus_per_actor": value} for value in ("auto", 0.5)]
    configs = [experiment("smoke", values=fields) for fields in of_fields]
    with mock.patch.object(cluster, "PLACE_S", 3):
        try:
            held = str(with_share(configs, 8))
        except UserError as error:
            held = str(error)
    two.close()
    shares = with_share(configs, 8)
    ray.shutdown()
    return {"seen": seen, "the third": said, "auto": [c.federation.gpus_per_actor for c in shares], "held": held}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``main`` prints."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "SLURM_CPUS_PER_TASK")}
    # Rays of its own; the name is short because sockets lie there
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, __file__], capture_output=True, text=True, timeout=400,
            env={**ours, "RAY_TMPDIR": scratch},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ray_has_the_cores_that_slurm_and_the_system_leave_to_it(found: dict[str, Any]) -> None:
    assert found["of Slurm's task, without GPUs"]["CPU"] == 1
    assert found["on one core"]["CPU"] == 1


def test_slurm_gives_no_more_cores_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1000")
    assert (cluster.cores() or os.cpu_count()) == len(os.sched_getaffinity(0))


def test_ray_has_the_gpus_that_cuda_visible_devices_leaves_to_it(found: dict[str, Any]) -> None:
    assert found["of Slurm's task, without GPUs"]["GPU"] == 0
    assert found["with half a GPU each"]["seen"] == ["3", "3"]


def test_an_actor_that_finds_no_gpu_free_says_so(found: dict[str, Any]) -> None:
    assert "needs 1 CPU and 0.5 GPU" in found["with half a GPU each"]["the third"]
    assert "1 CPU and 0 GPU free" in found["with half a GPU each"]["the third"]


def test_eight_processes_share_the_gpu_where_they_leave_it_to_us(found: dict[str, Any]) -> None:
    assert found["with half a GPU each"]["auto"] == [0.125, 0.5]


def test_a_gpu_that_other_work_holds_is_not_waited_for_for_ever(found: dict[str, Any]) -> None:
    held = found["with half a GPU each"]["held"]
    assert "federation.gpus_per_actor auto found no place" in held
    assert "needs 1 CPU and 1 GPU, and Ray has 1 CPU and 0 GPU free" in held


def test_a_ray_that_somebody_else_has_started_here_is_left_alone(found: dict[str, Any]) -> None:
    """Unless RAY_ADDRESS names it."""
    assert found["beside another Ray"]["CPU"] <= (os.cpu_count() or 1)


@pytest.fixture
def release(ray_session: None) -> Iterator[Callable[[], None]]:
    """While a test runs all cores are held by an actor of somebody else's; ends that."""
    import ray

    class Somebody:
        def is_there(self) -> bool:
            return True

    somebody: Any = ray.remote(num_cpus=int(ray.cluster_resources()["CPU"]))(Somebody).remote()
    assert ray.get(somebody.is_there.remote(), timeout=60)
    end: Callable[[], None] = partial(ray.kill, somebody)
    yield end
    end()


def test_actors_that_find_no_core_free_say_what_they_need_and_leave_nothing_behind(release: Callable[[], None]) -> None:
    from ray.util import placement_group_table

    with pytest.raises(UserError, match=r"federation\.actors = 2 .* each needs 1 CPU .* Ray has 0 CPU"):
        actors(2, wait_s=3)
    assert {facts["state"] for facts in placement_group_table().values()} <= {"REMOVED"}


def test_a_sweep_that_finds_no_core_free_says_so_and_leaves_nothing_behind(
    release: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util import placement_group_table

    monkeypatch.setattr(cluster, "PLACE_S", 3)
    with pytest.raises(UserError, match=r"^a run of this sweep found no place in 3 s: each needs 1 CPU .* 0 CPU"):
        sweep([experiment("smoke", values={"wandb": "off"})], tmp_path)
    assert {facts["state"] for facts in placement_group_table().values()} <= {"REMOVED"}


def test_actors_wait_for_cores_that_are_free_soon(release: Callable[[], None]) -> None:
    threading.Timer(1, release).start()
    two = actors(2)
    assert len(two.map(visible_gpus, ModelTask(FEDERATION.model), [0, 1])) == 2
    two.close()


if __name__ == "__main__":
    main()
