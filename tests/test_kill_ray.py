"""kill -9 under Ray, of an actor: the run ends as if nothing had happened."""

import time
from pathlib import Path

import pytest

from fedcommons import experiment
from fedcommons.errors import ClientError
from fedcommons.runs.experiment import run

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent

LAB = '''
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.seeds import seed_for


@dataclass(frozen=True)
class Struck(SCAFFOLD):
    """SCAFFOLD whose client 3 kills its process in the rounds that have a file in ``at``."""

    at: str = ""

    def client(self, work, message, memory, data, round, seed):
        reply, order = super().client(work, message, memory, data, round, seed), Path(self.at, f"round-{round}")
        if order.exists() and seed == seed_for(0, "client", round, 3):
            if order.read_text() == "once":
                order.rename(f"{order}-was-{Path('/proc/self/comm').read_text().strip()}")
            os.kill(os.getpid(), signal.SIGKILL)
        return reply
'''


FIELDS = {
    "data.limit": 60, "client.batch_size": 5, "client.epochs": 1, "measure.every": 0, "federation.rounds": 4,
    "federation.checkpoint_every": 2, "federation.blocks": 2, "tracking.wandb": "off",
}  # fmt: skip


def test_an_actor_killed_once_is_replaced_and_a_client_that_kills_it_every_time_is_named(
    ray_session: None, tmp_path: Path
) -> None:
    """In the end its actors are freed, and the run can go on to the bits of one process that nothing happens to."""
    import ray

    lab, folder, whole = tmp_path, tmp_path / "run", tmp_path / "whole"
    (lab / "lab.py").write_text(LAB)
    fields = {**FIELDS, "algorithm": f"{lab / 'lab.py'}:Struck", "struck.at": str(lab)}
    run(experiment("smoke", values=fields), whole, say=lambda _: None)
    actors = experiment("smoke", values={**fields, "federation.executor": "ray_actors", "federation.actors": 2})
    free = ray.available_resources()["CPU"]
    (lab / "round-2").write_text("once")
    (lab / "round-3").write_text("always")
    with pytest.raises(ClientError, match=r"client 3, round 3, Struck: .* died 3 times"):
        run(actors, folder, say=lambda _: None)
    assert [*lab.glob("round-2-was-ray*")]
    (lab / "round-3").unlink()
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) != free and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == free
    run(actors, folder, resume=True, say=lambda _: None)
    for name in ("rounds.jsonl", "summary.json", "checkpoints/round-000004.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
