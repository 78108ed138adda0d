"""``gpus_per_actor auto``: a pure function of bytes, processes and GPUs, and what is measured for it."""

from itertools import product
from pathlib import Path

import pytest
import torch

from fedcommons import experiment
from fedcommons.config import parts
from fedcommons.config.experiment import Experiment
from fedcommons.core import batched
from fedcommons.errors import UserError
from fedcommons.federation import cluster
from fedcommons.runs import gpu_need
from fedcommons.runs.build import prepare
from fedcommons.runs.gpu_need import play, share, with_share

GB = 2**30


@pytest.mark.parametrize(
    ("need", "total", "processes", "gpus", "expected"),
    [
        (10 * GB, 80 * GB, 4, 1, 0.25),  # as many as there are
        (10 * GB, 80 * GB, 16, 1, 0.125),  # as many as have room
        (30 * GB, 80 * GB, 4, 1, 0.5),
        (10 * GB, 80 * GB, 4, 2, 0.5),  # spread over both
        (10 * GB, 80 * GB, 5, 2, 0.3333),
        (10 * GB, 80 * GB, 2, 4, 1.0),
        (79 * GB, 80 * GB, 8, 1, 1.0),
        (90 * GB, 80 * GB, 8, 1, 1.0),
        (0, 0, 4, 1, 0.25),  # not known
        (1, 80 * GB, 10**6, 1, 0.0001),
    ],
)
def test_a_share_is_a_place_for_each_process_with_room(
    need: int, total: int, processes: int, gpus: int, expected: float
) -> None:
    assert share(need, total, processes, gpus) == expected


def test_no_more_share_a_gpu_than_have_room_and_none_is_left_out() -> None:
    for need, processes, gpus in product((1, 7, 20, 41, 80), range(1, 20), range(1, 5)):
        each = share(need * GB, 80 * GB, processes, gpus)
        there = int(1 / each + 1e-9)
        assert there * need <= 80
        assert there * gpus >= processes or (there + 1) * need > 80  # all have a place at once, or memory forbids it


@pytest.mark.parametrize("value", ["half", 0, 1.5, "Auto", True])
def test_other_words_and_numbers_are_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"^federation\.gpus_per_actor (must lie in \[0\.0001, 1\] or be auto|takes)"):
        prepare(experiment("smoke", values={"federation.gpus_per_actor": value}))


def _config(**values: object) -> Experiment:
    return experiment("smoke", values={"federation.gpus_per_actor": "auto", "data.limit": 100, **values})


def test_without_gpus_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "gpu_share", lambda wanted: 0)
    assert with_share([one := _config()], 4) == [one]


@pytest.mark.parametrize("setting", ["real", "shuffled_synthetic"])
@pytest.mark.long
def test_what_is_played_writes_nothing_and_what_it_took_is_told(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(parts.HERE, str(tmp_path))  # it is set there, and is to be as before
    played = list[str]()
    monkeypatch.setattr(gpu_need, "play", lambda config: (played.append(config.algorithm), play(config)))
    monkeypatch.setattr(gpu_need, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_need, "default_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: played.append("begins"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: len(played) * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: type("", (), {"total_memory": 80 * GB}))
    config = _config(**{"sharing.setting": setting, "algorithm": "scaffold", "measure.every": 1})
    assert gpu_need.measured(str(tmp_path), config) == (2 * GB + gpu_need.CONTEXT, 80 * GB)
    assert played == ["begins", "scaffold"]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("blocks", "share", "expected"), [(4, 1.0, [3]), (1, 1.0, [10]), (10, 1.0, []), (1, 0.38, [3])]
)
def test_of_batched_clients_a_whole_block_is_played(
    blocks: int, share: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten clients, or a share of them, cut: what a block's take at once is what a process needs."""
    sizes, train = list[int](), batched.train
    monkeypatch.setattr(batched, "train", lambda work, asked: (sizes.append(len(asked)), train(work, asked))[1])
    values = {"client.batched": True, "federation.blocks": blocks, "federation.participation": share}
    play(_config(**{**values, "partition.n_clients": 10}))
    assert sizes == expected
