"""FedPVR: SCAFFOLD's correction is applied only to the last layers, in which the clients' models differ most.

Li et al., "On the effectiveness of partial variance reduction in federated learning with heterogeneous data", CVPR
2023, arXiv:2212.02191, algorithm 1.   The symbols are those of scaffold.py. The control variates c of the server and
c_i of client i exist, and are sent, for the selected layers only.

Departs from the paper: patterns select the layers. The default is all linear layers. For VGG-11 these are the layers of
the authors' code, which corrects every weight and bias after the 16th. Clients are weighted as in scaffold.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import layers_of
from fedcommons.core.local_training import constant
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, flat, scalar, scale, select, sub, zeros_like


@dataclass(frozen=True)
class FedPVR:
    """SCAFFOLD (option 2) on the layers whose names match a pattern, FedAvg on the other layers.

    Patterns use the syntax of file name patterns. A layer's name is a parameter's name without the last component. None
    selects all layers whose weight is a matrix, that is, linear layers. An empty string selects no layer.

    Raises:
        UserError: a pattern matches no layer, or ``layers`` is None and no layer is linear.
    """

    layers: str | None = None
    """corrected layers: name patterns such as network.head.*, separated by commas; default: all linear layers"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields["client.optimizer"] != "sgd":
            raise UserError("client.optimizer must be sgd for fedpvr, whose formulas count SGD steps.")
        if fields["client.momentum"]:
            raise UserError(
                "client.momentum must be 0 for fedpvr, whose control variate (x - y_i)/(K eta) is a mean of gradients "
                f"for plain SGD only, got {fields['client.momentum']:g}; use momentum 0."
            )

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        control = zeros_like(select(model, corrected(model, _patterns(self.layers))))
        everybody = torch.tensor(facts.total_weight, dtype=torch.float64)
        return {"model": model, "control": control, "everybody": everybody}

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, str]:
        """Return the names of the corrected layers that ``layers`` selects, separated by commas."""
        return {"layers": layers_of(corrected(model, _patterns(self.layers)))}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"], "control": state["control"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, c, w = flat(message.common, "model"), flat(message.common, "control"), work.weight(data)
        c_i = flat(memory, "control") if memory else zeros_like(c)
        eta, _ = work.sgd("FedPVR", momentum=False)
        y, metrics, spent = work.local(x, data, seed, add_to_grad=constant(sub(c, c_i)))
        delta = sub(y, x)
        new = add(sub(c_i, c), select(delta, c.layout.names), -1 / (float(metrics["steps"]) * eta))
        sums = {"delta": scale(delta, w), "control": scale(sub(new, c_i), w)}
        return Reply(sums, weight=w, memory={"control": new}, metrics=metrics, releases=[spent.with_names(*sums)])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {
            "model": weighted_mean(flat(state, "model"), total, replies),
            "control": add(flat(state, "control"), flat(total, "control"), 1 / scalar(state, "everybody")),
            "everybody": state["everybody"],
        }


def _patterns(text: str | None) -> list[str] | None:
    return None if text is None else [pattern.strip() for pattern in text.split(",") if pattern.strip()]


def corrected(model: Flat, patterns: Sequence[str] | None) -> list[str]:
    """Return the parameter names of the layers that match a pattern (None: linear layers), in the model's order."""
    layers: dict[str, list[str]] = {}
    for name in model:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    if patterns is None:
        chosen = {layer for layer, names in layers.items() if max(model[n].dim() for n in names) == 2}
        if not chosen:
            raise UserError(
                f"fedpvr.layers must name layers, as no layer is linear; the layers are {', '.join(layers)}."
            )
    else:
        for pattern in patterns:
            if not any(fnmatchcase(layer, pattern) for layer in layers):
                raise UserError(f"fedpvr.layers: {pattern!r} matches no layer; the layers are {', '.join(layers)}.")
        chosen = {layer for layer in layers if any(fnmatchcase(layer, p) for p in patterns)}
    return [name for layer, names in layers.items() if layer in chosen for name in names]
