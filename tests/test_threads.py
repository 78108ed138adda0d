"""Threads, forks, and runs within runs: right to the bit, or refused in a sentence."""

import asyncio
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path
from threading import Thread
from typing import Any

import pytest

from fedcommons import check_algorithm, sweep
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.errors import ClientError, UserError
from fedcommons.runs.central import Central
from fedcommons.runs.central import run as train_centrally
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay

LAB = """
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedcommons import experiment, run
from fedcommons.algorithms.fedavg import FedAvg


def dropout(shape, n_classes):  # which draws from torch's default generator
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, n_classes))


def start_another(folder):
    number = len(list(Path(folder).glob("inner-*")))
    fields = {FIELDS} | {"model.name": f"{__file__}:dropout", "seed": 7, "client.onednn": False}
    run(experiment("smoke", values=fields), Path(folder) / f"inner-{number}", say=lambda text: None)


class Starting:
    def __init__(self, at=""):
        self.at = at

    def log(self, round, metrics):
        start_another(self.at)

    def finish(self, summary): ...


@dataclass(frozen=True)
class Nested(FedAvg):
    at: str = ""

    def client(self, *given):
        if self.at:
            start_another(self.at)
        return super().client(*given)
"""

FIELDS = {
    "federation.rounds": 1, "client.epochs": 1, "tracking.wandb": "off", "measure.every": 0, "data.limit": 40,
    "partition.n_clients": 2, "partition.name": "iid",
}  # fmt: skip
Config = Callable[..., Experiment]
Plain = tuple[Path, list[bytes]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "lab.py"
    path.write_text(LAB.replace("{FIELDS}", repr(FIELDS)))
    return path


@pytest.fixture(scope="module")
def config(lab: Path) -> Config:
    def make(**values: Any) -> Experiment:
        return presets.experiment("smoke", "digits", {**FIELDS, "model.name": f"{lab}:dropout", **values})

    return make


def play(config: Experiment, folder: Path, on_round: Callable[..., None] | None = None) -> list[bytes]:
    run(config, folder, say=lambda text: None, on_round=on_round)
    return bits(folder)


def bits(folder: Path) -> list[bytes]:
    files = [folder / "rounds.jsonl", *sorted((folder / "checkpoints").glob("*.safetensors"))]
    return [file.read_bytes() for file in files]


@pytest.fixture(scope="module")
def plain(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """A run of the main thread: its folder and its bits."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, play(config(), folder)


def in_a_thread(action: Callable[[], object]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(action).result()


CALLS: list[Callable[[Experiment, Path, Path], object]] = [
    lambda config, folder, plain: run(config, folder / "other"),
    lambda config, folder, plain: sweep([config], folder / "other"),
    lambda config, folder, plain: replay(plain, 1, 0, named=[config.model.name]),
    lambda config, folder, plain: check_algorithm(FedAvg()),
    lambda config, folder, plain: train_centrally(Central("central_real", config, 1), folder / "other"),
]


@pytest.mark.long
def test_another_thread_is_refused_and_the_first_has_its_bits(config: Config, plain: Plain, tmp_path: Path) -> None:
    refused: list[int] = []

    def call(number: int, metrics: object) -> None:
        for call in CALLS:
            with pytest.raises(UserError, match="another thread of this process"):
                in_a_thread(lambda call=call: call(config(), tmp_path, plain[0]))
            refused.append(number)

    assert play(config(), tmp_path / "run", call) == plain[1]
    assert sorted(refused) == [0] * 5 + [1] * 5
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_one_thread_after_another_has_the_same_bits_also_in_an_event_loop_and_after_runs_that_failed(
    config: Config, plain: Plain, tmp_path: Path
) -> None:
    async def in_the_loop(action: Callable[[], object]) -> object:
        return action()

    def stop(number: int, metrics: object) -> None:
        raise MemoryError

    for error, values, on_round in ((ClientError, {"client.lr": 1e30}, None), (MemoryError, {}, stop)):
        with pytest.raises(error):
            in_a_thread(lambda values=values, at=on_round: play(config(**values), tmp_path / str(values), at))
    places: list[Callable[[Callable[[], object]], object]] = [
        in_a_thread,
        lambda action: asyncio.run(in_the_loop(action)),
    ]
    for number, where in enumerate(places):
        assert where(lambda number=number: play(config(), tmp_path / str(number))) == plain[1]


@pytest.mark.long
def test_a_run_within_a_run_of_a_tracker_or_a_method_changes_no_bit_of_either(
    lab: Path, config: Config, tmp_path: Path
) -> None:
    alone, inside = tmp_path / "alone", tmp_path / "inside"
    for folder in (alone, inside):
        folder.mkdir()
    run_path(str(lab))["start_another"](alone)
    usual = play(config(algorithm=f"{lab}:Nested"), tmp_path / "usual")
    at = {"tracking.tracker": f"{lab}:Starting", "tracking.at": str(inside), "nested.at": str(inside)}
    assert play(config(algorithm=f"{lab}:Nested", **at), tmp_path / "run") == usual
    nested = sorted(inside.iterdir())
    assert len(nested) == 4  # of two clients, and of rounds 0 and 1
    assert all(bits(folder) == bits(alone / "inner-0") for folder in nested)


@pytest.mark.long
def test_a_fork_is_free_whichever_thread_made_it(config: Config, plain: Plain, tmp_path: Path) -> None:
    ended: dict[str, int] = {}

    def fork(name: str) -> None:
        if not (process := os.fork()):
            code = 1
            try:
                Thread(target=lambda: None).start()
                code = 0 if play(config(), tmp_path / name) == plain[1] else 2
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ended[name] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def both(number: int, metrics: object) -> None:
        if not number:
            fork("by the same")
            in_a_thread(lambda: fork("by another"))

    assert play(config(), tmp_path / "run", both) == plain[1]
    assert ended == {"by the same": 0, "by another": 0}
