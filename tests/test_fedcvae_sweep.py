"""FedCVAE's sweep: which runs it plays, what it refuses, and its tables and picture from their folders."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from sweep_runs import rows_of

from fedcommons.runs.build import prepare
from fedcommons.sweeping.display import Display
from papers.fedcvae import report


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("fedcvae")


def entries(script: ModuleType, *argv: str) -> list[Any]:
    return script.entries(script.arguments(argv))


NAMES = ("truncate", "latent", "local_epochs", "decoder_epochs", "server_epochs", "samples")
TABLE = {  # of the released code: w, z, local epochs, decoder epochs, classifier epochs, images
    "mnist": {"fedcvae-ens": (3, 10, 15, 7, 10, 5000), "fedcvae-kd": (1, 10, 15, 7, 10, 5000)},
    "fmnist": {"fedcvae-ens": (3, 10, 25, 10, 5, 5000), "fedcvae-kd": (2, 100, 25, 10, 5, 5000)},
}


@pytest.mark.parametrize("dataset", TABLE)
def test_preset_paper_has_the_papers_numbers(script: ModuleType, dataset: str) -> None:
    result = entries(script, "--preset", "paper", "--dataset", dataset)
    of = {e.method: e.cell.config.flat for e in result if e.alpha == 0.01}
    assert {m: tuple(of[m][f"fedcvae.{name}"] for name in NAMES) for m in TABLE[dataset]} == TABLE[dataset]
    for method, flat in of.items():
        assert (flat["partition.name"], flat["partition.n_clients"]) == ("dirichlet_clients_all", 10)
        assert flat["federation.weighting"] == "samples"
        assert (flat["model.name"], flat["data.limit"], flat["client.batch_size"]) == ("conv5", 30000, 32)
        assert (flat["federation.rounds"] == 1) == (method != "fedavg")
    rates = [of[m][f"fedcvae.{name}"] for m in TABLE[dataset] for name in ("local_lr", "decoder_lr", "server_lr")]
    assert rates == [1e-3, 0.01, 1e-3] * 2
    assert {e.alpha for e in result} == {0.05, 0.01, 0.001}


def test_all_rows_have_the_same_data_and_as_many_local_epochs(script: ModuleType) -> None:
    for words, rounds, each in (("", 2, 1), ("--client.epochs 3", 2, 3), ("--federation.rounds 4", 4, 1)):
        result = entries(script, "--preset", "smoke", "--alphas", "0.01", *words.split())
        configs = {e.method: e.cell.config for e in result}
        assert {c.federation.rounds * c.client.epochs for c in configs.values()} == {rounds * each}
        assert configs["fedavg"].federation.rounds == rounds
        for method in ("fedcvae-ens", "fedcvae-kd"):
            assert configs[method].flat["fedcvae.local_epochs"] == rounds * each
        assert configs["dense"].flat["dense.client_epochs"] is None  # client.epochs
        own = {"algorithm", "federation.rounds", "client.epochs"}
        plain = configs["fedavg"].flat
        for config in configs.values():
            assert {name for name in config.flat.keys() & plain.keys() if config.flat[name] != plain[name]} <= own
    assert len({prepare(config).partition.fingerprint for config in configs.values()}) == 1  # pyright: ignore


def test_clients_of_the_classifier_try_every_rate_and_a_field_of_the_user_is_that_of_all_rows(
    script: ModuleType,
) -> None:
    tried: dict[str, list[float | None]] = {}
    for e in entries(script, "--alphas", "0.01", "--rates", "0.2,0.7", "--seeds", "3,4", "--fedcvae.latent", "7"):
        tried.setdefault(e.method, []).append(e.rate)
        assert e.rate is None or e.rate == e.cell.config.client.lr
        assert e.cell.config.flat.get("fedcvae.latent", 7) == 7
    assert tried == {m: [None] * 2 if "cvae" in m else [0.2, 0.2, 0.7, 0.7] for m in tried}
    assert len(tried) == 5
    assert {e.rate for e in entries(script, "--lr", "0.2", "--data.validation", "0")} == {None, 0.2}


@pytest.mark.long
def test_the_report_chooses_rates_by_validation_and_compares_seed_by_seed(
    script: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    options = script.arguments(["--seeds", "0,1,2", "--alphas", "0.1,0.01", "--rates", "0.1,0.3"])
    result, display = script.entries(options), Display(Console(quiet=True))
    report.report(result, options, tmp_path, display)
    assert not [*tmp_path.iterdir()]
    for e in result:
        if (e.method, e.alpha) == ("dense", 0.01):
            continue  # not finished
        seed, is_own = e.cell.config.seed, e.rate is None
        last = 0.90 + seed / 100 if is_own else 0.5 if e.rate == 0.1 else 0.99
        lines = {"test/accuracy": last, "validation/accuracy": 0.8 if e.rate == 0.1 else 0.7}
        of = {"bytes_up": 4e6 if is_own else 1e6, "bytes_down": 80, "disclosed": float(is_own)}  # fmt: skip
        recorded(tmp_path / e.cell.name, e.cell.config, None, lines, **of)
    report.report(result, options, tmp_path, display)
    tables = rows_of((tmp_path / "fedcvae.md").read_text())
    start = next(i for i, row in enumerate(tables) if row[2] == "minus")
    rows, against = tables[2:start], tables[start + 2 :]
    methods = ["fedcvae-ens", "fedcvae-kd", "fedavg-once", "dense", "fedavg"]
    assert [row[:2] for row in rows] == [["0.1", m] for m in methods] + [["0.01", m] for m in methods if m != "dense"]
    assert rows[0][2:9] == ["-", "3", "91.0 ± 1.0", "[88.5, 93.5]", "1", "4", "8e-05"]  # 82 ± 4.303 / sqrt(3)
    assert rows[0][9:] == ["decoder, number of images, label histogram", "100.0 %"]
    assert rows[2][2:] == ["0.1", "3", "50.0 ± 0.0", "[50.0, 50.0]", "1", "1", "8e-05", "change of the classifier",
                           "0.0 %"]  # fmt: skip
    assert (rows[3][9], rows[4][6]) == ("classifier", "10")
    assert against[0] == ["0.1", "fedcvae-ens", "fedavg-once", "+41.0", "[+38.5, +43.5]", "3"]
    assert [row[:3] for row in against].count(["0.01", "fedcvae-kd", "dense"]) == 0
    assert len(against) == 2 * 3 + 2 * 2
    assert report.ends([81.0]) == "-"
    with (tmp_path / "fedcvae.csv").open() as file:
        chosen = {(line["method"], line["rate"]) for line in csv.DictReader(file) if line["chosen"] == "True"}
    assert chosen == {(m, "" if "cvae" in m else "0.1") for m in methods}
    assert (tmp_path / "fedcvae.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
def test_the_command(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert script.fedcvae(["--preset", "smoke", "--alphas", "0.01", "--out", str(out)]) == 0
    text = (out / "fedcvae.md").read_text()
    assert text.startswith("**SMOKE")
    ens, kd, *others = rows_of(text)[2:7]
    assert ens[6:] == [*kd[6:9], "decoder, number of images, label histogram", "100.0 %"]
    assert [row[-1] for row in others] == ["0.0 %"] * 3
