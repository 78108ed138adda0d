"""The ledger says what was spent on what, and prints no epsilon that was not earned."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opacus.accountants import RDPAccountant

from fedcommons import presets
from fedcommons.accounting.privacy import epsilon, ledger, statement
from fedcommons.config import Experiment, override
from fedcommons.experiment import run
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
    said = statement(config, book, joined)
    assert said["epsilon_local_training"]["largest"] == max(book.epsilons(joined))
    assert said["epsilon_of_messages"] == (max(book.epsilons(joined)) if covered else None)
    assert len(said["uncovered"]) == (2 if covered else 3)
    without = statement(override(config, {"dp.local": False}), None, joined)
    assert without["epsilon_local_training"] is without["epsilon_of_messages"] is None
    assert "the model updates of every round" in without["uncovered"]


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
