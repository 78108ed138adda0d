"""What one process holds for a whole run."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedcommons.algorithms.algorithm import Algorithm
from fedcommons.algorithms.local import Work
from fedcommons.data.clients import Clients
from fedcommons.data.datasets import Examples


def default_device() -> torch.device:
    """The GPU this process was given, if any, else the CPU: the one place that decides.

    On a GPU the same algorithms are chosen in every process, and none that rounds to TF32.
    """
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class RunData:
    """All the data of a run: what clients train on, their own real data, and named sets for evaluation."""

    clients: Clients
    own: Clients
    sets: Mapping[str, Examples]

    def to(self, device: torch.device) -> "RunData":
        """The same data on ``device``."""
        sets = {name: e.to(device) for name, e in self.sets.items()}
        clients = self.clients.to(device)
        return RunData(clients, clients if self.own is self.clients else self.own.to(device), sets)


@dataclass(frozen=True)
class Worker:
    """A module with its optimizer, the algorithm and the data, on one device."""

    work: Work
    algorithm: Algorithm
    data: RunData
