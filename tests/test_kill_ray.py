"""kill -9 under Ray: of an actor and of a node; the run ends as if nothing had happened.

This file is also a program: run as a script it starts three nodes and runs the experiment on them.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from fedcommons import experiment
from fedcommons.errors import ClientError
from fedcommons.runs.experiment import run

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent

LAB = '''
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.seeds import seed_for


@dataclass(frozen=True)
class Struck(SCAFFOLD):
    """SCAFFOLD whose client 3 kills a process in the round that has a file in ``at``: its own, or its node."""

    at: str = ""

    def client(self, work, message, memory, data, round, seed):
        reply, order = super().client(work, message, memory, data, round, seed), Path(self.at, f"round-{round}")
        if order.exists() and seed == seed_for(0, "client", round, 3):
            victim = order.read_text()
            pid = {"self": os.getpid(), "node": os.getppid()}[victim.removesuffix(" once")]
            if victim.endswith(" once"):
                order.rename(f"{order}-was-{Path(f'/proc/{pid}/comm').read_text().strip()}")
            os.kill(pid, signal.SIGKILL)
            time.sleep(60)  # Ray ends the processes of a node that is no more
        return reply
'''


def fields(lab: Path) -> dict[str, Any]:
    return {
        "algorithm": f"{lab / 'lab.py'}:Struck", "struck.at": str(lab), "data.limit": 60, "client.batch_size": 5,
        "client.epochs": 1, "measure.every": 0, "federation.rounds": 4, "federation.checkpoint_every": 2,
        "federation.blocks": 2, "tracking.wandb": "off",
    }  # fmt: skip


ACTORS = {"federation.executor": "ray_actors", "federation.actors": 2}


def main(lab: Path, folder: Path) -> None:
    """Run the experiment on two of three nodes of one core, besides the one that this process is connected to."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        nodes.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = str(nodes.address)
    from fedcommons.federation import cluster

    cluster.connect()
    run(experiment("smoke", values={**fields(lab), **ACTORS}), folder, say=lambda _: None)
    import ray

    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "lab.py").write_text(LAB)
    return folder


@pytest.fixture(scope="module")
def whole(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to, in one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(experiment("smoke", values=fields(lab)), folder, say=lambda _: None)
    return folder


def require_equal(folder: Path, whole: Path) -> None:
    for name in ("rounds.jsonl", "summary.json", "checkpoints/round-000004.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_an_actor_killed_once_is_replaced_and_a_client_that_kills_it_every_time_is_named(
    ray_session: None, lab: Path, whole: Path, tmp_path: Path
) -> None:
    """In the end its actors are freed, and the run can go on."""
    import ray

    actors = experiment("smoke", values={**fields(lab), **ACTORS})
    free = ray.available_resources()["CPU"]
    (lab / "round-2").write_text("self once")
    (lab / "round-3").write_text("self")
    with pytest.raises(ClientError, match=r"client 3, round 3, Struck: .* died 3 times"):
        run(actors, tmp_path / "run", say=lambda _: None)
    assert [*lab.glob("round-2-was-ray*")]
    (lab / "round-3").unlink()
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) != free and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == free
    run(actors, tmp_path / "run", resume=True, say=lambda _: None)
    require_equal(tmp_path / "run", whole)


def test_a_run_goes_on_without_a_node_killed_within_a_round(lab: Path, whole: Path, tmp_path: Path) -> None:
    (lab / "round-3").write_text("node once")
    # a Ray of its own; the name is short because sockets lie there
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, __file__, str(lab), str(tmp_path / "run")], stdout=subprocess.DEVNULL, timeout=300,
            env={**os.environ, "RAY_TMPDIR": scratch},
        )  # fmt: skip
    assert done.returncode == 0
    assert (lab / "round-3-was-raylet").exists()
    require_equal(tmp_path / "run", whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
