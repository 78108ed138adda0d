"""A right part of every kind; test_boundaries.py breaks one method at a time. Its text is what is run."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from pytorch_lightning import LightningModule
from sklearn.datasets import load_iris
from torch import nn
from torch.nn import functional as F

import fedcommons as fc
from fedcommons.generators.requests import requests_of_clients


class Method:
    def start(self, model, facts, seed):
        return {"model": model}

    def down(self, state, round, client):
        return fc.Message({"model": state["model"]})

    def client(self, work, message, memory, data, round, seed):
        x = message.common["model"]
        y, metrics, spent = work.local(x, data, seed)
        return fc.Reply({"delta": fc.sub(y, x)}, metrics=metrics, releases=[spent.with_names("delta")])

    def merge(self, executor, state, total, replies, round, seed):
        if not replies:
            return state
        return {"model": fc.add(state["model"], total["delta"], 1 / len(replies))}


class Chooses(Method):
    def participants(self, state, round):
        return [0]


class Shares(Method):
    def share(self, clients, n_classes, seed):
        return fc.Common(clients.store[:2], 8, [])


class Plain:
    def make(self, client_data, generated):
        return fc.Contributions.from_real_rows(client_data, [rows[:2] for rows in client_data.clients.rows])

    def release(self, client_data, contributed):
        return contributed, contributed.releases("examples")

    def assign(self, client_data, released):
        rows_of_each = released.rows_by_client(len(client_data.clients))
        return fc.Assigned(client_data.clients.rows, [rows_of_each[i - 1] for i in range(len(rows_of_each))])


class Long(Plain):
    def shorter(self):
        return type(self)(), 2.0


class Needing(Plain):
    def make(self, client_data, generated):
        return fc.Contributions.from_generated(client_data, generated)

    def requests(self, client_data, recipe):
        return requests_of_clients(0.2, client_data, recipe)


@dataclass(frozen=True)
class Maker:
    sampling: ClassVar[tuple[str, ...]] = ()
    epochs: ClassVar[int] = 1

    def fit(self, examples, n_classes, seed, epochs, *, flip=False):
        return {epoch: fc.TrainedGenerator({"mean": examples.x.float().mean(0)}) for epoch in epochs}

    def sample(self, weights, shape, n_classes, labels, seed):
        return weights["mean"].to(torch.uint8).expand(len(labels), *shape).clone()


@dataclass(frozen=True)
class Late:
    def __call__(self, joined, facts, round, seed):
        return {}


class Net(LightningModule):
    def __init__(self, shape, n_classes, lr):
        super().__init__()
        self.lr, self.last = lr, nn.Linear(64, n_classes)

    def forward(self, x):
        return self.last(x.flatten(1).float() / 255)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Watch:
    def log(self, round, metrics):
        pass

    def finish(self, summary):
        pass


class Look:
    def __call__(self, work, data, round, seed):
        return {"one": 1.0}


class Flowers:
    def __init__(self):
        x, self.y = map(np.asarray, load_iris(return_X_y=True))
        self.x = (x - x.mean(0)) / x.std(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def cut(labels, n_clients, rng):
    return np.array_split(rng.permutation(len(labels)), n_clients)
