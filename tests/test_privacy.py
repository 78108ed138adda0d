"""The ledger says what was spent on what, and prints no epsilon that was not earned."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from fedcommons.accounting.privacy import epsilon, ledger, statement
from fedcommons.algorithms import ALGORITHMS
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment, override
from fedcommons.core.algorithm import Message, Reply
from fedcommons.core.local import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.runs.experiment import run
from fedcommons.seeds import seed_for
from fedcommons.tensors import Payload
from fedcommons.tracking.run_folder import read_rounds

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]


def _private(**values: Any) -> Experiment:
    named = {"dp.local": True, "client.batch_size": 5, "client.epochs": 2}
    return override(Experiment(), named | {k.replace("__", "."): v for k, v in values.items()})


@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
def test_it_is_opacus_accountant_stepped_one_by_one(q: float) -> None:
    accountant = RDPAccountant()
    for _ in range(30):
        accountant.step(noise_multiplier=2.0, sample_rate=q)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the best order is the first or last one
        expected = accountant.get_epsilon(1e-5)
    assert epsilon(q, 2.0, 30, 1e-5) == pytest.approx(expected, rel=1e-9)


def test_it_grows_with_steps_and_rate_and_falls_with_noise() -> None:
    assert epsilon(0.1, 1.0, 0, 1e-5) == 0.0
    base = epsilon(0.1, 1.0, 100, 1e-5)
    assert base < epsilon(0.1, 1.0, 101, 1e-5)
    assert base < epsilon(0.11, 1.0, 100, 1e-5)
    assert base < epsilon(0.1, 0.9, 100, 1e-5)
    assert base < epsilon(0.1, 1.0, 100, 1e-6)


def test_it_is_never_negative() -> None:
    """At a delta of one half Opacus' bound of this step is -0.693."""
    assert epsilon(1.0, 500.0, 1, 0.5) == 0.0


def test_it_is_that_of_neighbours_with_one_example_blanked_out() -> None:
    """One step on n = 2 slots, q = 1/2, one of them blank or 1: the divergences of the two mixtures, by quadrature.

    The other example, 0.3, and its sampling are the same for both. Exact at an order is at most what is accounted.
    """
    sigma, q, order = 1.0, 0.5, 4
    y = np.linspace(-12, 12, 20_001)

    def density(slots: tuple[float, float]) -> np.ndarray:
        sums = [(a * slots[0] + b * slots[1]) for a in (0, 1) for b in (0, 1)]
        return np.mean([np.exp(-((y - s) ** 2) / 2 / sigma**2) / np.sqrt(2 * np.pi) / sigma for s in sums], axis=0)

    def divergence(p: np.ndarray, r: np.ndarray) -> float:
        return float(np.log(np.trapezoid(p**order * r ** (1 - order), y)) / (order - 1))

    filled, blank, replaced = density((0.3, 1.0)), density((0.3, 0.0)), density((0.3, -1.0))
    accounted = np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=[order])).item()
    assert 0 < divergence(filled, blank) <= accounted
    assert 0 < divergence(blank, filled) <= accounted
    assert divergence(filled, replaced) > accounted  # another example in its place is not what is covered


def test_a_client_is_charged_for_the_rounds_it_answered(digits: "Digits") -> None:
    clients = digits().data.clients  # 9, 16, 12, 20 and 7 images
    book = ledger(_private(), clients)
    assert book is not None
    assert list(book.rates) == [5 / 9, 5 / 16, 5 / 12, 5 / 20, 5 / 7]
    assert list(book.steps) == [4, 8, 6, 8, 4]  # two epochs of ceil(n/B)
    spent = book.epsilons([0, 1, 2, 3, 3])
    assert spent[0] == 0
    assert spent[1] == epsilon(5 / 16, 1.0, 8, 1e-5)
    assert spent[4] == epsilon(5 / 7, 1.0, 12, 1e-5)
    assert ledger(Experiment(), clients) is None


@pytest.mark.parametrize(
    ("values", "covered"),
    [
        ({}, True),
        ({"sharing__setting": "local_synthetic"}, False),  # a real image has a part in all synthetic ones
        ({"sharing__setting": "shuffled_synthetic"}, False),
        ({"sharing__setting": "shuffled_real", "sharing__p": 0.5}, False),
        ({"algorithm": "fedmix"}, False),
    ],
)
def test_all_messages_have_an_epsilon_only_where_none_is_left_out(
    values: dict[str, Any], covered: bool, digits: "Digits"
) -> None:
    clients, joined = digits().data.clients, [3] * 5
    config = _private(**values)
    book = ledger(config, clients)
    assert book is not None
    said = statement(config, book, joined, rejected=0)
    assert said["epsilon_local_training"]["largest"] == max(book.epsilons(joined))
    assert said["epsilon_of_messages"] == (max(book.epsilons(joined)) if covered else None)
    assert len(said["uncovered"]) == (3 if covered else 4)
    without = statement(override(config, {"dp.local": False}), None, joined, rejected=0)
    assert without["epsilon_local_training"] is without["epsilon_of_messages"] is None
    assert "the model updates of every round" in without["uncovered"]


