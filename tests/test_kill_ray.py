"""kill -9 under Ray: of the driver, of an actor, of a node; the run ends as if nothing had happened.

This file is also the driver that is killed, or whose node is: run as a script it plays the experiment on Ray's actors.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest

from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.core.worker import RunData, Worker
from fedcommons.errors import ClientError
from fedcommons.federation import cluster
from fedcommons.federation.ray_actors import RayActors
from fedcommons.runs import experiment
from fedcommons.seeds import seed_for

if TYPE_CHECKING:
    from conftest import WandbFile

pytestmark = pytest.mark.ray

SERIAL = override(
    presets.experiment("smoke", "digits"),
    {
        "algorithm": "scaffold", "data.limit": 100, "client.batch_size": 5, "measure.every": 0,
        "federation.rounds": 4, "federation.checkpoint_every": 2, "federation.blocks": 2, "tracking.wandb": "offline",
    },
)  # fmt: skip
ACTORS = override(SERIAL, {"federation.executor": "ray_actors", "federation.actors": 2})
CLIENTS = range(SERIAL.partition.n_clients)

Strike = Callable[[], None]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_first(flag: Path) -> bool:
    """Whether no other process has been here before."""
    with suppress(FileExistsError):
        flag.touch(exist_ok=False)
        return True
    return False


def die_once(flag: Path) -> None:
    """The first process that comes here dies."""
    if is_first(flag):
        die()


def kill_a_node(flag: Path, spared: str) -> None:
    """The first actor that comes here on another node than the spared one kills Ray's daemon of its node."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    if here != spared and is_first(flag):
        flag.write_text(here, encoding="utf-8")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # Ray ends the processes of a node that is no more


def armed(round: int, clients: Collection[int], strike: Strike) -> Callable[..., None]:
    """``RayActors.__init__``, but in its actors these clients strike in the third step of the round."""
    fatal, init = {seed_for(0, "client", round, client) for client in clients}, RayActors.__init__

    def build_armed(build: Callable[[RunData], Worker], data: RunData) -> Worker:
        client = SCAFFOLD.client

        def strikes(self: SCAFFOLD, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
            step = work.module.training_step

            def training_step(batch: Any, index: int) -> Any:
                if index == 2 and seed in fatal:
                    strike()
                return step(batch, index)

            with mock.patch.object(work.module, "training_step", training_step):
                return client(self, work, message, memory, data, round, seed)

        mock.patch.object(SCAFFOLD, "client", strikes).start()
        return build(data)

    def armed_init(self: RayActors, build: Callable[[RunData], Worker], *arguments: Any, **named: Any) -> None:
        init(self, partial(build_armed, build), *arguments, **named)

    return armed_init


def main(folder: Path, victim: str) -> None:
    """The experiment on actors, in whose round 3 this process or the node of one of its actors is killed."""
    strike: Strike = partial(os.kill, os.getpid(), signal.SIGKILL)
    if victim == "node":
        strike = partial(kill_a_node, folder.with_suffix(".killed"), three_nodes())
    with mock.patch.object(RayActors, "__init__", armed(3, CLIENTS, strike)):
        experiment.run(ACTORS, folder, say=lambda _: None)
    import ray

    print("lost:", *(node["NodeID"] for node in ray.nodes() if not node["Alive"]))


def three_nodes() -> str:
    """Connect to three nodes of one core: two actors lie on two of them, and the third has room for another.

    Returns the id of the node that this process is connected to, and would end with.
    """
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    os.environ["RAY_ADDRESS"] = str(nodes.address)
    cluster.connect()
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    return ray.get_runtime_context().get_node_id()


def play(folder: Path, victim: str) -> tuple[int, str]:
    """``main`` in a process of its own: how it ended, and what it said. Nothing of its Ray is left behind."""
    # a Ray of its own; the name is short because sockets lie there
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        said = Path(scratch) / "said"  # a pipe would stay open as long as any process of Ray
        with open(said, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, __file__, str(folder), victim], stdout=file, stderr=file, start_new_session=True,
                env={**os.environ, "RAY_TMPDIR": scratch},
            )  # fmt: skip
        try:
            return process.wait(timeout=300), said.read_text()
        finally:
            end_session(process.pid)


def end_session(number: int) -> None:
    """End, by their pids, all processes of this session: Ray's daemons belong to that of the driver."""

    def members() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    while left := members():  # again, as one of them may have started another meanwhile
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to, in one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    experiment.run(SERIAL, folder)
    return folder


@pytest.fixture
def actors(ray_session: None) -> Experiment:
    """The experiment on actors of the tests' Ray, which can be handed what is defined here."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test
    return ACTORS


@pytest.fixture
def require_equal(whole: Path, wandb_file: "Callable[[Path], WandbFile]") -> Callable[[Path], None]:
    """That a run's metrics, summary and final weights are those of ``whole``, and that W&B has all of its rounds."""

    def outputs(folder: Path) -> dict[str, bytes]:
        paths = folder / "rounds.jsonl", folder / "summary.json", folder / "checkpoints" / "round-000004.safetensors"
        return {path.name: path.read_bytes() for path in paths}

    def require(folder: Path) -> None:
        assert outputs(folder) == outputs(whole)
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        kept = wandb_file(folder)
        assert kept.run.run_id == (folder / "wandb-id.txt").read_text().strip()
        assert [{k: v for k, v in row.items() if not k.startswith(("_", "media/"))} for row in kept.history] == lines

    return require


def test_a_driver_killed_within_a_round_is_resumed_by_another(
    actors: Experiment, tmp_path: Path, require_equal: Callable[[Path], None]
) -> None:
    folder = tmp_path / "run"
    code, said = play(folder, "driver")
    assert code == -signal.SIGKILL, said
    first = (folder / "wandb-id.txt").read_text()
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3  # rounds 0, 1 and 2
    experiment.run(actors, folder, resume=True)
    assert (folder / "wandb-id.txt").read_text() == first
    require_equal(folder)


def test_an_actor_killed_within_a_round_is_replaced_and_its_clients_train_again(
    actors: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require_equal: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(RayActors, "__init__", armed(3, [1], partial(die_once, tmp_path / "killed")))
    experiment.run(actors, tmp_path / "run")
    assert (tmp_path / "killed").exists()
    require_equal(tmp_path / "run")


def test_a_node_killed_within_a_round_is_done_without(tmp_path: Path, require_equal: Callable[[Path], None]) -> None:
    code, said = play(tmp_path / "run", "node")
    assert code == 0, said
    assert f"lost: {(tmp_path / 'run.killed').read_text()}\n" in said
    require_equal(tmp_path / "run")


def test_a_client_that_kills_its_process_every_time_is_named_and_its_actors_are_let_go(
    actors: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    free = ray.available_resources()["CPU"]
    monkeypatch.setattr(RayActors, "__init__", armed(2, [3], die))
    with pytest.raises(ClientError, match=r"client 3, round 2, SCAFFOLD: the process that trained it died 3 times"):
        experiment.run(actors, tmp_path / "run")
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) != free and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == free


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
