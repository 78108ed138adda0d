"""The digits of five clients, contributed images with a privacy receipt, and the privacy statement of releases."""

from collections.abc import Sequence
from typing import Any

import torch

from fedcommons import ClientDatasets, Clients, Contribution, Examples, Receipt
from fedcommons.config.schema import Data
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.privacy.statement import statement
from fedcommons.runs import build, load_data

DATASET = build.load(Data())
N = 5
RECEIPT = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=1.5, sensitivity=1.0, steps=20)
ONE_ROUND = {"federation.rounds": 1, "tracking.wandb": "off", "measure.every": 0, "client.epochs": 1}


def make_data() -> ClientDatasets:
    """Return the five clients' data in fresh memory, so that a test that changes the data affects no other test."""
    rows = load_data.partition_rows("iid", {}, DATASET.train.y.numpy(), DATASET.n_classes, 0, n_clients=N).rows
    train = Examples(DATASET.train.x.clone(), DATASET.train.y.clone())
    return ClientDatasets(Clients(train, rows), DATASET.n_classes, DATASET.flip, 0)


def images(receipt: Receipt | None = RECEIPT) -> list[Contribution]:
    """Return a contribution of two images per client; the pixels of client i's images have the value i."""
    x = torch.zeros(2, *DATASET.shape, dtype=torch.uint8)
    return [Contribution(Examples(x + client, torch.arange(2)), receipt, n_sources=10) for client in range(N)]


def stated(releases: Sequence[Release]) -> dict[str, Any]:
    return statement(Ledger.before_rounds(releases), N, 1e-5, rejected=0, local=False, secret=True)
