"""The sweep of FedDPMS: its cells, its tables from real runs, and what they say of the exchange."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedcommons.config.flat import flat_dict
from fedcommons.errors import UserError
from fedcommons.reports import exchange
from fedcommons.runs import experiment
from fedcommons.tracking.run_folder import read_summary

SMOKE = ["--preset", "smoke", "--feddpms.sigma", "0.3", "--client.epochs", "3", "--tracking.wandb", "off"]


@pytest.fixture(scope="module")
def feddpms(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("feddpms")


def test_all_methods_train_the_same_encoder(feddpms: ModuleType) -> None:
    options = feddpms.arguments(["--seeds", "3,4", "--sigmas", "", "--quotas", ""])
    cells = feddpms.grid(options)
    assert [(c.config.algorithm, c.config.seed) for c in cells] == [
        (name, seed) for name in feddpms.ALGORITHMS.split(",") for seed in (3, 4)
    ]
    for cell in cells:
        flat = flat_dict(cell.config)
        assert flat["model.name"] == ("vae" if cell.config.algorithm in ("feddpms", "fedvae") else "encoder")
        assert (flat["model.latent"], flat["model.channels"]) == (16, (8, 16))
        assert (flat["partition.name"], flat["partition.alpha"]) == ("dirichlet_niid", 0.5)
        assert (flat["client.optimizer"], flat["federation.weighting"]) == ("adam", "samples")


def test_table_5_varies_one_constant_and_shares_the_cell_of_table_1(feddpms: ModuleType) -> None:
    options = feddpms.arguments(["--algorithms", "feddpms", "--sigmas", "0.5,1", "--quotas", "5,7"])
    cells = feddpms.grid(options)
    found = [(c.config.constants["sigma"], c.config.constants["quota"]) for c in cells]
    assert found == [(1.0, 5), (0.5, 5), (1.0, 7)]
    assert [len(line) for _, _, line in feddpms.table5(options)] == [1, 1, 1, 1]


def test_preset_paper_has_the_papers_numbers(feddpms: ModuleType) -> None:
    papers = ("fmnist", 3.0, 50, 3, 32), ("cifar10", 4.0, 200, 3, 128), ("cifar100", 4.0, 50, 10, 128)
    for dataset, *wanted in papers:
        options = feddpms.arguments(["--preset", "paper", "--dataset", dataset, "--algorithms", "feddpms"])
        flat = flat_dict(feddpms.grid(options)[0].config)
        names = ("feddpms.sigma", "feddpms.quota", "feddpms.classes", "model.latent")
        assert [flat[name] for name in names] == wanted
        assert (flat["federation.rounds"], flat["client.epochs"], flat["client.batch_size"]) == (50, 5, 64)
        assert flat["client.lr"] == 1e-3
    with pytest.raises(UserError, match="--preset authors is of Fedssyn"):
        feddpms.arguments(["--preset", "authors"])


def test_the_tables_say_what_the_runs_did(feddpms: ModuleType, tmp_path: Path) -> None:
    options = feddpms.arguments([*SMOKE, "--algorithms", "feddpms,fedavg", "--quotas", "", "--sigmas", "0.3"])
    cells = feddpms.grid(options)
    assert feddpms.report(cells, tmp_path, options) == ""
    for cell in cells:
        experiment.run(cell.config, tmp_path / cell.name)
    text = feddpms.report(cells, tmp_path, options)
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| 0.5")]
    found = [read_summary(tmp_path / cell.name) or {} for cell in cells]
    accuracies = [f"{100 * s['last_accuracy']:.1f}" for s in found]
    assert [row[1:3] for row in rows] == [["feddpms", accuracies[0]], ["fedavg", accuracies[1]]]
    assert rows[0][4] == f"{100 * (found[0]['last_accuracy'] - found[1]['last_accuracy']):.1f}"
    assert (tmp_path / "feddpms.png").read_bytes().startswith(b"\x89PNG")
    assert exchange.read(tmp_path / cells[1].name) is None
    e = exchange.read(tmp_path / cells[0].name)
    assert e is not None
    assert (e.latent, e.preliminary) == (16, 2)
    assert np.array_equal((e.after - e.before).sum(0), [len(e.images.get(c, ())) for c in range(10)])
    # each way 4 bytes a number of the model; decoders up once and down once; codes with their labels; a byte to ask
    # for decoders, and one in each round of stage II
    k, rounds, received = 4, 4, sum(map(len, e.images.values()))
    up = 4 * (k * rounds * e.model + k * e.decoder) + e.kept * (4 * 16 + 8)
    down = 4 * (k * rounds * e.model + k * e.decoder) + received * (4 * 16 + 8) + k * 3
    assert (found[0]["bytes_up"], found[0]["bytes_down"]) == (up, down)
    assert f"| counted        | {up + down}" in text
