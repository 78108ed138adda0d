"""Somebody's code is handed our arrays: what it writes into them reaches nobody else, or is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedcommons.config.flat import choose
from fedcommons.runs import build, inputs

PARTITIONS = """
import numpy as np
import torch


def by_numpy(labels, n_clients):
    labels[:] = 0
    return np.array_split(np.arange(len(labels)), n_clients)


def by_a_view(labels, n_clients):
    labels.sort()
    return np.array_split(np.arange(len(labels)), n_clients)


def by_force(labels, n_clients):
    labels.setflags(write=True)
    return by_numpy(labels, n_clients)


def by_torch(labels, n_clients):
    torch.from_numpy(labels).zero_()
    return np.array_split(np.arange(len(labels)), n_clients)


def for_ever(labels, n_clients):
    while True:
        yield np.arange(2)
"""


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lab.py").write_text(PARTITIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch, in the last partition
@pytest.mark.parametrize("name", ["by_numpy", "by_a_view", "by_force", "by_torch"])
def test_a_partition_does_not_rewrite_the_training_labels(name: str) -> None:
    config = choose({"partition.name": f"lab.py:{name}", "partition.n_clients": 2, "data.limit": 40})
    before = inputs.load(config.data)
    labels = before.train.y.numpy().copy()
    if name in ("by_numpy", "by_a_view"):
        with pytest.raises(Exception, match="read-only"):
            build.prepare(config)
    else:
        dealt = build.prepare(config)
        assert dealt.partition.class_counts.sum(0).tolist() == np.bincount(labels, minlength=10).tolist()
        assert dealt.dataset.digest == before.digest
    assert torch.equal(build._load(config.data, config.source.get("data")).train.y, torch.from_numpy(labels))


def test_a_partition_that_never_ends_is_refused() -> None:
    with pytest.raises(Exception, match="deals a row twice"):
        build.prepare(choose({"partition.name": "lab.py:for_ever", "partition.n_clients": 2, "data.limit": 40}))
