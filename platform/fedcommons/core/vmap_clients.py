"""Clients of a block trained at once: their local steps are one tensor program (``torch.vmap`` over stacked weights).

N: the clients; each has its own weights, batches and number of steps, and the results are those of one after another
but for rounding. On networks of few pixels a step costs little beside torch's overhead a call, which is then paid once
for all clients; on a GPU launches fall by the number of clients.

A method's ``client`` is called twice: first up to its local training, which tells what it asks for (``asked``), then,
when all are trained, with the result (``Work.instead``). A client is trained alone where its method gives a loss of its
own, a rate of its own, or a correction of the gradient that is no ``Correction``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedcommons.core.functional_step import Step
from fedcommons.core.local_training import Batch, Correction, LocalResult, LocalSGD, onednn
from fedcommons.core.optimizers import plain_step
from fedcommons.core.trainer_shim import NO_NUMBER, NoClock
from fedcommons.data.clients import ClientData
from fedcommons.errors import ends, sentence
from fedcommons.flat_tensors import Flat
from fedcommons.privacy.release import UNCOVERED

if TYPE_CHECKING:
    from fedcommons.core.client_worker import Work

STEPWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that treat every number by itself, so that they may have those of all clients in one tensor."""


@dataclass(eq=False)
class Asked(BaseException):
    """A client has come to its local training, which starts from here; no ``except Exception`` of its own stops it."""

    start: Flat
    data: ClientData
    seed: int
    correction: Correction | None
    epochs: int


class _Alone(BaseException):
    """A client is to be trained alone."""


def _ask(
    work: "Work", loop: LocalSGD, start: Flat, data: ClientData, seed: int, own: Any, add_to_grad: Any
) -> LocalResult:
    """In place of a local training: raise what it asks for. own: a loss or rate of the method's own."""
    if loop is not work.loop or own is not None or not isinstance(add_to_grad, Correction | None):
        raise _Alone
    raise Asked(start, data, seed, add_to_grad, work.loop.epochs_for(len(data), data.n_own, work.share))


def asked(work: "Work", client: Callable[[], object]) -> Asked | None:
    """What local training this call of a method's ``client`` asks for; None if it is to be trained alone."""
    work.instead = _ask
    try:
        client()
    except Asked as request:
        return request
    except BaseException as error:  # of whatever kind: alone the client fails again, and is named
        if ends(error):
            raise
        return None
    finally:
        work.instead = None
    return None


def give(result: LocalResult) -> Callable[..., LocalResult]:
    """In place of a client's first local training."""

    def instead(work: "Work", *_: object) -> LocalResult:
        work.instead = None
        work.trained.append(result.spent)
        return result

    return instead


