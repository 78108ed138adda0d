"""Threads, forks, and runs within runs: right to the bit, or refused in a sentence."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from forked import forked

from fedcommons import ClientError, Experiment, UserError, check_algorithm, experiment, sweep
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay
from papers.fedssyn.central import Central
from papers.fedssyn.central import run as train_centrally

DROPOUT = """
from torch import nn


def dropout(shape, n_classes):  # which draws from torch's default generator
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, n_classes))
"""
FIELDS = {
    "federation.rounds": 1, "client.epochs": 1, "tracking.wandb": "off", "measure.every": 0, "data.limit": 40,
    "partition.n_clients": 2, "partition.name": "iid",
}  # fmt: skip
Config = Callable[..., Experiment]
Plain = tuple[Path, list[bytes]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("lab") / "lab.py"
    path.write_text(DROPOUT)

    def make(**values: Any) -> Experiment:
        return experiment("smoke", "digits", {**FIELDS, "model.name": f"{path}:dropout", **values})

    return make


def play(config: Experiment, folder: Path, on_round: Callable[..., None] | None = None) -> list[bytes]:
    """Return the bits of a run in this folder."""
    run(config, folder, say=lambda text: None, on_round=on_round)
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
def test_a_thread_within_a_run_is_refused_and_two_runs_keep_bits(config: Config, plain: Plain, tmp_path: Path) -> None:
    """The inner run has another seed and another setting of torch."""
    refused, inner = list[int](), list[list[bytes]]()
    other = config(seed=7, **{"client.onednn": False})

    def call(number: int, metrics: object) -> None:
        for call in CALLS:
            with pytest.raises(UserError, match="another thread of this process"):
                in_a_thread(lambda call=call: call(config(), tmp_path, plain[0]))
            refused.append(number)
        inner.append(play(other, tmp_path / f"inner-{number}"))

    assert play(config(), tmp_path / "run", call) == plain[1]
    assert sorted(refused) == [0] * 5 + [1] * 5
    assert not (tmp_path / "other").exists()
    assert inner == [play(other, tmp_path / "alone")] * 2


@pytest.mark.long
def test_one_thread_after_another_has_the_same_bits_also_in_an_event_loop_and_after_a_run_that_failed(
    config: Config, plain: Plain, tmp_path: Path
) -> None:
    async def in_the_loop() -> list[bytes]:
        return play(config(), tmp_path / "in a loop")

    with pytest.raises(ClientError):
        in_a_thread(lambda: play(config(**{"client.lr": 1e30}), tmp_path / "fails"))
    assert in_a_thread(lambda: play(config(), tmp_path / "in a thread")) == plain[1]
    assert asyncio.run(in_the_loop()) == plain[1]


@pytest.mark.long
def test_a_fork_is_free_whichever_thread_made_it(config: Config, plain: Plain, tmp_path: Path) -> None:
    ended: dict[str, int] = {}

    def fork(name: str) -> None:
        def action() -> None:
            Thread(target=lambda: None).start()
            assert play(config(), tmp_path / name) == plain[1]

        ended[name] = forked(action, tmp_path).code

    def both(number: int, metrics: object) -> None:
        if not number:
            fork("by the same")
            in_a_thread(lambda: fork("by another"))

    assert play(config(), tmp_path / "run", both) == plain[1]
    assert ended == {"by the same": 0, "by another": 0}
