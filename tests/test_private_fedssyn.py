"""The sweep of private pools: which runs it plays, what it refuses, and its table and pictures from real runs."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedcommons.errors import UserError
from fedcommons.runs.checks import check
from papers.fedssyn.private_report import gains, is_fitted, releases, shown_images, spent


@pytest.fixture(scope="module")
def private(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("private_fedssyn")


def test_every_method_has_no_pool_the_plain_one_and_each_private_one(private: ModuleType) -> None:
    argv = ["--epsilons", "1,10", "--sigmas", "1.906", "--seeds", "0,1", "--generator.epochs", "20"]
    found = private.entries(private.arguments(argv))
    last = [(e.cell.config.algorithm, e.cell.config.seed, e.pool) for e in found if e.last]
    pools = ["none", "plain", "epsilon 1", "epsilon 10", "noise multiplier 1.906"]
    assert last == [(a, s, pool) for a in ("fedavg", "scaffold") for s in (0, 1) for pool in pools]
    early = [(e.pool, e.cell.config.flat["generator.epochs"]) for e in found if not e.last]
    assert early == [(pool, epochs) for pool in pools[2:] for epochs in (2, 10)] * 2  # of the first method, each seed
    fields = {e.pool: e.cell.config.flat for e in found if e.last}
    assert fields["plain"]["generator.name"] == "ddpm"
    assert fields["epsilon 10"]["generator.target_epsilon"] == 10
    assert fields["noise multiplier 1.906"]["generator.target_epsilon"] is None
    assert {e.cell.config.flat["generator.target_epochs"] for e in found if e.pool == "epsilon 1"} == {20}


def test_images_fitted_to_noisy_sums_are_pools_too_and_spend_what_they_say(private: ModuleType) -> None:
    """FedMERF with local and with summed noise, NDPDC with local; no generator has to be asked for the spending."""
    argv = ["--preset", "smoke", "--epsilons", "2,10", "--algorithms", "fedavg", "--settings"]
    found = private.entries(private.arguments([*argv, "shuffled_synthetic,merf,ndpdc"]))
    of_sums = [e for e in found if is_fitted(e.cell)]
    kinds = ("FedMERF local", "FedMERF summed"), ("NDPDC local",)
    assert [e.pool for e in of_sums] == [f"{kind}, epsilon {e}" for of in kinds for e in (2, 10) for kind in of]
    for e in of_sums:
        assert spent(e.cell) == pytest.approx(e.cell.config.flat["sharing.target_epsilon"], rel=1e-3)
        assert {event.steps for event in releases(e.cell)} == {20 if e.cell.config.sharing.setting == "ndpdc" else 1}
    images = shown_images(of_sums[-1].cell, 1, 3)
    assert (len(images), images.dtype) == (10, torch.uint8)


def test_preset_paper_has_the_noise_of_the_paper_at_the_batch_where_it_gives_ten(private: ModuleType) -> None:
    found = private.entries(private.arguments(["--preset", "paper", "--dataset", "cifar10"]))
    one = next(e.cell.config.flat for e in found if e.pool == "noise multiplier 1.906" and e.last)
    assert (one["generator.noise_multiplier"], one["generator.batch_size"], one["generator.epochs"]) == (
        1.906,
        128,
        500,
    )
    assert (one["generator.clip"], one["generator.rho"], one["dp.delta"]) == (1.0, 1.0, 1e-5)
    others = private.entries(private.arguments(["--generator.delta", "1e-6", "--dp.delta", "1e-6"]))
    assert {e.cell.config.dp.delta for e in others} == {1e-6}
    assert sorted({e.cell.config.flat["generator.epochs"] for e in found if e.pool == "epsilon 10"}) == [
        50,
        250,
        500,
    ]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--generator.target_epsilon", "3"], "use --epsilons"),
        (["--generator.noise_multiplier", "3"], "use --sigmas"),
        (["--checkpoints", "0.5,2"], "--checkpoints"),
        (["--preset", "authors"], "--preset"),
        (["--epsilons", "0"], "generator.target_epsilon"),
    ],
)
def test_bad_requests_are_refused(argv: list[str], why: str, private: ModuleType) -> None:
    def ask() -> None:
        for e in private.entries(private.arguments(argv)):
            check(e.cell.config)

    with pytest.raises(UserError, match=why):
        ask()


def test_gains_are_above_the_same_seeds_run_without_a_pool(
    private: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    """Seeds 0, 1, 2 have 50, 60 and 70 % alone, and 1, 2 and 6 points more with the private pool."""
    options = private.arguments(
        ["--epsilons", "10", "--algorithms", "fedavg", "--seeds", "0,1,2", "--checkpoints", "1"]
    )
    found = [e for e in private.entries(options) if e.pool != "plain"]
    for e in found:
        alone, seed = 0.5 + 0.1 * e.cell.config.seed, e.cell.config.seed
        more = (0.01, 0.02, 0.06)[seed] if e.pool == "epsilon 10" else 0.0
        recorded(tmp_path / e.cell.name, e.cell.config, None, {"test/accuracy": alone + more})
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in gains(found, tmp_path).splitlines()]
    assert lines[0][4:] == ["after round 1", "after round 2", "after round 30"]
    assert lines[2:] == [
        ["0.1", "fedavg", "none", "-", *["60.0 ± 10.0"] * 3],
        ["0.1", "fedavg", "epsilon 10", "60", *["+3.0 [-3.6, 9.6]"] * 3],
    ]


@pytest.mark.ray
def test_the_table_tells_the_epsilon_of_each_pool_and_each_generator_is_trained_once(
    private: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset", "smoke", "--algorithms", "fedavg", "--partition.n_clients", "2", "--epsilons", "30"]
    argv += ["--checkpoints", "0.34,1", "--tracking.wandb", "off", "--artifacts", str(tmp_path / "artifacts")]
    out = tmp_path / "out"
    assert private.private_fedssyn([*argv, "--out", str(out)]) == 0
    assert "4 generators trained" in capsys.readouterr().out  # two clients' plain and private ones
    with (out / "private_fedssyn.csv").open() as file:
        rows = {(line["pool"], line["epochs"]): line for line in csv.DictReader(file)}
    assert list(rows) == [("none", ""), ("plain", "2"), ("epsilon 30", "1"), ("epsilon 30", "3")]
    assert rows["plain", "2"]["epsilon_if_secret"] == ""
    assert 29.98 < float(rows["epsilon 30", "3"]["epsilon_if_secret"]) <= 30
    assert 10 < float(rows["epsilon 30", "1"]["epsilon_if_secret"]) < 25
    assert (out / "private_fedssyn.md").read_text().startswith("**SMOKE")
    for name in ("private_fedssyn.png", "private_fedssyn_images.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
