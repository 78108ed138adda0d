"""Learning-rate schedules over the rounds: closed forms, their effect on methods, and what is refused."""

from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons import ClientData, LocalSGD, UserError, Work, experiment
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.schedules import constant, cosine, step
from fedcommons.runs.build import build, noise_key
from fedcommons.runs.checks import schedule_of

if TYPE_CHECKING:
    from fedcommons.testing.federations import LeastSquares

    Problem = Callable[..., LeastSquares]

FULL = 1000  # a batch size above every client's number of examples


def test_the_factors_in_closed_form() -> None:
    assert [constant(r, warmup=3) for r in (1, 2, 3, 4, 50)] == [0.25, 0.5, 0.75, 1, 1]
    assert [step(r, every=2, gamma=0.1) for r in (1, 2, 3, 4, 5)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    found = [cosine(r, 40, least=0.2) for r in range(1, 41)]
    assert found == pytest.approx([0.6 + 0.4 * cos(pi * r / 40) for r in range(40)])
    assert cosine(3, 40, warmup=9) == pytest.approx(0.3 * cosine(3, 40))


class Slope(LightningModule):
    """f(w) = <w, (1, 2)>, with two groups of parameters whose learning rates are 0.1 and 0.3."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return (self.a + self.b) @ torch.tensor([1.0, 2.0], dtype=torch.float64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [self.a]}, {"params": [self.b], "lr": 0.3}], 0.1)


def test_every_rate_of_the_module_is_multiplied_by_the_rounds_factor() -> None:
    rows = ClientData(torch.zeros(3, 1), torch.zeros(3))
    work = Work(Slope(), torch.device("cpu"), LocalSGD(1, FULL, schedule=lambda r: 1 / r))
    x = work.initial
    for round in (1, 2, 3, 2):  # a worker's past does not matter
        work.begin(round, rows)
        y = work.local(x, rows, 0).model
        assert (work.round, work.rates) == (round, [0.1 / round, 0.3 / round])
        assert torch.allclose(y["a"], torch.tensor([-0.1, -0.2], dtype=torch.float64) / round, rtol=1e-14)
        assert torch.allclose(y["b"], torch.tensor([-0.3, -0.6], dtype=torch.float64) / round, rtol=1e-14)
    assert torch.equal(work.local(x, rows, 0, lr=1.0).model["b"], -torch.tensor([1.0, 2.0], dtype=torch.float64))
    work.begin(0)  # a job outside rounds
    assert work.rates == [0.1, 0.3]


@pytest.mark.long
def test_local_steps_converge_at_the_rate_one_over_t_if_the_rate_falls_so(least_squares: "Problem") -> None:
    """Li et al. (ICLR 2020): with E > 1 local steps and eta_t ~ 1/t the error of FedAvg is O(1/t); else it stays."""
    problem, errors = least_squares(), {}
    for name, schedule in (("falls", lambda r: 1 / (1 + 0.2 * r)), ("stays", None)):
        federation = problem.federation(0.3).training(LocalSGD(3, FULL, schedule=schedule))
        course = [now.model.buffer.numpy() for now, _ in federation.run(FedAvg(), federation.plan(160))]
        errors[name] = [float(np.linalg.norm(course[t - 1] - problem.optimum)) for t in (40, 80, 160)]
    times = np.log([1 + 0.2 * t for t in (40, 80, 160)])
    assert np.polyfit(times, np.log(errors["falls"]), 1)[0] == pytest.approx(-1, abs=0.05)
    assert np.polyfit(times, np.log(errors["stays"]), 1)[0] == pytest.approx(0, abs=1e-6)


def test_runs_of_other_lengths_share_their_noise_only_if_they_begin_alike() -> None:
    """At other learning rates the same noise stands in two messages, and their difference has none."""
    for schedule, keys in (("step", 1), ("cosine", 2)):
        values = [{"federation.rounds": rounds, "client.lr_schedule": schedule} for rounds in (5, 6)]
        assert len({noise_key(experiment("smoke", values=each)) for each in values}) == keys


def test_a_schedule_without_a_positive_factor_is_refused_before_any_work(tmp_path: Path) -> None:
    factors = ["0.0", "float('inf')", "'fast'", "1.0 if round < 3 else float('nan')", "1 / 0"]
    for i, factor in enumerate(factors):
        (tmp_path / f"mine{i}.py").write_text(f"def rates(round):\n    return {factor}\n")
        with pytest.raises(UserError, match=r"rates.* (factor above 0, got .*|ZeroDivisionError)"):
            build(experiment("smoke", values={"client.lr_schedule": f"{tmp_path}/mine{i}.py:rates"}))


def test_a_users_schedule_takes_its_constants_and_the_config_records_its_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def powers(round, rounds, power: float = 0.5):\n    return (1 - (round - 1) / rounds) ** power\n"
    )
    values = {"client.lr_schedule": f"{tmp_path}/mine.py:powers", "client.power": 2.0, "federation.rounds": 4}
    config = experiment("smoke", values=values)
    schedule = schedule_of(config.client.lr_schedule, config.client.constants, 4)
    assert schedule
    assert [schedule(r) for r in (1, 2, 3, 4)] == [1.0, 0.5625, 0.25, 0.0625]
    assert config.source["schedule"]
    assert schedule_of("constant", experiment("smoke").client.constants, 30) is None
