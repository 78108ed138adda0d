"""Places and memory in Ray: what cannot have them says so, what ends or is killed gives them back and can go on."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from fedcommons import ClientError, UserError, experiment, run, sweep
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.cli.display import Display
from fedcommons.federation.ray_executor import RayActors
from fedcommons.runtime import ray_cluster
from fedcommons.testing import digits
from fedcommons.tune import progress
from fedcommons.tune.progress import Progress

FIELDS = {"wandb": "off", "federation.rounds": 1, "client.epochs": 1, "measure.every": 0, "data.limit": 80}
ACTORS = {"federation.executor": "ray_actors", "federation.actors": 1}
Press = Callable[[Callable[[], bool]], None]


def states() -> set[str]:
    return {facts["state"] for facts in placement_group_table().values()}


def is_free() -> bool:
    return states() <= {"REMOVED"} and ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"]


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it holds before long: nodes report now and then what is taken."""
    deadline = time.monotonic() + 180
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture
def interrupts(ray_session: None) -> Iterator[Press]:
    """Presses Ctrl-C once a condition holds, as a notebook's stop button does: this process alone gets the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert soon(is_free)

    def press(condition: Callable[[], bool]) -> None:
        def wait() -> None:
            deadline = time.monotonic() + 200
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)  # until the call that brought it about has returned
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=wait, daemon=True).start()

    yield press
    signal.signal(signal.SIGINT, before)


@pytest.mark.ray
def test_after_an_interrupted_sweep_the_next_one_runs_and_leaves_no_byte_in_the_object_store(
    tmp_path: Path, interrupts: Press
) -> None:
    """The first holds all cores, and has more trials that wait for them; the next is called in another thread."""
    many = {**FIELDS, "federation.rounds": 10**6}
    configs = [experiment("smoke", values={**many, **more, "seed": n}) for n, more in enumerate([ACTORS, {}, {}])]
    interrupts(lambda: any(tmp_path.glob("long/*/rounds.jsonl")))
    with pytest.raises(KeyboardInterrupt):
        sweep(configs, tmp_path / "long")
    assert soon(is_free)
    config = experiment("smoke", values={**FIELDS, **ACTORS})
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(sweep, [config], tmp_path / "next").result()
    all_bytes = ray.cluster_resources()["object_store_memory"]
    assert soon(lambda: ray.available_resources().get("object_store_memory", 0.0) == all_bytes)
    alone = run(experiment("smoke", values=FIELDS), tmp_path / "alone", say=lambda _: None)
    course = (tmp_path / "next" / rows["run"].item() / "rounds.jsonl").read_bytes()
    assert course == (alone.folder / "rounds.jsonl").read_bytes()


@pytest.mark.ray
def test_interrupted_actors_and_waits_for_a_place_give_it_back(tmp_path: Path, interrupts: Press) -> None:
    interrupts(lambda: "CREATED" in states())  # while the actors start
    with pytest.raises(KeyboardInterrupt):
        run(experiment("smoke", values={**FIELDS, **ACTORS, "federation.rounds": 10**6}), tmp_path / "run")
    assert soon(is_free)
    interrupts(lambda: "PENDING" in states())
    with pytest.raises(KeyboardInterrupt):
        ray_cluster.reserve([{"CPU": 1000.0}], {}, "too much", wait_s=100)
    assert soon(is_free)


@pytest.mark.ray
def test_without_a_free_core_actors_and_sweeps_say_so_and_wait_for_one_that_is_free_soon(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert soon(is_free)
    holder: Any = ray.remote(num_cpus=int(ray.cluster_resources()["CPU"]))(threading.Event).remote()
    assert not ray.get(holder.is_set.remote(), timeout=180)
    build, data = digits().build(FedAvg()), digits().data
    with pytest.raises(UserError, match=r"federation\.actors = 2 .* each needs 1 CPU .* Ray has 0 CPU"):
        RayActors(build, data, 2, 0, wait_s=1)
    monkeypatch.setattr(ray_cluster, "PLACE_S", 1)
    with pytest.raises(UserError, match=r"sweep .* 1 s: each needs 1 CPU .* 0 CPU"):
        sweep([experiment("smoke", values=FIELDS)], tmp_path)
    assert states() <= {"REMOVED"}
    threading.Timer(1, ray.kill, [holder]).start()
    executor = RayActors(build, data, 1, 0, wait_s=60, transport="calls")
    assert executor.actors[0].socket is None
    executor.close()
    assert soon(is_free)


LAB = '''
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.seeding import seed_for


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
STRUCK = {
    "data.limit": 60, "client.batch_size": 5, "client.epochs": 1, "measure.every": 0, "federation.rounds": 3,
    "federation.blocks": 2, "tracking.wandb": "off",
}  # fmt: skip


@pytest.mark.ray
@pytest.mark.parametrize("transport", ["fast", "calls"])
def test_an_actor_killed_once_is_replaced_and_a_client_that_kills_it_every_time_is_named(
    transport: str, ray_session: None, tmp_path: Path
) -> None:
    """Finished rounds have the bits of one process, and in the end the actor is freed. By calls, it is killed once."""
    lab, folder, whole = tmp_path, tmp_path / "run", tmp_path / "whole"
    (lab / "lab.py").write_text(LAB)
    fields = {**STRUCK, "algorithm": f"{lab / 'lab.py'}:Struck", "struck.at": str(lab)}
    run(experiment("smoke", values=fields), whole, say=lambda _: None)
    places = {**ACTORS, "federation.transport": transport}
    actors = experiment("smoke", values={**fields, **places})
    (lab / "round-2").write_text("once")
    if is_fatal := transport == "fast":
        (lab / "round-3").write_text("always")
    named = pytest.raises(ClientError, match=r"client 3, round 3, Struck: .* died 3 times")
    with named if is_fatal else nullcontext():
        run(actors, folder, say=lambda _: None)
    assert [*lab.glob("round-2-was-ray*")]
    assert soon(is_free)
    played, wanted = ((at / "rounds.jsonl").read_text().splitlines() for at in (folder, whole))
    assert played == wanted[: 3 if is_fatal else 4]  # of rounds 0, 1 and 2, or of all


def test_a_sweep_that_has_lost_its_places_is_stopped() -> None:
    now = [0.0]
    watching = Progress(Display(quiet=True), {"a": 1, "b": 1}, 0, lambda: None, clock=lambda: now[0])
    running, waiting = (type("Trial", (), {"status": status})() for status in ("RUNNING", "PENDING"))
    for trials in ([waiting], [running, waiting], [running], [waiting]):
        watching.on_step_end(1, trials)
        now[0] += 0.9 * progress.PLACE_S
        watching.on_step_end(1, trials)
    now[0] += progress.PLACE_S
    with pytest.raises(ClientError, match="no run has got resources"):
        watching.on_step_end(1, [waiting])
