"""FedBuff: clients train asynchronously on a virtual clock, and the server steps once K updates are in its buffer.

Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022, arXiv:2106.06639, algorithm 1
with staleness weights s(tau).   x_t: server model after t steps;  M: concurrency, the number of clients that train at
the same time;  K: size of the buffer, K <= M;  y_i: client i's model after local SGD from x_(t - tau_i);  tau_i:
staleness, the number of server steps since client i began to train;  w_i: client i's weight;  eta: ``server_lr``.

    x_(t+1) = x_t + eta sum_i w_i s(tau_i) (y_i - x_(t - tau_i)) / sum_i w_i,   s(tau) = (1 + tau)^(-1/2)

A round of the engine is one server step, and its participants are the clients whose replies fill the buffer. The time
of a client's training is (n_i / mean n) exp(spread z_i). n_i: number of client i's examples;  z_i: the client's
standard normal slowness, which is constant and equal to that of the straggler rules. So the unit is the time in which a
client of median speed trains on the mean number of examples; communication takes no time. Shared examples count in n_i
as own ones, and ``client.equal_work`` has no influence on the clock. So compare times only of runs with the same
sharing. The metric ``server/time`` is the time of the step, ``server/staleness`` the mean of tau_i.

With ``refill`` reply, a client that ends its training is replaced at once by an idle client, chosen uniformly; with
``refill`` step, all free places are filled after the server step. With K = M and ``refill`` step, FedBuff is FedAvg
with M clients per round, and the clock measures synchronous rounds.

If a reply is rejected, the step takes place without it, and the client is idle again. The server stores the models
x_(t - tau) from which clients still train, at most M.

Departs from the paper: the default K is a tenth of M (paper: K = 10), because 10 exceeds small federations. A client
trains at most once per server step, so it is not chosen again before the step that uses its update. In the engine,
clients train in the round of their reply. Clients scale their updates by s(tau_i), not the server, so
``federation.max_norm`` limits the scaled updates. Learning rate schedules, and the BatchNorm statistics from which a
client starts, are those of that round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch

from fedcommons.core.algorithm import Facts, Merged, Message, Replies, Reply, State
from fedcommons.core.averaging import summed_weight, weighted_reply
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, flat, scalar, scale
from fedcommons.flat_tensors import data as data_of
from fedcommons.seeding import numpy_generator

IDLE = -1.0
"""Value in the state's ``ends`` for a client that does not train."""


