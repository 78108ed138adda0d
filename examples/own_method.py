"""A user-defined method: FedAvgM, which is FedAvg with momentum on the server.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv:1909.06335.   x: server model;  y_i: client i's model;  v: velocity.

Departs from the paper: all clients have equal weight. The package has FedAvgM too, with weights and a server learning
rate (``algorithms/server_optimizers.py``).

python examples/own_method.py         checks on a tiny federation that FedAvgM meets all requirements of a method
python sweeps/run.py --algorithm examples/own_method.py:FedAvgM --fedavgm.beta 0.5
"""

from dataclasses import dataclass
from typing import Annotated

from fedcommons import (
    ClientData,
    Executor,
    Facts,
    Flat,
    Message,
    Payload,
    Replies,
    Reply,
    State,
    Work,
    add,
    check_algorithm,
    flat,
    scale,
    sub,
    zeros_like,
)


@dataclass(frozen=True)
class FedAvgM:
    """x <- x + v, with velocity v <- beta v + mean_i (y_i - x);  x: server model, y_i: client i's trained model."""

    beta: Annotated[float, "[0, 1)"] = 0.9
    """beta, momentum of the server"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "velocity": zeros_like(model)}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, metrics, spent = work.local(x, data, seed)
        return Reply({"delta": sub(y, x)}, metrics=metrics, releases=[spent.with_names("delta")])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        v = add(scale(flat(state, "velocity"), self.beta), flat(total, "delta"), 1 / len(replies))
        return {"model": add(flat(state, "model"), v), "velocity": v}


if __name__ == "__main__":
    check_algorithm(FedAvgM())
    print("FedAvgM keeps every promise of a method.")
