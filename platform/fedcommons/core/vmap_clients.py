"""Simultaneous local training of the N clients of a block, with ``torch.vmap`` over their stacked weights.

Each client has separate weights, batches and a separate number of steps. The results equal those of training clients
one after another, except for rounding. For small networks and images, torch's overhead per call takes most of the time;
this overhead now occurs once per step for all clients. On a GPU, the number of kernel launches is divided by N.

The engine calls a method's ``client`` twice. The first call is stopped at the local training, whose arguments are
recorded (``request_training``). The second call, after the simultaneous training, gets the result
(``Work.replacement``). A client is trained alone if the method has a separate loss function or learning rate, or
changes the gradients by a function that is not a ``Correction``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedcommons.core.functional_step import Step
from fedcommons.core.local_training import Batch, Correction, LocalResult, LocalSGD, onednn
from fedcommons.core.optimizers import plain_step
from fedcommons.core.trainer_shim import NO_NUMBER, NoClock
from fedcommons.data.clients import ClientData
from fedcommons.errors import is_exit, sentence
from fedcommons.flat_tensors import Flat
from fedcommons.privacy.release import UNCOVERED

if TYPE_CHECKING:
    from fedcommons.core.client_worker import Work

STEPWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that update every weight independently of the others, so that clients' weights can be stacked."""


@dataclass(eq=False)
class Request(BaseException):
    """Exception with the arguments of a local training; ``except Exception`` in user code does not catch it."""

    start: Flat
    data: ClientData
    seed: int
    correction: Correction | None
    epochs: int


class _Alone(BaseException):
    """Exception that reports that a client must be trained alone."""


def _ask(
    work: "Work", loop: LocalSGD, start: Flat, data: ClientData, seed: int, override: Any, add_to_grad: Any
) -> LocalResult:
    """Stop the method's ``client`` at its local training, by an exception with the arguments of the training."""
    if loop is not work.loop or override is not None or not isinstance(add_to_grad, Correction | None):
        raise _Alone
    raise Request(start, data, seed, add_to_grad, work.loop.epochs_for(len(data), data.n_own, work.share))


def request_training(work: "Work", client: Callable[[], object]) -> Request | None:
    """Call ``client`` up to its local training and return the training's arguments; None: train the client alone."""
    work.replacement = _ask
    try:
        client()
    except Request as request:
        return request
    except BaseException as error:  # ignored here: the client is trained alone later and raises the error again
        if is_exit(error):
            raise
        return None
    finally:
        work.replacement = None
    return None


def return_result(result: LocalResult) -> Callable[..., LocalResult]:
    """Return a function for ``Work.replacement`` that returns ``result`` instead of the client's first training."""

    def instead(work: "Work", *_: object) -> LocalResult:
        work.replacement = None
        work.releases.append(result.spent)
        return result

    return instead


class Stacked:
    """The stacked weights of N clients, (N, *shape) by name, with an optimizer and sums of loss and logged values."""

    def __init__(self, work: "Work", starts: Sequence[Flat]) -> None:
        self.n, self.step = len(starts), Step(work.module)
        self.weights = {name: torch.stack([x[name] for x in starts]).requires_grad_() for name in work.named}
        stacked_by_id = {id(parameter): self.weights[name] for name, parameter in work.named.items()}
        groups = [
            {**group, "params": [stacked_by_id[id(p)] for p in group["params"] if id(p) in stacked_by_id], "lr": rate}
            for group, rate in zip(work.optimizer.param_groups, work.rates, strict=True)
        ]
        kind: Any = type(work.optimizer)
        self.update = plain_step(kind(groups))
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, list[int]] = {}

    def add_gradients(self, batches: Mapping[int, Batch], number: int) -> None:
        """Compute the gradients of all clients in ``batches`` (client -> batch), with one call per batch shape.

        number: number of the step, which the module gets as batch index.
        """
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
        """Return client i's mean loss and mean logged values, each over the steps that logged the value."""
        return {name: total[i] / self.counts[name][i] for name, total in self.sums.items() if self.counts[name][i]}

    def clip(self, most: float) -> None:
        """Scale each client's gradient so that the norm is at most ``most``."""
        grads = [w.grad for w in self.weights.values() if w.grad is not None]
        norms = torch.stack([g.reshape(self.n, -1).norm(dim=1) for g in grads]).norm(dim=0)
        factors = (most / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factors.view(-1, *[1] * (grad.dim() - 1)))

    def row(self, i: int) -> Tensor:
        """Return client i's weights as one vector."""
        return torch.cat([w.detach()[i].reshape(-1) for w in self.weights.values()])


