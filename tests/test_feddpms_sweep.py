"""The sweep of FedDPMS: its cells, its tables from small runs, and the bytes of its exchange."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import report_runs
import torch
from sweep_runs import complete, rows_of
from torch import nn

from fedcommons.federation.participation import participants
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import build_module
from fedcommons.tracking.run_folder import read_summary
from papers.feddpms import exchange
from papers.feddpms import tables as feddpms_tables
from papers.feddpms.exchange import Exchange

feddpms = report_runs.script("feddpms")


def test_all_methods_train_the_same_encoder_on_the_same_numbers(feddpms: ModuleType) -> None:
    """Else the table compares scales of pixels, not methods; rates are chosen by validation for each."""
    options = feddpms.arguments(["--seeds", "3", "--sigmas", "", "--quotas", "", "--receives", ""])
    cells, seen = feddpms.grid(options)["Table 1"], []
    assert [c.config.algorithm for c in cells] == feddpms.ALGORITHMS.split(",")
    x = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    for cell in cells:
        flat = cell.config.flat
        assert flat["model.name"] == ("vae" if cell.config.algorithm in ("feddpms", "fedvae") else "encoder")
        assert (flat["model.latent"], flat["model.channels"]) == (16, (8, 16))
        assert (flat["partition.name"], flat["partition.alpha"]) == ("dirichlet_niid", 0.5)
        assert (flat["client.optimizer"], flat["federation.weighting"]) == ("adam", "samples")
        module = build_module(cell.config, prepare(cell.config).dataset)
        convolution = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
        convolution.register_forward_pre_hook(lambda layer, words: seen.append(words[0]))
        module.training_step((x, torch.zeros(1, dtype=torch.int64)), 0)
    assert len(seen) == 6
    for of_method in seen:
        torch.testing.assert_close(of_method, seen[0])
    of_tables = feddpms.grid(feddpms.arguments(["--lrs", "0.01,0.001", "--seeds", "3", "--receives", "nothing"]))
    for cells in of_tables.values():
        result = {(c.config.algorithm, c.config.client.lr) for c in cells}
        assert result == {(name, rate) for name, _ in result for rate in (0.01, 0.001)}


PAPER = ("feddpms.sigma", "feddpms.quota", "feddpms.classes", "model.latent", "federation.rounds", "client.epochs",
         "client.batch_size", "client.lr")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "table", "fields", "expected"),
    [
        ("--alphas 0.5,0.1 --receives decoded,real,nothing", "Ablations", ("partition.alpha", "feddpms.receive"),
         [(alpha, r) for alpha in (0.5, 0.1) for r in (None, "decoded", "real", "nothing")]),
        ("--algorithms feddpms --sigmas 0.5,1 --quotas 5,7 --privacies sound --helpers 2", "Table 5",
         ("feddpms.sigma", "feddpms.quota", "feddpms.privacy", "feddpms.helpers"),
         [(0.5, 5, "paper", 1), (1.0, 5, "paper", 1), (1.0, 7, "paper", 1), (1.0, 5, "sound", 1),
          (1.0, 5, "paper", 2)]),
        ("--algorithms feddpms,fedavg --clients 10:430,20:860", "Table 2",
         ("algorithm", "partition.n_clients", "data.limit"),
         [(a, n, 43 * n) for n in (10, 20) for a in ("feddpms", "fedavg")]),
        ("--preliminary 0.3,0.4,0.5 --federation.rounds 50", "Figure 3", ("feddpms.preliminary_rounds",),
         [(15,), (None,), (25,)]),  # 0.4 is the default
        ("--preset paper --dataset fmnist --algorithms feddpms", "Table 1", PAPER, [(3.0, 50, 3, 32, 50, 5, 64, 1e-3)]),
        ("--preset paper --dataset cifar10 --algorithms feddpms", "Table 1", PAPER,
         [(4.0, 200, 3, 128, 50, 5, 64, 1e-3)]),
        ("--preset paper --dataset cifar100 --algorithms feddpms", "Table 1", PAPER,
         [(4.0, 50, 10, 128, 50, 5, 64, 1e-3)]),
    ],
)  # fmt: skip
def test_cells(
    words: str, table: str, fields: tuple[str, ...], expected: list[tuple[Any, ...]], feddpms: ModuleType
) -> None:
    of_tables = feddpms.grid(feddpms.arguments(words.split()))
    cells = of_tables[table]
    assert [tuple(cell.config.flat.get(name) for name in fields) for cell in cells] == expected
    assert table == "Table 2" or any(cell in of_tables["Table 1"] for cell in cells)


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


@pytest.mark.long
def test_the_tables_and_the_bytes_of_small_runs(feddpms: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset=smoke", "--feddpms.sigma=0.3", "--client.epochs=3", "--wandb=off", "--quotas=", "--sigmas=0.3",
            "--algorithms=feddpms,fedavg", f"--out={tmp_path}"]  # fmt: skip
    cells = feddpms.grid(feddpms.arguments(argv))["Table 1"]
    text = complete(feddpms.feddpms, argv, cells, tmp_path, again=True)
    first, second = (read_summary(tmp_path / cell.name) or {} for cell in cells)
    own, other = (100 * one["last_accuracy"] for one in (first, second))
    rows = [[row[4], row[6], row[8]] for row in rows_of(text, "| dig")]
    assert rows == [["feddpms", f"{own:.1f}", f"{own - other:.1f}"], ["fedavg", f"{other:.1f}", ""]]
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
