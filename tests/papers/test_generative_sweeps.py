"""The sweeps of FedCVAE and of Fedssyn on dSprites, with private pools and over sizes: grids, tables, a small run."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import report_runs
from rich.console import Console
from sweep_runs import in_order, rows_of, saved_figures, sweep_output

from fedcommons.cli.display import Display
from fedcommons.privacy.accountants import epsilon
from papers.fedssyn.private_report import gains, is_fitted, spent
from papers.fedssyn.sizes import jobs
from papers.fedssyn.sprites_report import figure, table

private, sizes = report_runs.script("private_fedssyn"), report_runs.script("private_sizes")
fedcvae = report_runs.script("fedcvae")


def entries(script: ModuleType, *argv: str) -> list[Any]:
    return script.entries(script.arguments(argv))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_the_table_and_figure_of_dsprites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"seeds": 2, "sd": 1.0, "best": 0.0, "accuracies": [39.0, 41.0]}
    rows = [{**same, "epochs": 8 if rho else 0, "rho": rho, "number": n, "last": last}
            for rho, n, last in ((None, 0.0, 33.0), (0.5, 0.25, 40.0), (1.0, 1.0, 60.0))]  # fmt: skip
    first, second, *_ = rows_of(table(rows))[2:]
    assert first[:3] == ["no pool", "-", "-"]
    assert second[:4] == ["50 %", "8", "0.25", "40.0 ± 1.4"]
    figures = saved_figures(monkeypatch)
    figure(rows, tmp_path / "a.png", "title", smoke=False)
    for legend in (axes.get_legend() for axes in figures[0].axes):
        assert legend
        assert "no pool: 33.0 %" in [text.get_text() for text in legend.get_texts()]
    assert is_png(tmp_path / "a.png")


def test_every_method_has_no_pool_the_plain_one_and_each_private_one(private: ModuleType) -> None:
    argv = ["--epsilons", "1,10", "--sigmas", "1.906", "--seeds", "0,1", "--generator.epochs", "20"]
    result = entries(private, *argv)
    last = [(e.cell.config.algorithm, e.cell.config.seed, e["pool"]) for e in result if e["last"]]
    pools = ["none", "plain", "epsilon 1", "epsilon 10", "noise multiplier 1.906"]
    assert last == [(a, s, pool) for a in ("fedavg", "scaffold") for s in (0, 1) for pool in pools]
    fields = {e["pool"]: e.cell.config.flat for e in result if e["last"]}
    assert fields["epsilon 10"]["generator.target_epsilon"] == 10
    assert fields["noise multiplier 1.906"]["generator.target_epsilon"] is None


def test_gains_are_against_plain_runs(private: ModuleType, recorded: Callable[..., None], tmp_path: Path) -> None:
    """Seeds 0, 1, 2 have 50, 60 and 70 % alone, and 1, 2 and 6 points more with the private pool."""
    argv = ["--epsilons", "10", "--algorithms", "fedavg", "--seeds", "0,1,2", "--checkpoints", "1"]
    result = [e for e in entries(private, *argv) if e["pool"] != "plain"]
    for e in result:
        more = (0.01, 0.02, 0.06)[e.cell.config.seed] if e["pool"] == "epsilon 10" else 0.0
        recorded(tmp_path / e.cell.name, e.cell.config, None, {"test/accuracy": 0.5 + 0.1 * e.cell.config.seed + more})
    head, _, *lines = rows_of(gains(result, tmp_path))
    assert head[4:] == ["after round 1", "after round 2", "after round 30"]
    assert lines == [
        ["0.1", "fedavg", "none", "-", *["60.0 ± 10.0"] * 3],
        ["0.1", "fedavg", "epsilon 10", "60", *["+3.0 [-3.6, 9.6]"] * 3],
    ]


def test_images_fitted_to_noisy_sums_are_pools_too_and_spend_what_they_say(private: ModuleType) -> None:
    """FedMERF with local and with summed noise, NDPDC with local; no generator has to be asked for the spending."""
    argv = ["--preset", "smoke", "--epsilons", "2,10", "--algorithms", "fedavg", "--settings"]
    result = entries(private, *argv, "shuffled_synthetic,merf,ndpdc")
    of_sums = [e for e in result if is_fitted(e.cell)]
    kinds = ("FedMERF local", "FedMERF summed"), ("NDPDC local",)
    assert [e["pool"] for e in of_sums] == [f"{kind}, epsilon {e}" for pair in kinds for e in (2, 10) for kind in pair]
    for e in of_sums:
        assert spent(e.cell) == pytest.approx(e.cell.config.flat["sharing.target_epsilon"], rel=1e-3)


@pytest.mark.ray
@pytest.mark.usefixtures("one_core")
def test_the_table_has_each_pools_epsilon_and_each_generator_trains_once(private: ModuleType, tmp_path: Path) -> None:
    words = ["--preset=smoke", "--algorithms=fedavg", "--partition.n_clients=2", "--epsilons=30", "--out=out",
             "--checkpoints=0.34,1", "--tracking.wandb=off", "--artifacts=artifacts"]  # fmt: skip
    output, out = sweep_output(private.private_fedssyn, tmp_path, *words), tmp_path / "out"
    assert "4 generators trained" in output  # two clients' plain and private ones
    with (out / "private_fedssyn.csv").open() as file:
        rows = {(line["pool"], line["epochs"]): line for line in csv.DictReader(file)}
    assert list(rows) == [("none", ""), ("plain", "2"), ("epsilon 30", "1"), ("epsilon 30", "3")]
    assert rows["plain", "2"]["epsilon_if_secret"] == ""
    assert 29.98 < float(rows["epsilon 30", "3"]["epsilon_if_secret"]) <= 30
    assert 10 < float(rows["epsilon 30", "1"]["epsilon_if_secret"]) < 25
    assert is_png(out / "private_fedssyn_images.png")


@pytest.mark.usefixtures("untimed")
@pytest.mark.long
def test_each_size_has_real_images_the_plain_pool_and_each_private_one(sizes: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset", "smoke", "--sizes", "32", "--epsilons", "50", "--clients", "1", "--generator.epochs", "1",
            "--generator.batch_size", "32", "--artifacts", str(tmp_path / "artifacts"),
            "--out", str(tmp_path / "out")]  # fmt: skip
    assert sizes.private_sizes(argv) == 0
    with (tmp_path / "out" / "private_sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_sums = ["FedMERF alone, epsilon 50", "NDPDC alone, epsilon 50"]
    assert [row["pool"] for row in rows] == ["real images", "plain", "epsilon 50", *of_sums]
    assert float(rows[0]["accuracy"]) > 0.3  # 32 real digits teach something
    for row in rows[2:]:  # at L = 10 a client of 32 images of ten classes draws all, in 20 steps
        steps = 20 if row["pool"].startswith("NDPDC") else 1
        assert epsilon(1.0, float(row["noise_multiplier"]), steps, 1e-5) == pytest.approx(50, abs=0.01)
    assert max(float(row["accuracy"]) for row in rows[3:]) > 0.4
    assert jobs(sizes.arguments(argv)) == []  # the generators are stored


@pytest.mark.long
def test_rates_come_from_the_tuning_seeds_and_rows_are_compared_seed_by_seed(
    fedcvae: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    options = fedcvae.arguments(["--seeds", "0,1,2", "--alphas", "0.1,0.01", "--rates", "0.03,0.1,0.3"])
    result, display = fedcvae.entries(options), Display(Console(quiet=True))
    for e in in_order(fedcvae.fedcvae, result, tmp_path):
        if (e["method"], e["at"], e.is_tuning) == ("dense", 0.01, False):
            continue  # not finished
        seed, is_own, is_best = e.cell.config.seed, not e["field"], e.cell.config.client.lr == 0.1
        last = 0.90 + seed / 100 if is_own else 0.5 if is_best else 0.99
        lines = {"test/accuracy": last, "validation/accuracy": 0.8 if is_best else 0.7}
        summary = {"bytes_up": 4e6 if is_own else 1e6, "bytes_down": 80, "disclosed": float(is_own)}  # fmt: skip
        recorded(tmp_path / e.cell.name, e.cell.config, None, lines, **summary)
    fedcvae.fedcvae.report(result, options, tmp_path, display)
    tables = rows_of((tmp_path / "fedcvae.md").read_text())
    start = next(i for i, row in enumerate(tables) if row[2] == "minus")
    rows, against = tables[2:start], tables[start + 2 :]
    methods = ["fedcvae-ens", "fedcvae-kd", "fedavg-once", "dense", "fedavg"]
    assert rows[0][2:9] == ["-", "3", "91.0 ± 1.0", "[88.5, 93.5]", "1", "4", "8e-05"]  # 82 ± 4.303 / sqrt(3)
    assert rows[0][9:] == ["decoder, number of images, label histogram", "100.0 %"]
    assert against[0] == ["0.1", "fedcvae-ens", "fedavg-once", "+41.0", "[+38.5, +43.5]", "3"]
    assert len(against) == 2 * 3 + 2 * 2
    with (tmp_path / "fedcvae.csv").open() as file:
        rates = {(line["method"], line["rate"]) for line in csv.DictReader(file)}
    assert rates == {(m, "" if "cvae" in m else "0.1") for m in methods}
    assert is_png(tmp_path / "fedcvae.png")