def train(work: "Work", requests: Sequence[Request]) -> list[LocalResult]:
    """Run all requested local trainings simultaneously and return one result per request.

    In each step, the module's ``current_epoch`` and ``global_step`` have the values of the round's first step.
    """
    loop, stacked = work.loop, Stacked(work, [r.start for r in requests])
    correct = _corrected([r.correction for r in requests])
    remaining = {i: _batches(loop, r) for i, r in enumerate(requests)}
    ended: dict[int, Tensor] = {}
    if not work.module.training:
        work.module.train()
    with onednn(True):  # on the stacked images of many clients, oneDNN is faster than torch's kernels
        for number in range(max(loop.steps_of(len(r.data), r.epochs) for r in requests)):
            batches = {i: batch for i, each in remaining.items() if (batch := next(each, None)) is not None}
            for i in remaining.keys() - batches.keys():  # clients that have finished: keep their final weights
                ended[i] = stacked.row(i)
                del remaining[i]
            stacked.add_gradients(batches, number)
            if loop.clip_norm is not None:
                stacked.clip(loop.clip_norm)
            if correct:
                correct(stacked.weights)
            stacked.update()
    ended |= {i: stacked.row(i) for i in remaining}
    results = []
    for i, request in enumerate(requests):
        steps = loop.steps_of(len(request.data), request.epochs)
        model = Flat(request.start.layout, ended[i])
        results.append(LocalResult(model, {**stacked.means(i), "steps": steps}, UNCOVERED))
    return results


def _batches(loop: LocalSGD, request: Request) -> Iterator[Batch]:
    return (batch for epoch in range(request.epochs) for batch in loop.batches(request.data, request.seed, epoch))


def _corrected(corrections: Sequence[Correction | None]) -> Callable[[Mapping[str, Tensor]], None] | None:
    """Return a function that corrects all clients' gradients; all ``corrections`` have the same ``function``."""
    first = corrections[0]
    if first is None:
        return None
    of_each = list(zip(*(c.values for c in corrections if c), strict=True))
    common = [all(x is xs[0] for x in xs) for xs in of_each]  # shared values, such as the server model, stay unstacked
    values = [
        dict(xs[0]) if shared else {name: torch.stack([x[name] for x in xs]) for name in xs[0]}
        for xs, shared in zip(of_each, common, strict=True)
    ]

    def of_client(weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], *tensors: Mapping[str, Tensor]) -> Any:
        rows: Any = {name: _Row(weights[name], grads[name]) for name in weights}
        first.function(rows, *tensors)
        return {name: row.grad for name, row in rows.items()}

    every = torch.vmap(of_client, in_dims=(0, 0, *(None if shared else 0 for shared in common)))

    def correct(weights: Mapping[str, Tensor]) -> None:
        grads = {name: w.grad for name, w in weights.items() if w.grad is not None}
        changed = every({name: weights[name].detach() for name in grads}, grads, *values)
        for name, grad in changed.items():
            weights[name].grad = grad

    return correct


class _Row:
    """One client's parameter with its gradient; a correction may use only ``grad`` and ``detach()``."""

    def __init__(self, value: Tensor, grad: Tensor) -> None:
        self.value, self.grad = value, grad

    def detach(self) -> Tensor:
        return self.value


def flaw(work: "Work", batch: Batch) -> str | None:
    """Try a step on ``batch`` and return the reason why clients cannot train simultaneously, or None."""
    if len(work.buffers) or work.counters:
        return "it keeps statistics of its batches, as BatchNorm does"
    if work.schedulers:
        return "it has a learning rate scheduler"
    if type(work.optimizer) not in STEPWISE:
        return f"its optimizer is {type(work.optimizer).__name__}, and not SGD, Adam or AdamW"
    training = work.module.training
    NoClock("which differs between clients that train simultaneously").attach(work.module.train())
    try:
        stacked = Stacked(work, [work.initial] * 2)
        stacked.add_gradients({0: batch, 1: batch}, NO_NUMBER)
        missing = [name for name, weights in stacked.weights.items() if weights.grad is None]
        return f"its loss does not depend on {missing[0]}" if missing else None
    except Exception as error:  # vmap and user code may raise any exception
        return sentence(error)
    finally:
        work.clock.attach(work.module)
        work.module.train(training)


def group_alike(requests: Mapping[int, Request]) -> list[list[int]]:
    """Return groups of clients that can train simultaneously: their corrections have the same function and shapes."""
    parts: dict[Any, list[int]] = {}
    for client, request in requests.items():
        c = request.correction
        key = None if c is None else (c.function, tuple(x.layout for x in c.values))
        parts.setdefault(key, []).append(client)
    return list(parts.values())
