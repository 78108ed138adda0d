"""The study of sizes at which private pools are useful: its table from real generators, and what it refuses."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedcommons.config.experiment import Experiment
from fedcommons.core.accountants import epsilon
from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError
from fedcommons.runs import cost
from fedcommons.runs.inputs import load
from fedcommons.seeds import generator
from papers.fedssyn import sizes, sizes_report
from papers.fedssyn.sizes import configs, fitted, jobs, of_sums, released, seconds, taught


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


@pytest.mark.parametrize(("n", "there"), [(129, 3), (322, 1), (1290, 1)])
def test_clients_together_are_left_out_where_there_are_not_as_many_images(
    private: ModuleType, n: int, there: int
) -> None:
    options = private.arguments(["--ways", "merf"])
    pools = [fitted(config) for config in released(options, n, 0).values()]
    assert [pool is not None for pool in pools] == [True] * there + [False] * (3 - there)


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


def test_sums_have_a_price_whatever_the_seed(
    private: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pool is timed for one seed; of ten clients with 1,290 images there is none."""
    timed: list[dict[str, object]] = []
    monkeypatch.setattr(cost, "contribute", lambda ready, made: (None, timed.append(ready.config.flat) or 2.0))
    argv = ["--ways", "merf", "--sizes", "129,1290", "--seeds", "0,1,2", "--artifacts", str(tmp_path)]
    pools = [*of_sums(private.arguments(argv))]
    assert seconds(pools) == 2.0 * len(pools) == 2.0 * 3 * (3 + 1)
    assert [(at["data.limit"], at["seed"]) for at in timed] == [(129, 0), (1290, 0), (1290, 0), (1290, 0)]


def test_what_is_judged_is_kept_where_a_later_size_fails(
    private: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_later(config: Experiment) -> tuple[Examples, float | None, Dataset]:
        if config.data.limit == 80:
            raise RuntimeError("out of memory")
        data = load(config.data)
        return data.train, None, data

    monkeypatch.setattr(sizes, "fitted", fails_later)
    argv = ["--preset", "smoke", "--ways", "merf", "--clients", "1", "--out", str(tmp_path / "out")]
    with pytest.raises(RuntimeError, match="out of memory"):
        private.private_sizes([*argv, "--artifacts", str(tmp_path / "artifacts")])
    with (tmp_path / "out" / "private_sizes.csv").open() as file:
        assert [row["n"] for row in csv.DictReader(file)] == ["40", "40"]


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
        (["--generator", "ddpm"], "generator.name must be private_ddpm here, got ddpm"),
        (["--preset", "authors"], "--preset must be one of smoke, small, paper"),
        (["--sizes", "8"], "generator.batch_size must be at most the number of images"),
        (["--ways", "merf,nope"], "unknown way 'nope'"),
        (["--sizes", "many"], "--sizes takes int values"),
        (["--ways", "ndpdc", "--sizes", "40,400", "--epsilons", "10,0.01"], "target_epsilon 0.01 would need a noise"),
        (["--ways", "merf", "--epsilons", "1e-9", "--dry-run"], r"target_epsilon must lie in \[0.001, 1000\]"),
        (["--ways", "ndpdc", "--epsilons", "0.01", "--dry-run"], "target_epsilon 0.01 would need a noise"),
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
