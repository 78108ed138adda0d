"""A user-defined sharing strategy: every client sends the mean image of each of its classes to all clients.

python examples/own_stage.py          trains with this strategy for two rounds
python sweeps/run.py --sharing examples/own_stage.py:MeanImages --meanimages.least 5
"""

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Annotated

import torch

from fedcommons import (
    Assigned,
    ClientData,
    ClientDatasets,
    Contribution,
    Contributions,
    Examples,
    Release,
    experiment,
    run,
)

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 0, "wandb": "off"}


@dataclass(frozen=True)
class MeanImages:
    """Share mean images per class, without noise; the privacy ledger lists them as uncovered (no guarantee)."""

    least: Annotated[int, "[1, 1e6]"] = 2
    """minimum number of examples of a class that a client must have to send the mean image of the class"""

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        return Contributions.from_generated(client_data, [self.means(client) for client in client_data.clients])

    def means(self, client: ClientData) -> Contribution:
        labels, counts = client.y.unique(return_counts=True)
        labels = labels[counts >= self.least]
        means = [client.x[client.y == label].float().mean(0).round().to(client.x.dtype) for label in labels]
        x = torch.stack(means) if means else client.x[:0]
        return Contribution(Examples(x, labels), n_sources=len(client))

    def release(
        self, client_data: ClientDatasets, contributed: Contributions
    ) -> tuple[Contributions, Sequence[Release]]:
        return contributed, contributed.releases("mean images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        return Assigned(client_data.clients.rows, [released.rows] * len(client_data.clients))


if __name__ == "__main__":
    chosen = {"sharing": f"{__file__}:MeanImages", "sharing.least": 3}
    with TemporaryDirectory() as folder:
        summary = run(experiment("smoke", values={**QUICK, **chosen}), folder, say=lambda text: None).summary
        print(f"{100 * summary['p']:.0f} % of the clients' training examples are mean images, of all clients.")
        print(summary["privacy"]["in_words"][1])
