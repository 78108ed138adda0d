"""SCAFFOLD: control variates correct client drift in local SGD.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, arXiv:1910.06378,
algorithm 1, with server step 1.   x: server model;  y_i: client i's model after K steps with learning rate eta; f_i:
client i's loss;  c, c_i: control variates of server and client i, zero at first;  w_i: client i's weight;  n_i: number
of client i's examples;  S: the clients of the round;  N: the number of all clients.

Departs from the paper: with ``weighting="samples"`` the weights w_i / sum_j w_j replace the paper's 1/|S| and 1/N. The
sum over j is over S for the model and over all N clients for c. Then c is the weighted mean of the c_i, and the fixed
point is the minimum of sum_i n_i f_i. Option 1 computes the full gradient at x in evaluation mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import constant
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, flat, scalar, scale, select, sub, zeros_like
from fedcommons.privacy.release import Release


@dataclass(frozen=True)
class SCAFFOLD:
    """Local steps y <- y - eta (g_i(y) - c_i + c);  x <- x + mean_S(y_i - x);  c <- c + (1/N) sum_S (c_i+ - c_i).

    x: server model;  y: client i's model;  g_i: its gradient;  eta: learning rate;  c, c_i: control variates of server
    and client i;  S: the round's clients, of N in total.  New c_i+ = c_i - c + (x - y_i)/(K eta) for K steps (option
    2), or the gradient of client i's loss at x (option 1).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True)

    option: Annotated[int, "[1, 2]"] = 2
    """rule for a client's new control variate: 1 (gradient at the server model) or 2 (from the local steps)"""

    def check(self, fields: Mapping[str, Any]) -> None:
        require_sgd("scaffold", fields, momentum=self.option == 1, instead=" or scaffold.option 1")
        if fields["dp.local"] and self.option == 1:
            raise UserError("scaffold.option must be 2 with dp.local: option 1 sends a gradient that has no noise.")

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        everybody = torch.tensor(facts.total_weight, dtype=torch.float64)
        return {"model": model, "control": zeros_like(model), "everybody": everybody}

    def down(self: object, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"], "control": state["control"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        eta, _ = work.sgd(f"SCAFFOLD with option {self.option}", momentum=self.option == 1)
        at_x = work.gradient(flat(message.common, "model"), data) if self.option == 1 else None
        return controlled(work, message, memory, data, seed, eta, at_x)

    def merge(
        self: object, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> State:
        return {
            "model": weighted_mean(flat(state, "model"), total, replies),
            "control": add(flat(state, "control"), flat(total, "control"), 1 / scalar(state, "everybody")),
            "everybody": state["everybody"],
        }


def controlled(
    work: Work, message: Message, memory: Payload, data: ClientData, seed: int, eta: float, at_x: Flat | None = None
) -> Reply:
    """Train with control variates, which may exist for some layers only, and return the client's reply.

    eta: learning rate. at_x: gradient of the client's loss at x, for option 1; None: option 2.
    """
    x, c, w = flat(message.common, "model"), flat(message.common, "control"), work.weight(data)
    c_i = flat(memory, "control") if memory else zeros_like(c)
    y, metrics, spent = work.local(x, data, seed, add_to_grad=constant(sub(c, c_i)))
    delta = sub(y, x)
    if at_x is None:
        corrected = delta if c.layout == delta.layout else select(delta, c.layout.names)
        new = add(sub(c_i, c), corrected, -1 / (float(metrics["steps"]) * eta))
    else:  # Option 1's gradient has no noise, hence no guarantee.
        new, spent = at_x, Release()
    sums = {"delta": scale(delta, w), "control": scale(sub(new, c_i), w)}
    return Reply(sums, weight=w, memory={"control": new}, metrics=metrics, releases=[spent.with_names(*sums)])


def require_sgd(name: str, fields: Mapping[str, Any], *, momentum: bool, instead: str = "") -> None:
    """Check that clients train with SGD, and without momentum unless the method allows ``momentum``.

    name: name of the method. instead: alternative to momentum 0, for the message.

    Raises:
        UserError: the optimizer or the momentum is another.
    """
    if fields["client.optimizer"] != "sgd":
        raise UserError(f"client.optimizer must be sgd for {name}, whose formulas count SGD steps.")
    if fields["client.momentum"] and not momentum:
        raise UserError(
            f"client.momentum must be 0 for {name}, whose control variate (x - y_i)/(K eta) is a mean of gradients for "
            f"plain SGD only, got {fields['client.momentum']:g}; use momentum 0{instead}."
        )
