"""Two tiny federations for tests: handwritten digits, and least squares with closed-form solutions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, pairwise
from typing import Self

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.capabilities import Capabilities, capabilities_of
from fedcommons.core.client_worker import Work, trainable_parameters
from fedcommons.core.communication import Traffic
from fedcommons.core.executor import Executor
from fedcommons.core.features import batch_norm_parameters, head_parameters
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, set_up_process
from fedcommons.data import datasets
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset, Examples
from fedcommons.federation import rounds
from fedcommons.federation.client_sampling import joining
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.federation.stragglers import Rule, arrival
from fedcommons.flat_tensors import Flat, flatten
from fedcommons.seeding import set_default_generator
from fedcommons.sharing.exchange import Shared, share_by_method
from lightning_modules import Classifier, VAEClassifier, vae
from lightning_modules.networks import CNN, Linear


@dataclass(frozen=True)
class Federation:
    """A federation for tests: client data, a function that builds the module, and methods that run rounds."""

    data: RunData
    module: Callable[[], LightningModule]  # each call returns a new module with the same initial weights
    loop: LocalSGD = field(default=LocalSGD(epochs=2, batch_size=5))
    weighting: str = "uniform"
    device: torch.device = field(default=torch.device("cpu"))  # the device on which clients train
    keep_buffers: bool = False  # whether BatchNorm statistics stay with the clients; see ``Plan``

    def training(self, loop: LocalSGD, weighting: str = "uniform") -> Self:
        """Return a copy with the settings ``loop`` of local training.

        weighting: the clients' weights in averages: ``uniform`` (equal) or ``samples`` (their numbers of examples).
        """
        return replace(self, loop=loop, weighting=weighting)

    def on(self, device: torch.device) -> Self:
        """Return a copy whose clients train on ``device``."""
        return replace(self, device=device)

    def shared_by(self, method: object) -> Self:
        """Return a copy whose clients hold the data that ``method`` shares before round 1, if it has a ``share``."""
        shared = share_by_method(Shared(data=self.data, p=0.0, traffic=Traffic()), method, self.data.n_classes, 0)
        return replace(self, data=shared.data)

    @property
    def model(self) -> Flat:
        """Return the weights of the untrained module as one flat vector."""
        return flatten(trainable_parameters(self.module()))

    def work(self) -> Work:
        """Return a new module with the settings of local training, and set up this process as a worker process."""
        set_up_process()
        return Work(self.module(), self.device, self.loop, self.weighting)

    def build(self, algorithm: Algorithm) -> Callable[[RunData], Worker]:
        """Return a function that builds an executor's worker for the method ``algorithm`` from the clients' data."""
        return lambda data: Worker(self.work(), algorithm, data.to(self.device))

    def serial(self, algorithm: Algorithm) -> Serial:
        """Return a serial executor with a new worker in this process."""
        return Serial(self.build(algorithm), self.data)

    def plan(
        self, rounds: int, participation: float = 1.0, blocks: int = 2, seed: int = 0, late: Rule | None = None
    ) -> Plan:
        """Return the settings of a run (``Plan``).

        rounds: number of rounds. participation: share of the clients that take part in a round, in (0, 1]. blocks:
        number of groups of clients, each trained as one job. late: the straggler rule; None: all clients reply.
        """
        sizes = self.data.clients.rows.totals.tolist()
        n, counts = len(sizes), partial(self.data.clients.counts, self.data.n_classes)
        replied, module = arrival(late, n, joining(n, participation), seed), self.module()
        facts = Facts(
            n, sizes, rounds, self.weighting, replied, counts,
            shape=tuple(self.data.clients.store.x.shape[1:]), n_classes=self.data.n_classes,
            head=head_parameters(module), batch_norm=batch_norm_parameters(module),
            pool=len(self.data.pool.rows.flat) if self.data.pool and self.data.serves else 0,
            public=len(self.data.public) if self.data.public else 0,
        )  # fmt: skip
        return Plan(facts, participation, blocks, seed, late, self.keep_buffers)

    def start(self, algorithm: Algorithm, plan: Plan) -> Standing:
        """Return the state of the federation before round 1, as ``algorithm.start`` creates it."""
        return Standing(0, algorithm.start(self.model, plan.facts, plan.seed))

    def run(
        self, algorithm: Algorithm, plan: Plan, executor: Executor | None = None, start: Standing | None = None
    ) -> list[tuple[Standing, dict[str, float]]]:
        """Run the rounds of ``plan`` and return the federation's state and the metrics after each round.

        executor: None: a new serial executor. start: the state before the first round to run; None: before round 1.
        """
        executor = executor or self.serial(algorithm)
        return list(rounds.run(algorithm, executor, plan, start or self.start(algorithm, plan)))


class Regression(LightningModule):
    """Linear regression in float64, for exact comparisons; weights w, features a and target b of an example.

    The loss is f(w) = mean of (<a, w> - b)^2 / 2, weighted if the examples have weights.
    """

    def __init__(self, dim: int, lr: float, momentum: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=torch.float64))
        self.lr, self.momentum = lr, momentum

    def forward(self, a: Tensor) -> Tensor:
        return a @ self.w

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        a, b, *weight = batch
        each = (self(a) - b).square()
        return (weight[0] * each if weight else each).mean() / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)


@dataclass(frozen=True)
class LeastSquares:
    """Federated least squares: client i has n_i examples with d features, a[i] (n_i, d), and targets b[i] (n_i,)."""

    a: Sequence[np.ndarray]
    b: Sequence[np.ndarray]

    def federation(self, lr: float, momentum: float = 0.0) -> Federation:
        """Return a federation whose clients hold the problem's data and train by SGD. lr: learning rate."""
        ends = np.cumsum([0, *map(len, self.b)])
        store = Examples(torch.from_numpy(np.concatenate(self.a)), torch.from_numpy(np.concatenate(self.b)))
        clients = Clients(store, [np.arange(*ab) for ab in pairwise(ends)])
        dim = self.a[0].shape[1]
        return Federation(RunData(clients, clients, {}), lambda: Regression(dim, lr, momentum))

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """Return the gradient of each client's mean loss at the d weights ``w``, as an array of shape (clients, d)."""
        return np.stack([a.T @ (a @ w - b) / len(b) for a, b in zip(self.a, self.b, strict=True)])

    @property
    def optimum(self) -> np.ndarray:
        """Return the weight vector that minimises the mean of the clients' mean losses."""
        hessian = np.sum([a.T @ a / len(b) for a, b in zip(self.a, self.b, strict=True)], axis=0)
        return np.linalg.solve(hessian, -self.gradients(np.zeros(len(hessian))).sum(0))


