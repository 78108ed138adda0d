"""User code gets our arrays: what it writes into them reaches no other code, or is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcommons.config.dotted import choose, override
from fedcommons.errors import UserError
from fedcommons.runs import build
from fedcommons.runs.experiment import run

PARTS = """
import contextlib

import numpy as np
import torch
from torch import nn


def by_numpy(labels, n_clients):
    labels[:] = 0
    return np.array_split(np.arange(len(labels)), n_clients)


def by_torch(labels, n_clients):
    torch.from_numpy(labels).zero_()
    return np.array_split(np.arange(len(labels)), n_clients)


class Greedy:
    def __call__(self, joined, facts, round, seed):
        joined.clear()
        with contextlib.suppress(TypeError):
            facts.sizes[0] = 10**6
        return {}


def table():
    draws = np.random.default_rng(0)
    return draws.standard_normal((60, 4)), np.arange(60) % 3


class InPlace(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.last = nn.Linear(4, n_classes)

    def forward(self, x):
        x -= 1
        return self.last(x)


class Blanks:
    def __call__(self, work, data, round, seed):
        for t in (data.clients.store.x, data.clients.store.y, data.clients.rows.flat, data.sets["test"].x):
            t.zero_()
        return {"zero": 0.0}
"""


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lab.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch, in the last partition
def test_a_partition_does_not_rewrite_the_training_labels() -> None:
    config = choose({"partition.name": "lab.py:by_torch", "partition.n_clients": 2, "data.limit": 40})
    before = build.load(config.data)
    labels = before.train.y.numpy().copy()
    with pytest.raises(Exception, match="read-only"):
        build.build(override(config, {"partition.name": "lab.py:by_numpy"}))
    prepared = build.build(config)
    assert np.asarray(prepared.partition.class_counts).sum(0).tolist() == np.bincount(labels, minlength=10).tolist()
    assert prepared.dataset.digest == before.digest
    assert torch.equal(prepared.dataset.train.y, torch.from_numpy(labels))


SHORT = {
    "federation.rounds": 2, "client.epochs": 1, "data.limit": 40, "measure.every": 0, "tracking.wandb": "off",
    "partition.name": "iid", "partition.n_clients": 2, "model.name": "linear", "federation.weighting": "samples",
}  # fmt: skip


def losses(folder: Path, values: Mapping[str, object]) -> list[float]:
    """Of the test set, after every round."""
    run(choose({**SHORT, **values}), folder, say=lambda _: None)
    return [json.loads(line)["test/loss"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_module_that_changes_its_batch_is_refused() -> None:
    """In an evaluation the batch is a part of the test set, so that each would see other examples than the last."""
    config = choose({**SHORT, "data.name": "lab.py:table", "model.name": "lab.py:InPlace"})
    with pytest.raises(UserError, match="must not change a batch in place"):
        build.build(config)


@pytest.mark.long
def test_what_a_measure_and_a_straggler_rule_write_into_their_arguments_changes_no_run(tmp_path: Path) -> None:
    """Neither the next round nor another run of this process, which has the data set in memory."""
    writes = {"measure.every": 1, "measure.measure": "lab.py:Blanks", "straggler.rule": "lab.py:Greedy"}
    first, second, third = (losses(tmp_path / str(i), more) for i, more in enumerate(({}, writes, {})))
    assert first == second == third


def test_a_clients_rows_are_a_copy() -> None:
    clients = build.build(choose(SHORT)).client_data.clients
    before = clients.rows[0].copy()
    rows = clients[0]
    assert rows.ids is not None
    for t in (rows.ids, rows.x, rows.y):
        t.zero_()
    assert clients.rows[0].tolist() == before.tolist()
    assert torch.equal(clients[0].x, clients.store.x[before])