@pytest.mark.parametrize("values", [{"algorithm": "mine"}, {"sharing__setting": "ours"}])
def test_what_nobody_has_examined_has_no_epsilon_of_all_messages(values: dict[str, str], digits: "Digits") -> None:
    config = _private(**values)
    said = statement(config, ledger(config, digits().data.clients), [3] * 5, rejected=0)
    assert said["epsilon_of_messages"] is None
    (value,) = values.values()
    assert any(line.startswith(f"what {value} sends") for line in said["uncovered"])


def test_it_is_said_that_runs_add_up_and_that_a_rejection_shows(digits: "Digits") -> None:
    config, joined = _private(), [3] * 5
    book = ledger(config, digits().data.clients)
    said = statement(config, book, joined, rejected=2)
    assert said["epsilon_of_messages"] is None
    assert any("2 replies were rejected" in line for line in said["uncovered"])
    quiet = " ".join(statement(config, book, joined, rejected=0)["uncovered"])
    assert "rejected" not in quiet
    for text in ("they add up", "--lrs", "only this one is charged", "blanked out", "seed"):
        assert text in quiet


def test_a_delta_at_which_an_example_could_be_published_is_refused() -> None:
    config = override(presets.experiment("smoke", "digits"), {"dp.local": True, "partition.name": "dirichlet_niid"})
    largest = max(range(4), key=lambda i: len(prepare(config).partition.rows[i]))
    n = len(prepare(config).partition.rows[largest])
    said = f"dp.delta must be below 1/n_i = {1 / n:.3g}, got {1 / n:g}: client {largest} has {n} examples"
    with pytest.raises(UserError, match=re.escape(said)):
        prepare(override(config, {"dp.delta": 1 / n}))
    prepare(override(config, {"dp.delta": 0.999 / n}))
    prepare(override(config, {"dp.delta": 1 / n, "dp.local": False}))  # it is not used


def test_a_run_logs_what_it_has_spent_also_after_a_resumption(tmp_path: Path) -> None:
    values = {"dp.local": True, "tracking.wandb": "off", "federation.participation": 0.5, "measure.every": 0}
    config = override(presets.experiment("smoke", "digits"), values)

    def stop(number: int, metrics: object) -> None:
        if number == 2:
            raise KeyboardInterrupt

    whole = run(config, tmp_path / "whole", say=lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "broken", on_round=stop, say=lambda text: None)
    assert run(config, tmp_path / "broken", resume=True, say=lambda text: None) == whole
    spent = [line["privacy/epsilon_local_training"] for line in read_rounds(tmp_path / "broken")]
    assert spent == [line["privacy/epsilon_local_training"] for line in read_rounds(tmp_path / "whole")]
    assert spent[0] == 0 < spent[1] <= spent[2] <= spent[3]
    assert spent[3] == whole["privacy"]["epsilon_local_training"]["largest"]


@dataclass(frozen=True)
class _Broken(FedAvg):
    """Client 1 sends what is not finite."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, seed)
        return reply if seed != seed_for(0, "client", 2, 1) else replace(reply, weight=float("nan"))


def test_a_run_with_a_rejected_reply_has_no_epsilon_of_all_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"dp.local": True, "tracking.wandb": "off", "measure.every": 0, "data.limit": 60, "client.epochs": 1}
    config = override(presets.experiment("smoke", "digits"), values)
    assert run(config, tmp_path / "quiet", say=lambda text: None)["privacy"]["epsilon_of_messages"] > 0
    monkeypatch.setitem(ALGORITHMS, "fedavg", lambda c, local: _Broken(local, c.federation.weighting))
    said = run(config, tmp_path / "broken", say=lambda text: None)["privacy"]
    assert said["epsilon_of_messages"] is None
    assert any("1 replies were rejected" in line for line in said["uncovered"])


@pytest.mark.ray
def test_actors_draw_the_noise_of_one_process(tmp_path: Path, ray_session: None) -> None:
    values = {"dp.local": True, "tracking.wandb": "off", "measure.every": 0, "data.limit": 60, "client.epochs": 1}
    config = override(presets.experiment("smoke", "digits"), values)
    here = run(config, tmp_path / "here", say=lambda text: None)
    actors = override(config, {"federation.executor": "ray_actors", "federation.actors": 2})
    assert run(actors, tmp_path / "there", say=lambda text: None) == here
    assert read_rounds(tmp_path / "there") == read_rounds(tmp_path / "here")
