"""The sweep of FedDPMS: its cells, its tables from small runs, and the bytes of its exchange."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sweep_runs import complete, rows_of
from torch import nn

from fedcommons.errors import UserError
from fedcommons.federation.participation import participants
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import build_module
from fedcommons.sweeping import sweep
from fedcommons.sweeping.display import Display
from fedcommons.tracking.run_folder import read_summary
from papers.feddpms import exchange
from papers.feddpms import tables as feddpms_tables
from papers.feddpms.exchange import Exchange


@pytest.fixture(scope="module")
def feddpms(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("feddpms")


def test_all_methods_train_the_same_encoder(feddpms: ModuleType) -> None:
    options = feddpms.arguments(["--seeds", "3,4", "--sigmas", "", "--quotas", "", "--receives", ""])
    of_tables = feddpms.grid(options)
    cells = of_tables["Table 1"]
    assert list(of_tables) == ["Table 1"]
    assert [(c.config.algorithm, c.config.seed) for c in cells] == [
        (name, seed) for name in feddpms.ALGORITHMS.split(",") for seed in (3, 4)
    ]
    for cell in cells:
        flat = cell.config.flat
        assert flat["model.name"] == ("vae" if cell.config.algorithm in ("feddpms", "fedvae") else "encoder")
        assert (flat["model.latent"], flat["model.channels"]) == (16, (8, 16))
        assert (flat["partition.name"], flat["partition.alpha"]) == ("dirichlet_niid", 0.5)
        assert (flat["client.optimizer"], flat["federation.weighting"]) == ("adam", "samples")


def test_all_methods_encoders_see_the_same_numbers(feddpms: ModuleType) -> None:
    """Else the table compares scales of pixels, not methods."""
    x, seen = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8), []
    for cell in feddpms.grid(feddpms.arguments(["--sigmas", "", "--quotas", ""]))["Table 1"]:
        module = build_module(cell.config, prepare(cell.config).dataset)
        convolution = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
        convolution.register_forward_pre_hook(lambda layer, words: seen.append(words[0]))
        module.training_step((x, torch.zeros(1, dtype=torch.int64)), 0)
    assert len(seen) == 6
    for of_method in seen:
        torch.testing.assert_close(of_method, seen[0])


def test_rates_are_chosen_by_validation_for_every_method(feddpms: ModuleType) -> None:
    of_tables = feddpms.grid(feddpms.arguments(["--lrs", "0.01,0.001", "--seeds", "3", "--receives", "nothing"]))
    for cells in of_tables.values():
        result = {(c.config.algorithm, c.config.client.lr) for c in cells}
        assert result == {(name, rate) for name, _ in result for rate in (0.01, 0.001)}


def test_ablations_stand_at_every_alpha_beside_fedavg(feddpms: ModuleType) -> None:
    of_tables = feddpms.grid(feddpms.arguments(["--alphas", "0.5,0.1", "--receives", "decoded,real,nothing"]))
    result = [(c.config.partition.alpha, c.config.constants.get("receive")) for c in of_tables["Ablations"]]
    assert result == [(alpha, r) for alpha in (0.5, 0.1) for r in (None, "decoded", "real", "nothing")]
    assert of_tables["Ablations"][1] in of_tables["Table 1"]


def test_table_5_varies_one_constant_and_shares_the_cell_of_table_1(feddpms: ModuleType) -> None:
    words = {"algorithms": "feddpms", "sigmas": "0.5,1", "quotas": "5,7", "privacies": "sound", "helpers": "2"}
    of_tables = feddpms.grid(feddpms.arguments([word for n, v in words.items() for word in (f"--{n}", v)]))
    names = ("sigma", "quota", "privacy", "helpers")
    result = [tuple(c.config.constants[name] for name in names) for c in of_tables["Table 5"]]
    plain = (1.0, 5, "paper", 1)
    assert result == [
        (0.5, 5, "paper", 1), plain, (1.0, 7, "paper", 1), (1.0, 5, "sound", 1), (1.0, 5, "paper", 2),
    ]  # fmt: skip
    assert of_tables["Table 1"][0] == of_tables["Table 5"][1]


def test_clients_share_in_table_2_as_many_images_as_was_asked(feddpms: ModuleType) -> None:
    of_tables = feddpms.grid(feddpms.arguments(["--algorithms", "feddpms,fedavg", "--clients", "10:430,20:860"]))
    flats = [c.config.flat for c in of_tables["Table 2"]]
    result = [(f["algorithm"], f["partition.n_clients"], f["data.limit"]) for f in flats]
    assert result == [(a, n, 43 * n) for n in (10, 20) for a in ("feddpms", "fedavg")]


def test_figure_3_varies_the_rounds_of_stage_one(feddpms: ModuleType) -> None:
    """0.4 of them is the default: the run of table 1."""
    of_tables = feddpms.grid(feddpms.arguments(["--preliminary", "0.3,0.4,0.5", "--federation.rounds", "50"]))
    assert [c.config.constants["preliminary_rounds"] for c in of_tables["Figure 3"]] == [15, None, 25]
    assert of_tables["Figure 3"][1] in of_tables["Table 1"]


def test_preset_paper_has_the_papers_numbers(feddpms: ModuleType) -> None:
    papers = ("fmnist", 3.0, 50, 3, 32), ("cifar10", 4.0, 200, 3, 128), ("cifar100", 4.0, 50, 10, 128)
    for dataset, *wanted in papers:
        options = feddpms.arguments(["--preset", "paper", "--dataset", dataset, "--algorithms", "feddpms"])
        flat = feddpms.grid(options)["Table 1"][0].config.flat
        names = ("feddpms.sigma", "feddpms.quota", "feddpms.classes", "model.latent")
        assert [flat[name] for name in names] == wanted
        assert (flat["federation.rounds"], flat["client.epochs"], flat["client.batch_size"]) == (50, 5, 64)
        assert flat["client.lr"] == 1e-3


def test_preset_authors_is_the_released_code_as_far_as_fields_say_it(feddpms: ModuleType) -> None:
    """Of the paper's cell it departs in what the docstring of its presets names, and is not Fedssyn's."""
    papers, authors = (
        {
            c.config.algorithm: c.config.flat
            for c in feddpms.grid(feddpms.arguments(["--preset", p, "--dataset", "cifar10"]))["Table 1"]
        }
        for p in ("paper", "authors")
    )
    common = {"federation.weighting": ("samples", "uniform"), "model.batch_norm": (False, True)}
    of_vae = {"model.classify": ("code", "features"), "model.reconstruction": ("squares", "cross_entropy")}
    expected = {
        "feddpms": {**common, **of_vae, "feddpms.sigma": (4.0, 2.0)}, "fedvae": {**common, **of_vae}, "fedavg": common,
        "fedprox": {**common, "fedprox.mu": (0.001, 1e-6)}, "moon": {**common, "moon.mu": (1.0, 5.0)}, "fedmix": common,
    }  # fmt: skip
    for name, flat in authors.items():
        result = {n: (papers[name][n], value) for n, value in flat.items() if papers[name][n] != value}
        assert {n: both for n, both in result.items() if not n.startswith("tracking.")} == expected[name]


@pytest.mark.long
def test_the_tables_and_the_bytes_of_small_runs(feddpms: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset=smoke", "--feddpms.sigma=0.3", "--client.epochs=3", "--wandb=off", "--quotas=", "--sigmas=0.3",
            "--algorithms=feddpms,fedavg", f"--out={tmp_path}"]  # fmt: skip
    cells = feddpms.grid(feddpms.arguments(argv))["Table 1"]
    text = complete(feddpms.feddpms, argv, cells, tmp_path)
    first, second = (read_summary(tmp_path / cell.name) or {} for cell in cells)
    accuracies = [100 * one["last_accuracy"] for one in (first, second)]
    rows = rows_of(text, "| dig")
    assert [(row[4], row[6]) for row in rows] == [
        ("feddpms", f"{accuracies[0]:.1f}"), ("fedavg", f"{accuracies[1]:.1f}"),
    ]  # fmt: skip
    assert [row[8] for row in rows] == [f"{accuracies[0] - accuracies[1]:.1f}", ""]
    assert (tmp_path / "feddpms_rounds.png").exists()
    assert exchange.read(tmp_path / cells[1].name) is None
    e = exchange.read(tmp_path / cells[0].name)
    assert e is not None
    assert (e.latent, e.preliminary) == (16, 2)
    assert np.array_equal((e.after - e.before).sum(0), [len(e.images.get(c, ())) for c in range(10)])
    # Each way 4 bytes a number of the model; decoders up once and down once; codes with their labels; a byte to ask
    # for decoders, and one in each round of stage II.
    k, rounds, received = 4, 4, sum(map(len, e.images.values()))
    up = 4 * (k * rounds * e.model + k * e.decoder) + e.kept * (4 * 16 + 8)
    down = 4 * (k * rounds * e.model + k * e.decoder) + received * (4 * 16 + 8) + k * 3
    assert (first["bytes_up"], first["bytes_down"]) == (up, down)
    assert f"| counted        | {up + down}" in text


def test_table_6_counts_the_clients_that_the_engine_samples() -> None:
    """Of ten clients and C = 0.26 two, not three."""
    e = Exchange(np.zeros((10, 10)), np.zeros((10, 10)), {}, 0, model=100, decoder=30, latent=8, preliminary=4)
    run = {
        "run": "x", "partition.n_clients": 10, "federation.rounds": 10, "federation.participation": 0.26,
        "feddpms.quota": 5, "feddpms.classes": 3, "bytes_up": 0, "bytes_down": 0,
    }  # fmt: skip
    assert len(participants(10, 0.26, 0, 1)) == 2
    text = feddpms_tables.sent(run, e)
    assert f"| {2 * 2 * 10 * 4 * 100} " in text.replace("model          |", "").replace("  ", " ")


def test_in_fedssyns_table_it_asks_for_an_autoencoder_before_any_work(
    sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    table1, words = sweeps("table1"), ["--preset", "smoke", "--algorithms", "fedavg,feddpms,fedvae"]
    with pytest.raises(UserError, match=r"encode.* vae"):
        sweep.todo(table1.grid(table1.arguments(words)), tmp_path / "out", Display())
    options = table1.arguments([*words, "--model.name", "vae"])
    assert len(sweep.todo(table1.grid(options), tmp_path / "out", Display()).cells) == 2 * 3 * 2
    assert not (tmp_path / "out").exists()
