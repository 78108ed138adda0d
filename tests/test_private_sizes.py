"""The study of sizes at which private pools are useful: its table from real generators, and what it refuses."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedcommons.core.accountants import epsilon
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.seeds import generator
from papers.fedssyn import sizes_report
from papers.fedssyn.sizes import configs, enough, jobs, released, study, taught


@pytest.fixture(scope="module")
def private(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("private_sizes")


@pytest.mark.usefixtures("untimed")
@pytest.mark.long
def test_each_size_has_real_images_the_plain_pool_and_each_private_one(
    private: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call makes nothing again, and says the same."""
    argv = ["--preset", "smoke", "--sizes", "32", "--epsilons", "5,50", "--generator.epochs", "1",
            "--generator.batch_size", "32", "--artifacts", str(tmp_path / "artifacts"),
            "--out", str(tmp_path / "out")]  # fmt: skip
    assert private.private_sizes([*argv, "--dry-run"]) == 0
    assert "3 generators to make, 10 pools to fit to noisy sums" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert private.private_sizes(argv) == 0
    with (tmp_path / "out" / "private_sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    alone = ("FedMERF alone", "FedMERF 10 clients, local", "FedMERF 10 clients, summed")
    of_sums = [f"{of}, epsilon {e}" for e in (5, 50) for of in (*alone, "NDPDC alone", "NDPDC 10 clients, local")]
    assert [row["pool"] for row in rows] == ["real images", "plain", "epsilon 5", "epsilon 50", *of_sums]
    assert float(rows[0]["accuracy"]) > 0.3  # 32 real digits teach something
    courses = {"NDPDC": (1.0, 20)}  # at L = 10 a client of 32 images of ten classes draws all, in 20 steps
    for row in rows[2:]:
        q, steps = courses.get(row["pool"].partition(" ")[0], (1.0, 1))
        spent = epsilon(q, float(row["noise_multiplier"]), steps, 1e-5)
        assert spent == pytest.approx(float(row["pool"].rpartition(" ")[2]), abs=0.01)
    assert max(float(row["accuracy"]) for row in rows[4:]) > 0.6
    assert "± is the sample" in capsys.readouterr().out
    for name in ("private_sizes.md", "private_sizes.png"):
        assert (tmp_path / "out" / name).exists()
    before = sorted((tmp_path / "artifacts").rglob("*"))
    assert private.private_sizes([*argv[:-1], str(tmp_path / "again")]) == 0
    assert sorted((tmp_path / "artifacts").rglob("*")) == before
    names = [tmp_path / folder / "private_sizes.csv" for folder in ("out", "again")]
    assert names[0].read_text() == names[1].read_text()


def test_a_row_a_seed_and_a_picture_of_their_spread(private: ModuleType, tmp_path: Path) -> None:
    """The table's mean is that of the rows."""
    options = private.arguments(["--preset", "smoke", "--seeds", "3,5"])
    records = [{"n": n, "pool": "plain", "sigma": None, "accuracy": [0.5, (n + 160) / 320]} for n in (40, 80)]
    text = sizes_report.report(records, options, tmp_path)
    with (tmp_path / "private_sizes.csv").open() as file:
        rows = [(row["n"], row["seed"], float(row["accuracy"])) for row in csv.DictReader(file)]
    assert rows == [("40", "3", 0.5), ("40", "5", 0.625), ("80", "3", 0.5), ("80", "5", 0.75)]
    assert "| 56.2 ± 8.8 " in text
    assert "| 62.5 ± 17.7 " in text
    assert (tmp_path / "private_sizes.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_ways_that_are_asked_for_are_judged(private: ModuleType, tmp_path: Path) -> None:
    """Without generators nothing is trained, and NDPDC has no summed noise."""
    options = private.arguments(["--ways", "ndpdc,merf", "--epsilons", "1,10", "--artifacts", str(tmp_path)])
    assert (jobs(options), configs(options, 129, 0)) == ([], {})
    of = {name: config.flat for name, config in released(options, 129, 0).items()}
    assert list(of)[:5] == [
        "NDPDC alone, epsilon 1",
        "NDPDC 10 clients, local, epsilon 1",
        "FedMERF alone, epsilon 1",
        "FedMERF 10 clients, local, epsilon 1",
        "FedMERF 10 clients, summed, epsilon 1",
    ]
    assert {f["data.limit"] // f["partition.n_clients"] for f in of.values()} == {129}
    assert not any(name.startswith("generator.") for f in of.values() for name in f)
    only = private.arguments(["--ways", "private", "--epsilons", "1,10"])
    assert list(configs(only, 129, 0)) == ["epsilon 1", "epsilon 10"]
    assert released(only, 129, 0) == {}


@pytest.mark.long
def test_sizes_are_judged_one_after_another_and_clients_together_only_where_there_are_images(
    private: ModuleType, tmp_path: Path
) -> None:
    for n, there in ((129, 3), (322, 1), (1290, 1)):
        configs = released(private.arguments(["--ways", "merf"]), n, 0).values()
        assert [enough(config) is not None for config in configs] == [True] * there + [False] * (3 - there)
    argv = ["--preset", "smoke", "--ways", "merf", "--clients", "1", "--epsilons", "10", "--artifacts", str(tmp_path)]
    first = next(study(private.arguments(argv), lambda _: None))
    assert [(record["n"], len(record["accuracy"])) for record in first] == [(40, 1), (40, 1)]


def test_a_pool_that_is_the_data_teaches_all_and_one_with_turned_labels_nothing() -> None:
    x = torch.zeros(40, 1, 4, 4, dtype=torch.uint8)
    x[20:] = 255
    y = torch.arange(40) // 20
    assert taught(Examples(x, y), Examples(x, y)) == 1
    assert taught(Examples(x, 1 - y), Examples(x, y)) == 0


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--generator.target_epsilon", "3"], "use --epsilons"),
        (["--data.limit", "3"], "use --sizes"),
        (["--generator", "ddpm"], r"generator.name .*private_ddpm"),
        (["--preset", "authors"], "--preset"),
        (["--sizes", "8"], "generator.batch_size"),
        (["--ways", "merf,nope"], "nope"),
        (["--sizes", "many"], "--sizes"),
        (["--ways", "ndpdc", "--sizes", "40,400", "--epsilons", "10,0.01"], "target_epsilon 0.01"),
        (["--ways", "merf", "--epsilons", "1e-9", "--dry-run"], "target_epsilon"),
        (["--ways", "ndpdc", "--epsilons", "0.01", "--dry-run"], "target_epsilon 0.01"),
    ],
)
def test_bad_requests_are_refused(argv: list[str], why: str, private: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        private.private_sizes([*argv, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_judge_is_the_regression_of_least_loss() -> None:
    """Few noisy images: stopped early it would be another one, by its solver and the number of threads."""
    draws = generator(0, "judge")
    means = 60 * torch.rand(10, 1, 10, 10, generator=draws)
    y = torch.arange(10).repeat(200)
    x = (means[y] + 90 * torch.randn(len(y), 1, 10, 10, generator=draws)).clamp(0, 255).to(torch.uint8)
    train, test = Examples(x[:200], y[:200]), Examples(x[200:], y[200:])
    pixels, tested = ((e.x.flatten(1) / 255).double().numpy() for e in (train, test))
    best = LogisticRegression(solver="newton-cholesky", tol=1e-10).fit(pixels, train.y.numpy())
    assert taught(train, test) == best.score(tested, test.y.numpy())
