"""A sweep that is broken off leaves nothing in Ray that a later one in the same process would wait for."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from fedcommons import experiment, run, sweep
from fedcommons.errors import ClientError
from fedcommons.federation import cluster
from fedcommons.sweeping import progress
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.progress import Progress

FIELDS = {"wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "data.limit": 80}
ACTORS = {"federation.executor": "ray_actors"}


def states() -> list[str]:
    """Of all places that were ever reserved in Ray."""
    return [facts["state"] for facts in placement_group_table().values()]


def is_free() -> bool:
    """Whether no place is reserved and no core is taken."""
    cores = ray.available_resources().get("CPU", 0)
    return {*states()} <= {"REMOVED"} and cores == ray.cluster_resources()["CPU"]


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture
def interrupts(ray_session: None) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Presses Ctrl-C once a condition holds, as a notebook's stop button does: this process alone gets the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert soon(is_free)

    def press(condition: Callable[[], bool]) -> None:
        def wait() -> None:
            deadline = time.monotonic() + 200
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=wait, daemon=True).start()

    yield press
    signal.signal(signal.SIGINT, before)


@pytest.mark.ray
def test_after_an_interrupted_sweep_the_next_one_runs(
    tmp_path: Path, interrupts: Callable[[Callable[[], bool]], None]
) -> None:
    """The first holds all cores, and has more trials that wait for them."""
    many = {**FIELDS, "federation.rounds": 10**6}
    actors = {**ACTORS, "federation.actors": int(ray.cluster_resources()["CPU"]) - 1}
    interrupts(lambda: any(tmp_path.glob("long/*/rounds.jsonl")))
    with pytest.raises(KeyboardInterrupt):
        sweep(
            [experiment("smoke", values={**many, **more, "seed": n}) for n, more in enumerate([actors, {}, {}])],
            tmp_path / "long",
        )
    assert soon(is_free)
    assert sweep([experiment("smoke", values=FIELDS)], tmp_path / "next")["rounds"].tolist() == [2]


@pytest.mark.ray
def test_an_interrupted_run_gives_its_actors_back(
    tmp_path: Path, interrupts: Callable[[Callable[[], bool]], None]
) -> None:
    """While they start: their place is taken by then."""
    interrupts(lambda: "CREATED" in states())
    with pytest.raises(KeyboardInterrupt):
        run(experiment("smoke", values={**FIELDS, **ACTORS, "federation.actors": 4}), tmp_path / "run")
    assert soon(is_free)


@pytest.mark.ray
def test_a_place_that_is_waited_for_is_given_back_at_once(interrupts: Callable[[Callable[[], bool]], None]) -> None:
    interrupts(lambda: "PENDING" in states())
    with pytest.raises(KeyboardInterrupt):
        cluster.reserve([{"CPU": 1000.0}], {}, "too much", wait_s=100)
    assert soon(is_free)


@pytest.mark.ray
def test_each_cell_of_a_sweep_gets_the_resources_of_its_own_executor(ray_session: None, tmp_path: Path) -> None:
    executors = [{}, {**ACTORS, "federation.actors": 3}, {**ACTORS, "federation.actors": 1}]
    configs = [experiment("smoke", values={**FIELDS, **more, "seed": n}) for n, more in enumerate(executors)]
    assert sweep(configs, tmp_path / "sweep")["rounds"].tolist() == [2, 2, 2]
    for n in range(3):
        run(experiment("smoke", values={**FIELDS, "seed": n}), tmp_path / str(n))
    courses = [sorted(path.read_bytes() for path in tmp_path.glob(f"{of}/rounds.jsonl")) for of in ("sweep/*", "[0-9]")]
    assert courses[0] == courses[1]
    assert len(courses[0]) == 3


def test_a_sweep_that_has_lost_its_places_is_stopped() -> None:
    now = [0.0]
    watching = Progress(Display(quiet=True), {"a": 1, "b": 1}, 0, lambda: None, clock=lambda: now[0])
    running, waiting = (type("Trial", (), {"status": status})() for status in ("RUNNING", "PENDING"))
    for trials in ([waiting], [running, waiting], [running], [waiting]):
        watching.on_step_end(1, trials)
        now[0] += 0.9 * progress.PLACE_S
        watching.on_step_end(1, trials)
    now[0] += progress.PLACE_S
    with pytest.raises(ClientError, match="no run has found a place"):
        watching.on_step_end(1, [waiting])
