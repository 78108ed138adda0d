"""dp.target_epsilon: each client has its own noise, and spends the target in all rounds, as the ledger has it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedcommons import experiment, load_runs, run
from fedcommons.config.flat import same_results
from fedcommons.core.accountants import epsilon
from fedcommons.core.dp_sgd import DPSGD, Target
from fedcommons.errors import UserError
from fedcommons.federation import checkpoint
from fedcommons.federation.memory import ClientMemory
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import noise_key
from fedcommons.sweeping.screen import ending
from fedcommons.tracking.run_folder import read_config, read_rounds

DELTA = 1e-5
PRIVATE = {
    "dp.local": True, "dp.target_epsilon": 4.0, "federation.rounds": 2, "client.epochs": 1, "client.batch_size": 16,
    "model": "linear", "data.limit": 150, "measure.every": 0, "wandb": "off",
}  # fmt: skip


@pytest.mark.parametrize(("target", "n", "rounds"), [(0.5, 100, 3), (2.0, 20, 3), (8.0, 100, 30), (2.0, 16, 5)])
@pytest.mark.long
def test_all_rounds_together_spend_the_target(target: float, n: int, rounds: int) -> None:
    steps = DPSGD.steps(n, 16)
    dp = DPSGD(1.0, 5.0, Target(target, DELTA, rounds)).of_client(n, 16, steps)
    assert dp.target is None
    spent = epsilon(DPSGD.sampling_rate(n, 16), dp.noise_multiplier, rounds * steps, DELTA)
    assert target - 0.011 <= spent <= target


@pytest.mark.long
def test_the_ledger_has_what_was_asked_for(tmp_path: Path) -> None:
    """Of every client, though they differ in their sizes and so in their noise."""
    result = run(experiment("smoke", values=PRIVATE), tmp_path / "run", say=lambda _: None)
    end = checkpoint.load_latest(result.folder / "checkpoints", ClientMemory(folder=tmp_path / "memory"))
    assert end
    found = [end.ledger.of_rounds(client, DELTA) for client in range(result.summary["n_clients"])]
    assert all(one is not None and 3.98 <= one <= 4.0 for one in found), found
    sigmas = {sigma for events in end.ledger.updates.covered.values() for _, sigma in events}
    assert len(sigmas) > 1
    assert "sigma" not in result.rounds.columns
    (table,), sizes = result.summary["privacy"]["mechanisms"]["updates"], prepare(result.experiment).dealt.own.sizes
    assert table["client"] == list(range(len(sizes)))
    assert table["q"] == [DPSGD.sampling_rate(n, 16) for n in sizes]
    assert table["steps"] == [2 * DPSGD.steps(n, 16) for n in sizes]
    assert set(table["sigma"]) == sigmas
    spent = [epsilon(q, s, k, DELTA) for q, s, k in zip(table["q"], table["sigma"], table["steps"], strict=True)]
    assert spent == found
    assert (table["clip"], table["delta"], set(table["accountant"])) == (5.0, DELTA, {"rdp"})
    assert result.summary["effective"]["dp.noise_multiplier"] == table["sigma"]
    row, folder = load_runs(result.folder).iloc[0], result.folder
    for name in ("sigma", "q", "steps"):
        assert (row[f"{name}_min"], row[f"{name}_max"]) == (min(table[name]), max(table[name]))
    assert row["accountant"] == "rdp"
    (line,) = (x for x in ending(result.summary, read_rounds(folder), 1.0, folder, 120) if x.startswith("noise "))
    assert f"sigma {min(sigmas):.4g} to {max(sigmas):.4g}" in line
    # the default of the noise multiplier was not used, so no record has it
    assert "dp.noise_multiplier" not in row.index
    assert "dp.noise_multiplier" not in result.summary["config"]
    assert "noise_multiplier" not in yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["dp"]
    assert same_results(read_config(folder), result.experiment) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp.local": False}, r"it needs dp\.local true"),
        ({"dp.noise_multiplier": 2.0}, r"either dp\.target_epsilon or dp\.noise_multiplier"),
        ({"dp.target_epsilon": 0.01}, r"a client of \d+ examples: dp\.target_epsilon 0\.01"),
        ({"algorithm": "feddm", "feddm.init": "noise", "feddm.sigma": 0.0}, "FedDM make no local steps"),
    ],
    ids=["no DP-SGD", "besides sigma", "out of reach", "no local steps"],
)
def test_a_target_that_means_nothing_is_refused_before_any_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(experiment("smoke", values={**PRIVATE, **values}))


def test_longer_runs_share_no_noise_as_they_need_more_of_it() -> None:
    keys = {noise_key(experiment("smoke", values={**PRIVATE, "federation.rounds": r})) for r in (2, 3)}
    assert len(keys) == 2