def least_squares(sizes: Sequence[int] = (8, 8, 8, 8), dim: int = 3) -> LeastSquares:
    """Return a least-squares problem whose clients differ in Hessian and minimiser; each call returns the same values.

    Args:
        sizes: number of examples of each client; default: four clients of eight examples.
        dim: number of features of an example, which is the number of weights.
    """
    draw = np.random.default_rng(0)
    a = [draw.normal(size=(n, dim)) * draw.uniform(0.5, 1.5, dim) for n in sizes]
    return LeastSquares(a, [x @ draw.normal(size=dim) + 0.1 * draw.normal(size=len(x)) for x in a])


@cache
def _dataset() -> Dataset:
    return datasets.load("digits", datasets.digits)


def digits(
    sizes: Sequence[int] = (9, 16, 12, 20, 7),
    dropout: float = 0.0,
    lr: float = 0.1,
    momentum: float = 0.0,
    linear: bool = False,
    batch_norm: bool = False,
    method: Algorithm | None = None,
    noise: float = 0.0,
) -> Federation:
    """Return a federation of handwritten digits and a tiny CNN; client i holds only digits 2i and 2i + 1 (modulo ten).

    ``sizes``: number of examples of each client. ``lr``, ``momentum``: learning rate and momentum of SGD.
    ``linear``: train softmax regression without dropout instead of the CNN, so that the loss is convex.
    ``batch_norm``: use BatchNorm in the CNN. The CNN also has BatchNorm if ``method`` keeps BatchNorm with the clients,
    and it never has BatchNorm if ``method`` refuses BatchNorm.
    ``method``: the method to test. If it has a function ``share``, the clients hold the data that this function
    returns. If it needs a decoder or other extras, the module is an autoencoder (with ``linear``: of two linear
    layers). If the method's server needs a pool of images, the pool is the clients' data.
    ``noise``: standard deviation of noise that the module adds to features in training and in evaluation.
    """
    everything = _dataset()
    labels = everything.train.y.numpy()
    of_digits = [iter(np.flatnonzero(labels // 2 == pair).tolist()) for pair in range(5)]
    store = everything.train[np.array([r for i, n in enumerate(sizes) for r in islice(of_digits[i % 5], n)])]
    ends = np.cumsum([0, *sizes])
    clients = Clients(store, [np.arange(*ab) for ab in pairwise(ends)])
    needs = Capabilities() if method is None else capabilities_of(method)
    mean, std, autoencoder, keep_buffers = everything.mean, everything.std, bool(needs.needs), needs.keeps_batch_norm
    batch_norm = (batch_norm or keep_buffers) and not needs.refuses_batch_norm

    def module() -> LightningModule:
        set_default_generator("initial weights of the tests")
        if autoencoder:
            return _autoencoder(dropout, lr, momentum, linear, batch_norm, noise)
        if linear:
            return Classifier(Linear((1, 8, 8), 10), lr=lr, momentum=momentum, mean=mean, std=std)
        network = CNN((1, 8, 8), 10, channels=(3, 4), hidden=16, batch_norm=batch_norm)
        after = nn.Dropout(dropout) if not noise else nn.Sequential(nn.Dropout(dropout), Noise(noise))
        network.hidden = nn.Sequential(network.hidden, after)  # pyright: ignore[reportAttributeAccessIssue]
        return Classifier(network, lr=lr, momentum=momentum, mean=mean, std=std)

    sets = {"train": store, "test": everything.test[slice(0, 100)]}
    pool = clients if needs.needs_pool else None
    public = everything.test[slice(100, 140)]
    data = RunData(clients, clients, sets, pool, everything.n_classes, serves=needs.needs_pool, public=public)
    return Federation(data, module, keep_buffers=keep_buffers).shared_by(method)


class Noise(nn.Module):
    """A layer that adds noise of N(0, sd^2) in training and in evaluation."""

    def __init__(self, sd: float) -> None:
        super().__init__()
        self.sd = sd

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sd * torch.randn_like(x)


def _autoencoder(
    dropout: float, lr: float, momentum: float, linear: bool, batch_norm: bool, noise: float
) -> VAEClassifier:
    """Return a tiny autoencoder for images of 8x8 pixels; the arguments are those of ``digits``."""
    if linear:
        decoder = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))
        model = VAEClassifier(nn.Flatten(), decoder, 64, 8, 10, trade_off=0.05, lr=lr, optimizer="sgd")
        nn.init.constant_(model.log_variance.bias, -4.0)  # little noise, so that the loss falls within a few rounds
        return model
    model = vae((1, 8, 8), 10, lr, momentum, 0.0, "sgd", latent=8, channels=(3, 4))
    first, *rest = model.encoder.children()
    norm = nn.BatchNorm2d(3) if batch_norm else nn.Identity()
    model.encoder = nn.Sequential(first, norm, *rest, nn.Dropout(dropout), *([Noise(noise)] if noise else []))
    return model
