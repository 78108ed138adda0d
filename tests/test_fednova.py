"""FedNova: the normaliser in closed form, and the bias of unequal local work that it takes away."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fednova import FedNova, normaliser
from fedcommons.core.algorithm import Algorithm, Message
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData, Clients
from fedcommons.errors import UserError
from fedcommons.federation.rounds import Standing
from fedcommons.tensors import Flat, flat, scalar
from lightning_modules import Classifier

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

FULL = 1000  # a batch size above every client's number of examples: full-batch steps, in which the order only rounds
STEPS = (8, 1, 4, 2)  # local steps of the four clients, where they differ


class _Slope(LightningModule):
    """f(w) = <w, mean of the examples>: the same gradient at every w."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.momentum = momentum

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return batch[0].mean(0) @ self.w

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=self.momentum)


def _unequal(problem: "LeastSquares", lr: float, momentum: float = 0.0) -> "Federation":
    """Its clients take ``STEPS`` full-batch steps when told eight epochs, by the rule of equal work."""
    federation = problem.federation(lr, momentum).training(LocalSGD(8, FULL))
    clients = federation.data.clients
    n_own = [-(-n * steps // 8) for n, steps in zip(clients.sizes, STEPS, strict=True)]
    return replace(federation, data=replace(federation.data, clients=Clients(clients.store, clients.rows, n_own)))


def _round(federation: "Federation", algorithm: Algorithm, start: np.ndarray) -> np.ndarray:
    plan, model = federation.plan(1), Flat(federation.model.layout, torch.from_numpy(start.copy()))
    played = federation.play(algorithm, plan, start=Standing(0, algorithm.start(model, plan.facts, 0)))
    return played[-1][0].model.buffer.numpy()


def _fixed_point(federation: "Federation", algorithm: Algorithm) -> np.ndarray:
    """Where the federation stops. A round is an affine map w -> M w + c, so d + 1 rounds tell M and c."""
    c = _round(federation, algorithm, np.zeros(3))
    m = np.stack([_round(federation, algorithm, unit) - c for unit in np.eye(3)], axis=1)
    found = np.linalg.solve(np.eye(3) - m, c)
    assert np.allclose(_round(federation, algorithm, found), found, rtol=0, atol=1e-12)
    return found


def _optimum(problem: "LeastSquares", weights: Sequence[float]) -> np.ndarray:
    """Where sum_i weights_i f_i is least."""
    parts = list(zip(weights, problem.a, problem.b, strict=True))
    hessian = np.sum([w * a.T @ a / len(b) for w, a, b in parts], axis=0)
    return np.linalg.solve(hessian, np.sum([w * a.T @ b / len(b) for w, a, b in parts], axis=0))


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_the_normaliser_is_the_sum_of_the_weights_of_the_gradients(r: float, steps: int) -> None:
    """Heavy ball: gradient j is in the buffers of steps j, j+1, ..., K with weights 1, r, ..., r^(K-j)."""
    explicit = sum(sum(r ** (k - j) for k in range(j, steps + 1)) for j in range(1, steps + 1))
    assert normaliser(steps, r) == pytest.approx(explicit, rel=1e-11)
    assert r or normaliser(steps, r) == steps


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("epochs", [1, 2, 6])
def test_on_a_constant_gradient_d_is_one_step_of_it(momentum: float, epochs: int) -> None:
    """However many steps and with whatever momentum the optimizer takes: d_i = (x - y_i)/a_i = eta g."""
    rows = ClientData(torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64).repeat(5, 1), torch.zeros(5))
    work, algorithm = Work(_Slope(momentum), torch.device("cpu"), LocalSGD(epochs, 2)), FedNova()  # 3 batches an epoch
    reply = algorithm.client(work, Message({"model": work.initial}), {}, rows, 1, 0)
    expected = 0.1 * np.array([1.0, -2.0, 0.5])
    assert np.allclose(flat(reply.sums, "d").buffer.numpy(), expected, rtol=0, atol=1e-13)
    assert scalar(reply.sums, "a") == pytest.approx(normaliser(3 * epochs, momentum))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_takes_the_mean_direction_for_the_mean_number_of_steps(
    weighting: str, least_squares: "Problem"
) -> None:
    """x - (sum_i w_i a_i)(sum_i w_i d_i), with w_i summing to one, from steps taken by hand."""
    sizes, lr = (16, 8, 40, 24), 0.05
    problem = least_squares(sizes=sizes)
    federation, algorithm = replace(_unequal(problem, lr), weighting=weighting), FedNova()
    y = np.zeros((4, 3))
    for i, steps in enumerate(STEPS):
        for _ in range(steps):
            y[i] = y[i] - lr * problem.gradients(y[i])[i]
    w = np.array(sizes if weighting == "samples" else (1, 1, 1, 1), float)
    w, a = w / w.sum(), np.array(STEPS, float)
    expected = -(w @ a) * (w @ (-y / a[:, None]))
    assert np.allclose(_round(federation, algorithm, np.zeros(3)), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_bias_of_unequal_steps_vanishes_with_the_learning_rate(momentum: float, least_squares: "Problem") -> None:
    """FedNova's error is of order eta (slope 1; at a fixed rate it has one). FedAvg's tends to a constant (slope 0).

    With momentum r that needs the right a_i: for 8 steps it is 14.0 at r = 1/2, for one it is 1.
    """
    problem, rates = least_squares(), np.array([0.00025, 0.0005, 0.001, 0.002])
    slopes = {}
    for method in (FedNova, FedAvg):
        found = [_fixed_point(_unequal(problem, lr, momentum), method()) for lr in rates]
        errors = [np.linalg.norm(x - problem.optimum) for x in found]
        slopes[method] = np.polyfit(np.log(rates), np.log(errors), 1)[0]
    assert abs(slopes[FedNova] - 1) < 0.05
    assert abs(slopes[FedAvg]) < 0.05


def test_fedavg_minimises_the_losses_weighted_by_the_steps_instead(least_squares: "Problem") -> None:
    """Its limit for eta -> 0 is the optimum of sum_i K_i f_i (objective inconsistency)."""
    problem, rates = least_squares(), np.array([0.0005, 0.001, 0.002])
    wrong = _optimum(problem, STEPS)
    errors = [np.linalg.norm(_fixed_point(_unequal(problem, lr), FedAvg()) - wrong) for lr in rates]
    assert abs(np.polyfit(np.log(rates), np.log(errors), 1)[0] - 1) < 0.05
    assert np.linalg.norm(wrong - problem.optimum) > 0.05


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_is_fedavg_for_equal_steps_whatever_the_sizes(
    momentum: float, weighting: str, least_squares: "Problem"
) -> None:
    federation = least_squares(sizes=(2, 9, 4, 17)).federation(0.05, momentum).training(LocalSGD(5, FULL), weighting)
    ours, theirs = (
        federation.play(method(), federation.plan(4, 0.5))[-1][0].model.buffer for method in (FedNova, FedAvg)
    )
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_an_optimizer_without_a_closed_normaliser_is_refused(digits: "Digits") -> None:
    federation, algorithm = digits(), FedNova()
    module = federation.module()
    assert isinstance(module, Classifier)
    module.optimizer = "adam"
    work = Work(module, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"FedNova is defined for SGD with one learning rate, and .* is Adam"):
        algorithm.client(work, Message({"model": federation.model}), {}, federation.data.clients[0], 1, 0)


def test_experiments_for_which_it_is_not_defined_are_refused() -> None:
    FedNova().check({"client.optimizer": "sgd", "client.momentum": 0.9})
    with pytest.raises(UserError, match=r"^client\.optimizer must be sgd for fednova, whose formulas count SGD steps"):
        FedNova().check({"client.optimizer": "adam", "client.momentum": 0.0})


def test_nesterovs_momentum_is_refused(digits: "Digits", monkeypatch: pytest.MonkeyPatch) -> None:
    def nesterov(module: Classifier) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, nesterov=True)

    monkeypatch.setattr(Classifier, "configure_optimizers", nesterov)
    federation = digits()
    with pytest.raises(ValueError, match="FedNova is not defined for SGD with Nesterov's momentum"):
        FedNova().client(federation.work(), Message({"model": federation.model}), {}, federation.data.clients[0], 1, 0)