@dataclass(frozen=True)
class FedBuff:
    """x <- x + eta sum_i w_i s(tau_i) (y_i - x_i) / sum_i w_i over the first K clients that end their training.

    x_i: the server model with which client i began;  y_i: its trained model;  tau_i: server steps between both;
    s(tau) = (1 + tau)^(-exponent).

    Raises:
        UserError: the buffer exceeds the concurrency, or the concurrency exceeds the number of clients.
    """

    buffer: Annotated[int | None, "[1, 1e9]"] = None
    """K, number of updates per server step; default: a tenth of the concurrency, rounded up"""
    concurrency: Annotated[int | None, "[1, 1e9]"] = None
    """M, number of clients that train at the same time; default: all clients"""
    server_lr: Annotated[float, "(0, 1e38]"] = 1.0
    """eta, learning rate of the server"""
    exponent: Annotated[float, "[0, 1e3]"] = 0.5
    """a in the weight (1 + tau)^(-a) of an update that is tau server steps old; 0: no weighting by staleness"""
    spread: Annotated[float, "[0, 30]"] = 1.0
    """standard deviation over clients of the logarithm of their speed (examples per time); 0: equal speeds"""
    refill: Annotated[str, "reply | step"] = "reply"
    """when idle clients begin to train: one after each reply, or after a server step in all free places"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if (share := fields["federation.participation"]) < 1:
            raise UserError(
                f"fedbuff needs federation.participation 1, got {share:g}: fedbuff.concurrency is the number of "
                "clients that train at the same time."
            )
        if fields["straggler.rule"] != "independent" or fields["straggler.q"]:
            raise UserError(
                "fedbuff needs straggler.rule independent with straggler.q 0: its clock decides when replies arrive."
            )

    def _sizes(self, n_clients: int) -> tuple[int, int]:
        """Return K and M."""
        concurrency = n_clients if self.concurrency is None else self.concurrency
        return -(-concurrency // 10) if self.buffer is None else self.buffer, concurrency

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, int]:
        """Return the buffer's size and the concurrency that a run uses."""
        return dict(zip(("buffer", "concurrency"), self._sizes(facts.n_clients), strict=True))

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        n = facts.n_clients
        buffer, concurrency = self._sizes(n)
        if not buffer <= concurrency <= n:
            raise UserError(
                f"fedbuff.buffer must be at most fedbuff.concurrency, which must be at most the number of clients, "
                f"{n}: got {buffer} and {concurrency}."
            )
        slowness = [numpy_generator(seed, "slowness", i).standard_normal() for i in range(n)]
        durations = np.array(facts.sizes) / np.mean(facts.sizes) * np.exp(self.spread * np.array(slowness))
        state = {
            "model": model,
            "seed": torch.tensor(seed),
            "step": torch.tensor(0),  # t
            "time": torch.tensor(0.0, dtype=torch.float64),  # of the last server step
            "durations": torch.from_numpy(durations),  # (N,) time of a client's training
            "started": torch.zeros(n, dtype=torch.int64),  # (N,) t - tau_i
            "ends": torch.full((n,), IDLE, dtype=torch.float64),  # (N,) time at which a client ends its training
        }
        return self._until_full(state)

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Return the K clients whose replies fill the buffer."""
        return data_of(state["buffer"]).tolist()

    def down(self, state: State, round: int, client: int) -> Message:
        started = int(data_of(state["started"])[client])
        weight = (1 + int(scalar(state, "step")) - started) ** -self.exponent
        x = state.get(f"version/{started}", state["model"])
        return Message({}, {"model": x, "weight": torch.tensor(weight, dtype=torch.float64)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.individual, "model")
        reply = weighted_reply(x, work.local(x, data, seed), work.weight(data))
        weighted = scale(flat(reply.sums, "delta"), scalar(message.individual, "weight"))
        return replace(reply, sums={"delta": weighted})

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> Merged:
        x, t = flat(state, "model"), int(scalar(state, "step"))
        started, ends = (data_of(state[name]).tolist() for name in ("started", "ends"))
        needed = {f"version/{v}" for v, end in zip(started, ends, strict=True) if end != IDLE}
        versions = {name: model for name, model in {**state, f"version/{t}": x}.items() if name in needed}
        after = {name: value for name, value in state.items() if not name.startswith("version/")} | versions
        after["model"] = add(x, flat(total, "delta"), self.server_lr / summed_weight(replies))
        after |= {"step": torch.tensor(t + 1), "time": state["due"]}
        numbers = {"time": scalar(state, "due"), "staleness": fmean(t - started[i] for i in replies)}
        return self._until_full(after), numbers

    def _until_full(self, state: State) -> State:
        """Run the clock to the next server step; return ``state`` with ``buffer``, the clients that fill it.

        ``due``: time of the step. All clients that begin before the step train from the current model.
        """
        started, ends = (data_of(state[name]).numpy().copy() for name in ("started", "ends"))
        durations, t, now = data_of(state["durations"]).numpy(), int(scalar(state, "step")), scalar(state, "time")
        size, concurrency = self._sizes(len(ends))
        draws = numpy_generator(int(data_of(state["seed"])), "participants", t + 1)  # in round 1, FedAvg's clients

        def begin(idle: np.ndarray, count: int) -> None:
            chosen = idle if count == len(idle) else idle[draws.choice(len(idle), count, replace=False, shuffle=False)]
            ends[chosen] = now + durations[chosen]

        buffer: list[int] = []
        idle = np.flatnonzero(ends == IDLE)
        started[idle] = t
        begin(idle, concurrency - (len(ends) - len(idle)))
        while len(buffer) < size:
            first = int(np.where(ends == IDLE, np.inf, ends).argmin())  # of equal times, the lowest client number
            now = float(ends[first])
            ends[first] = IDLE
            buffer.append(first)
            idle = np.setdiff1d(np.flatnonzero(ends == IDLE), buffer)
            if self.refill == "reply" and len(idle) and len(buffer) < size:
                begin(idle, 1)
        new = {"started": started, "ends": ends, "buffer": np.sort(buffer), "due": np.float64(now)}
        return {**state, **{name: torch.as_tensor(value) for name, value in new.items()}}
