# pyright: reportMissingImports=false
"""LR_MNIST with Flower's simulation engine: Ray, two actors of one CPU each."""

import os
import time
from collections.abc import Iterable
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from lr_mnist_flower_app import app
from lr_mnist_work import CLIENTS, JOINING, ROUNDS, data, report, softmax_regression

torch.set_num_threads(1)
began: list[float] = []
ended: list[float] = []
arrays: list[ArrayRecord] = []
server = ServerApp()


class Timed(FedAvg):
    """Flower's FedAvg, with the clients of our rounds."""

    def configure_train(self, server_round: int, *args: Any, **more: Any) -> Iterable[Message]:
        began.append(time.time())
        joining = data()["joining"][server_round - 1].tolist()
        for message, i in zip(super().configure_train(server_round, *args, **more), joining, strict=True):
            config = ConfigRecord({"client": i})
            message.content = RecordDict({"arrays": message.content["arrays"], "config": config})
            yield message

    def aggregate_train(self, *args: Any, **more: Any) -> Any:
        result = super().aggregate_train(*args, **more)
        ended.append(time.time())
        return result


@server.main()
def main(grid: Any, context: Any) -> None:
    """All rounds."""
    strategy = Timed(
        fraction_train=JOINING / CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=JOINING,
        min_available_nodes=CLIENTS,
    )
    first = ArrayRecord(softmax_regression().state_dict())
    arrays.append(strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS).arrays)


if __name__ == "__main__":
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app=server, client_app=app, num_supernodes=CLIENTS, backend_name="ray",
        backend_config={"init_args": {"num_cpus": 2, "include_dashboard": False}, "client_resources": resources},
    )  # fmt: skip
    model = softmax_regression()
    model.load_state_dict(arrays[0].to_torch_state_dict())
    report("Flower, 2 actors", began[0], ended[-1], model)
