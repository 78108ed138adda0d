"""FedDM's sweep: which runs it plays, and its tables, curves and pictures from their folders."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from fedcommons.config.flat import flat_dict
from fedcommons.errors import UserError
from fedcommons.runs import experiment
from fedcommons.runs.build import prepare
from fedcommons.runs.checks import check
from fedcommons.sweeping.display import Display


@pytest.fixture(scope="module")
def feddm(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("feddm")


def test_a_run_that_stands_in_several_tables_is_played_once(feddm: ModuleType) -> None:
    found = feddm.entries(feddm.arguments([]))
    names = {(e.table, e.method): e.cell.name for e in found if e.alpha == 0.1 and e.cell.config.seed == 0}
    same = [("methods", "feddm"), ("images per class", "feddm, ipc 3"), ("radius", "feddm, radius 5"),
            ("noise level", "feddm, sigma 0")]  # fmt: skip
    assert len({names[each] for each in same}) == 1
    assert len(set(names.values())) == len(names) - 3
    assert flat_dict(next(e for e in found if e.method == "REAL").cell.config)["feddm.iterations"] == 0
    assert {e.alpha for e in found} == {0.01, 0.1, 0.5, 50.0}
    assert {e.cell.config.model.name for e in found} == {"convnet"}
    assert {e.cell.config.partition.name for e in found} == {"dirichlet_niid"}


def test_preset_paper_has_the_papers_numbers(feddm: ModuleType) -> None:
    options = feddm.arguments(["--preset", "paper", "--dataset", "cifar100", "--noisy", "feddm,scaffold"])
    found = feddm.entries(options)
    one = flat_dict(found[0].cell.config)
    wanted = {"iterations": 1000, "ipc": 5, "radius": 5.0, "server_epochs": 500, "image_lr": 1.0, "match_batch": 256}
    assert {name: one[f"feddm.{name}"] for name in wanted} == wanted
    assert (one["federation.rounds"], one["model.width"], one["client.batch_size"]) == (20, 128, 256)
    noisy = {e.method: flat_dict(e.cell.config) for e in found if e.table == "noise level"}
    assert noisy["feddm, sigma 3"]["feddm.sigma"] == 3
    assert (noisy["scaffold, sigma 3"]["dp.local"], noisy["scaffold, sigma 3"]["dp.noise_multiplier"]) == (True, 3)
    assert not noisy["scaffold, sigma 0"]["dp.local"]


def test_preset_small_has_other_numbers_on_large_images(feddm: ModuleType) -> None:
    """Network, rounds and server stay."""
    digits, mnist = (
        flat_dict(feddm.entries(feddm.arguments(["--dataset", name]))[0].cell.config) for name in ("digits", "mnist")
    )
    wanted = {"data.limit": 2000, "client.lr": 0.1, "feddm.ipc": 5, "feddm.iterations": 30, "target": 0.8}
    assert {name: mnist[name] for name in wanted} == wanted
    same = ("federation.rounds", "model.width", "feddm.server_epochs", "client.batch_size", "feddm.least")
    assert {name: mnist[name] for name in same} == {name: digits[name] for name in same}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "authors"], "--preset must be one of smoke, small, paper for FedDM, whose code was not released"),
        (["--seed", "1", "--seeds", "1"], "seeds"),
        (["--radii", "3,0"], "feddm.radius must lie in (0, inf), got 0"),
    ],
)
def test_what_is_asked_for_in_vain_is_refused(options: list[str], words: str, feddm: ModuleType) -> None:
    def ask() -> None:
        for e in feddm.entries(feddm.arguments(options)):
            check(e.cell.config)

    with pytest.raises(UserError, match=re.escape(words)):
        ask()


def test_table1_takes_feddm_and_refuses_a_model_without_an_embedding(
    sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    table1, own = sweeps("table1"), tmp_path / "own.py"
    own.write_text(
        "from torch import nn\nfrom lightning_modules import Classifier\n\n\nclass Own(Classifier):\n"
        "    head = 'network.nowhere'\n\n    def __init__(self, n_classes: int) -> None:\n"
        "        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, n_classes)), lr=0.1)\n"
    )
    words = ["--preset=smoke", "--algorithms=fedavg,feddm", "--alphas=0.1", "--settings=real,shuffled_synthetic"]
    for cell in table1.grid(table1.arguments(words)):
        prepare(cell.config)
    fedavg, *_, feddm = table1.grid(table1.arguments([*words, "--model.name", f"{own}:Own"]))
    prepare(fedavg.config)
    with pytest.raises(
        UserError, match=r"FedDM takes embeddings at the model's head: Own\.head must be the dotted name"
    ):
        prepare(feddm.config)


def test_a_seed_that_missed_the_target_makes_a_bound(feddm: ModuleType) -> None:
    row = {"table": "methods", "at": 0.1, "method": "feddm", "rounds": 8, "bytes_once": 0, "run": "a"}
    sent = {"bytes_up": 4_000_000, "bytes_down": 8_000_000}
    frame = pd.DataFrame(
        [
            {**row, **sent, "last_accuracy": 0.8, "best_accuracy": 0.8, "rounds_to_target": 4},
            {**row, **sent, "last_accuracy": 0.6, "best_accuracy": 0.7, "rounds_to_target": None},
        ]
    )
    line = feddm.markdown(frame, feddm.arguments([])).splitlines()[4]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    wanted = "0.1, feddm, 2, 70.0 ± 14.1, 75.0 ± 7.1, >8 (1 of 2 seeds), 0.500, 1.000, >9.00"
    assert cells == wanted.split(", ")


def test_tables_curves_and_pictures_come_from_the_folders(feddm: ModuleType, tmp_path: Path) -> None:
    small = "--preset smoke --seeds 0 --alphas 0.5 --study-alpha 0.5 --algorithms feddm --sigmas 2 --tracking.wandb off"
    small += " --noisy feddm,fedavg"
    options = feddm.arguments([*small.split(), "--ipcs", "", "--radii", "", "--out", str(tmp_path)])
    found = feddm.entries(options)
    for cell in {e.cell.name: e.cell for e in found}.values():
        experiment.run(cell.config, tmp_path / cell.name)
    with Display() as display:
        feddm.report(found, tmp_path, options, display)
    frame = pd.read_csv(tmp_path / "feddm.csv")
    noisy = ["feddm, sigma 0", "fedavg, sigma 0", "feddm, sigma 2", "fedavg, sigma 2"]
    assert frame["method"].tolist() == ["feddm", "REAL", *noisy, "feddm, round 1"]
    assert frame["level"].tolist() == [0, 0, 0, 0, 2, 2, 0]
    assert len(set(frame["run_dir"])) == 6  # one stands in two tables
    first = frame.iloc[0]
    of_class = 4 * 64 * 3 + 8  # three images of 8x8 float32, and a label of 8 bytes
    sent = first["bytes_up"] / first["rounds"] / of_class
    assert sent == pytest.approx(round(sent), abs=1e-6)
    assert 10 <= sent <= 40
    for picture in ("feddm.png", "feddm_noise.png", "feddm_images.png", "feddm_figure1.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