class Stacked:
    """The weights of N clients, (N, *shape) by name, with their optimizer, and sums over steps of what they log."""

    def __init__(self, work: "Work", starts: Sequence[Flat]) -> None:
        self.n, self.step = len(starts), Step(work.module)
        self.weights = {name: torch.stack([x[name] for x in starts]).requires_grad_() for name in work.named}
        of = {id(parameter): self.weights[name] for name, parameter in work.named.items()}
        groups = [
            {**group, "params": [of[id(p)] for p in group["params"] if id(p) in of], "lr": rate}
            for group, rate in zip(work.optimizer.param_groups, work.rates, strict=True)
        ]
        kind: Any = type(work.optimizer)
        self.update = plain_step(kind(groups))
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, list[int]] = {}

    def add_gradients(self, batches: Mapping[int, Batch], number: int) -> None:
        """Those of these clients' batches; batches of one shape are one call."""
        for weights in self.weights.values():
            weights.grad = None
        groups: dict[tuple, list[int]] = {}
        for i, batch in batches.items():
            groups.setdefault(tuple((t.shape, t.dtype) for t in batch), []).append(i)
        for rows in groups.values():
            self._add(rows, [torch.stack(column) for column in zip(*(batches[i] for i in rows), strict=True)], number)

    def _add(self, rows: list[int], columns: Sequence[Tensor], number: int) -> None:
        place = None if len(rows) == self.n else torch.tensor(rows, device=columns[0].device)
        weights = {n: w if place is None else w.index_select(0, place) for n, w in self.weights.items()}

        def of_client(weights: Mapping[str, Tensor], *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return functional_call(self.step, {f"inner.{n}": w for n, w in weights.items()}, (batch, number))

        values, logged = torch.vmap(of_client)(weights, *columns)
        values.sum().backward()
        for name, value in {**logged, "loss": values.detach()}.items():
            total = self.sums.setdefault(name, value.new_zeros(self.n))
            total.add_(value) if place is None else total.index_add_(0, place, value)
            counts = self.counts.setdefault(name, [0] * self.n)
            for i in rows:
                counts[i] += 1

    def means(self, i: int) -> dict[str, Tensor]:
        """What a client lost and logged, over the steps in which it did."""
        return {name: total[i] / self.counts[name][i] for name, total in self.sums.items() if self.counts[name][i]}

    def clip(self, most: float) -> None:
        """Each client's gradient to at most this norm."""
        grads = [w.grad for w in self.weights.values() if w.grad is not None]
        norms = torch.stack([g.reshape(self.n, -1).norm(dim=1) for g in grads]).norm(dim=0)
        factors = (most / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factors.view(-1, *[1] * (grad.dim() - 1)))

    def row(self, i: int) -> Tensor:
        """A client's weights as one vector."""
        return torch.cat([w.detach()[i].reshape(-1) for w in self.weights.values()])


def train(work: "Work", requests: Sequence[Asked]) -> list[LocalResult]:
    """The results of these local trainings, all at once.

    The module's clock stands at the beginning of a client's round.
    """
    loop, stacked = work.loop, Stacked(work, [r.start for r in requests])
    correct = _corrected([r.correction for r in requests])
    left = {i: chain.from_iterable(_epochs(loop, r)) for i, r in enumerate(requests)}
    ended: dict[int, Tensor] = {}
    if not work.module.training:
        work.module.train()
    with onednn(True):  # which one client's few pixels do not pay for, and those of all do
        for number in range(max(loop.steps_of(len(r.data), r.epochs) for r in requests)):
            batches = {i: batch for i, each in left.items() if (batch := next(each, None)) is not None}
            for i in left.keys() - batches.keys():  # whoever has ended keeps what it has
                ended[i] = stacked.row(i)
                del left[i]
            stacked.add_gradients(batches, number)
            if loop.clip_norm is not None:
                stacked.clip(loop.clip_norm)
            if correct:
                correct(stacked.weights)
            stacked.update()
    ended |= {i: stacked.row(i) for i in left}
    found = []
    for i, request in enumerate(requests):
        steps = loop.steps_of(len(request.data), request.epochs)
        model = Flat(request.start.layout, ended[i])
        found.append(LocalResult(model, {**stacked.means(i), "steps": steps}, UNCOVERED))
    return found


def _epochs(loop: LocalSGD, request: Asked) -> Iterator[Iterator[Batch]]:
    return (loop.batches(request.data, request.seed, epoch) for epoch in range(request.epochs))


def _corrected(corrections: Sequence[Correction | None]) -> Callable[[Mapping[str, Tensor]], None] | None:
    """Changes the gradients of stacked weights as each client's correction does; None: there are none.

    What all have in common, such as the server's model, is no stack.
    """
    first = corrections[0]
    if first is None:
        return None
    of_each = list(zip(*(c.of for c in corrections if c), strict=True))
    common = [all(x is xs[0] for x in xs) for xs in of_each]
    values = [
        dict(xs[0]) if shared else {name: torch.stack([x[name] for x in xs]) for name in xs[0]}
        for xs, shared in zip(of_each, common, strict=True)
    ]

    def of_client(weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], *of: Mapping[str, Tensor]) -> Any:
        rows: Any = {name: _Row(weights[name], grads[name]) for name in weights}
        first.function(rows, *of)
        return {name: row.grad for name, row in rows.items()}

    every = torch.vmap(of_client, in_dims=(0, 0, *(None if shared else 0 for shared in common)))

    def correct(weights: Mapping[str, Tensor]) -> None:
        grads = {name: w.grad for name, w in weights.items() if w.grad is not None}
        changed = every({name: weights[name].detach() for name in grads}, grads, *values)
        for name, grad in changed.items():
            weights[name].grad = grad

    return correct


class _Row:
    """A client's parameter, as a correction sees it."""

    def __init__(self, value: Tensor, grad: Tensor) -> None:
        self.value, self.grad = value, grad

    def detach(self) -> Tensor:
        return self.value


def flaw(work: "Work", batch: Batch) -> str | None:
    """Why clients of this module cannot be batched, tried on a batch; None where they can."""
    if len(work.buffers) or work.counters:
        return "it keeps statistics of its batches, as BatchNorm does"
    if work.schedulers:
        return "it has a learning rate scheduler of its own"
    if type(work.optimizer) not in STEPWISE:
        return f"its optimizer is {type(work.optimizer).__name__}, and not SGD, Adam or AdamW"
    training = work.module.training
    NoClock("in which clients of a batch differ").attach(work.module.train())
    try:
        stacked = Stacked(work, [work.initial] * 2)
        stacked.add_gradients({0: batch, 1: batch}, NO_NUMBER)
        lacking = [name for name, weights in stacked.weights.items() if weights.grad is None]
        return f"its loss does not depend on {lacking[0]}" if lacking else None
    except Exception as error:  # whatever vmap or somebody's code raises
        return sentence(error)
    finally:
        work.clock.attach(work.module)
        work.module.train(training)


def alike(requests: Mapping[int, Asked]) -> list[list[int]]:
    """The clients of these requests, in the parts that can be trained at once: those whose corrections are alike."""
    parts: dict[Any, list[int]] = {}
    for client, request in requests.items():
        c = request.correction
        key = None if c is None else (c.function, tuple(x.layout for x in c.of))
        parts.setdefault(key, []).append(client)
    return list(parts.values())
