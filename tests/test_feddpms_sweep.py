"""The sweep of FedDPMS: its cells, its tables from small runs, and the bytes of its exchange."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import report_runs
import torch
from sweep_runs import complete, rows_of
from torch import nn

from fedcommons.runs.build import prepare
from fedcommons.runs.worker import build_module
from fedcommons.tracking.run_folder import read_summary
from papers.feddpms import exchange

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
        module = build_module(cell.config, prepare(cell.config).dataset)
        convolution = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
        convolution.register_forward_pre_hook(lambda layer, words: seen.append(words[0]))
        module.training_step((x, torch.zeros(1, dtype=torch.int64)), 0)
    assert len(seen) == 6
    for of_method in seen:
        torch.testing.assert_close(of_method, seen[0])


def test_preset_authors_is_the_released_code_as_far_as_fields_say_it(feddpms: ModuleType) -> None:
    """Of the paper's cell it departs in what the docstring of its presets names, and is not Fedssyn's."""
    names = ("feddpms.quota", "feddpms.classes", "model.latent", "federation.rounds", "client.batch_size", "client.lr")
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
    assert [papers["feddpms"][name] for name in names] == [200, 3, 128, 50, 64, 1e-3]
    for name, flat in authors.items():
        result = {n: (papers[name][n], value) for n, value in flat.items() if papers[name][n] != value}
        assert {n: both for n, both in result.items() if not n.startswith("tracking.")} == expected[name]


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
