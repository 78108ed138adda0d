"""What the sweeps over a grid put into their runs, and what table1 reports of them."""

import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from fedcommons.config import presets, search_space
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import deciding, from_dict, override, same_results, to_dict
from fedcommons.errors import UserError
from fedcommons.sweeping import grids, planned
from fedcommons.sweeping import sweep as tuning
from fedcommons.sweeping.display import Display
from papers.fedssyn import authors
from papers.fedssyn import table1 as of_table1


@pytest.fixture(scope="module")
def table1(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("table1")


def configs_of(table1: ModuleType, options: str) -> list[Experiment]:
    return [cell.config for cell in table1.grid(table1.arguments(options.split()))]


def test_preset_authors_sets_each_cell_and_yields_to_an_option(table1: ModuleType, tmp_path: Path) -> None:
    options = "--preset authors --alphas 0.1 --federations 10:1 --algorithms fedavg,feddyn"
    asked = configs_of(table1, f"{options} --client.lr 0.1 --generator.epochs 7")  # 0.1 is the preset's value too
    values = {(c.client.lr, c.generator and c.generator.epochs, c.client.batch_size) for c in asked}
    assert values == {(0.1, None, 128), (0.1, 7, 128)}
    rates = configs_of(table1, f"{options} --lrs 0.05,0.1")
    assert {c.client.lr for c in rates} == {0.05, 0.1}
    assert len({tuning.cell(c, grids.VARIED).name for c in rates}) == len(rates) == 8
    base = presets.experiment("authors", "cifar10", {
        "algorithm": "feddyn", "partition.n_clients": 40, "federation.participation": 0.2})  # fmt: skip
    settled = authors.settled("authors", base, {"client.lr"})
    assert (settled.client.lr, settled.client.epochs, settled.flat["feddyn.alpha"]) == (base.client.lr, 30, 0.001)
    path = tmp_path / "c.yaml"
    path.write_text("preset: authors\ndataset: cifar100\nalgorithms: fedavg\nclient: {epochs: 7}\n")
    in_file = configs_of(table1, f"--config {path} --federations 10:1 --alphas 0.1")
    assert {(c.data.name, c.client.epochs, c.client.batch_size) for c in in_file} == {("cifar100", 7, 128)}


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--preset paper", True),
        ("--preset authors", True),
        ("--preset paper --client.epochs 3", False),
    ],
)
def test_published_values_are_printed_for_the_papers_own_setting_only(
    table1: ModuleType, options: str, shown: bool
) -> None:
    given = table1.arguments(options.split())
    assert bool(of_table1.published(table1.grid(given), given)) == shown


def test_departures_name_every_field_that_is_not_the_papers() -> None:
    paper = presets.experiment("paper", "cifar10")
    assert grids.departures([paper], ()) == ""
    assert "0.2, 0.5" in grids.title([override(paper, {"target": target}) for target in (0.2, 0.5)])
    values = {"client.batch_size": 10, "seed": 3, "algorithm": "fedprox", "fedprox.mu": 0.5, "measure.every": 5}
    other = override(paper, values)
    assert grids.departures([other], ("seed",)) == "client.batch_size 10 (paper: 256); fedprox.mu 0.5 (paper: 0.01)"
    assert grids.departures([paper, other], ("seed", "fedprox.mu")) == "client.batch_size 256, 10 (paper: 256)"
    values = {"data.limit": 50, "sharing.setting": "shuffled_synthetic", "generator.channels": (8, 16)}
    limited = grids.departures([presets.experiment("paper", "cifar10", values)], ())
    assert limited == "data.limit 50 (paper: none); generator.channels 8-16 (paper: 64-128-128-128)"


def test_the_notes_name_every_value_that_cells_have(table1: ModuleType) -> None:
    given = table1.arguments(["--preset", "authors", "--algorithms", "feddyn,fedavg", "--federations", "10:1,40:0.2"])
    notes = " ".join(of_table1.footnotes(table1.grid(given), given))
    for part in ("E = 10, 30,", "alpha 0.001, 0.01,", "client.epochs 10, 30", "sharing.p 0.5263, 0.5"):
        assert part in notes, notes
    for extra, said in (("--dp.local true", True), ("", False)):
        given = table1.arguments(f"--lrs 0.05,0.1 {extra}".split())
        assert any("add up" in note for note in of_table1.footnotes(table1.grid(given), given)) == said


def test_digits_train_without_onednn_and_nothing_else_does() -> None:
    """A folder that was written before the field existed holds a run with oneDNN."""
    small, others = presets.experiment("small", "digits"), (("small", "mnist"), ("paper", "digits"))
    assert not small.client.onednn
    assert not presets.experiment("smoke", "digits").client.onednn
    assert all(config.client.onednn for config in [Experiment(), *(presets.experiment(*other) for other in others)])
    written = to_dict(small)
    del written["client"]["onednn"]
    assert same_results(from_dict(written), small) == ["client.onednn"]
    assert deciding(from_dict(written)) == {n: v for n, v in deciding(small).items() if n != "client.onednn"}


@pytest.mark.long
def test_table1_grows_as_runs_end(table1: ModuleType, recorded: Callable[..., None], tmp_path: Path) -> None:
    words = ["--preset", "smoke", "--algorithms", "fedavg,scaffold", "--alphas", "0.1", "--federation.rounds", "30"]
    options = table1.arguments([*words, "--out", str(tmp_path)])
    cells, printed = table1.grid(options), io.StringIO()
    growing, display = of_table1.Growing(cells, options), Display(Console(file=printed, width=200))
    growing.grow(tmp_path, display)
    assert not list(tmp_path.iterdir())
    for number, cell in enumerate(of_table1.pairs_first(cells), 1):
        recorded(tmp_path / cell.name, cell.config, 24 if cell.config.sharing.setting == "real" else 3)
        growing.grow(tmp_path, display)
        growing.grow(tmp_path, display)
        table = (tmp_path / "table1.md").read_text()
        assert table.count("| digits") == number
        assert ("So far: " in table) == (number < 4)
        assert len(printed.getvalue().splitlines()) == number // 2  # a row once, when all its runs are done
    assert printed.getvalue().splitlines() == [
        f"{name}  alpha 0.1  N 4  C 1  real 24 rounds  shuffled_synthetic 3 rounds  8.0x"
        for name in ("fedavg", "scaffold")
    ]


def test_table1_names_the_runs_that_it_cannot_read(
    table1: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    options = table1.arguments(["--preset=smoke", "--algorithms=fedavg,scaffold", "--alphas=0.1", f"--out={tmp_path}"])
    cells, said = table1.grid(options), []
    growing = of_table1.Growing(cells, options)
    for cell, more in zip(cells, ({}, {"bytes_up": "few"}, {"config": None}, {"p": -1}), strict=True):
        recorded(tmp_path / cell.name, cell.config, 1, **more)
    for _ in range(2):
        text = growing.write(tmp_path, said.append)
        (tmp_path / cells[0].name / "rounds.jsonl").unlink(missing_ok=True)  # is not read again
    assert text.count("| digits") == 1
    assert "So far: 1 of 4 runs." in text
    assert len(said) == 6
    for cell, word, line in zip(cells[1:], ("bytes_up is 'few'", "earlier version", "p is -1"), said, strict=False):
        assert str(tmp_path / cell.name) in line
        assert word in line


def test_of_very_many_cells_only_a_few_are_made(sweeps: Callable[[str], ModuleType], table1: ModuleType) -> None:
    seeds, alphas = ",".join(map(str, range(900))), ",".join(str(0.1 + i / 10) for i in range(20))
    grid = ["--preset", "smoke", "--setting", "real", "--space", f"seed={seeds}", "--space", f"alpha={alphas}"]
    tune, drawn = sweeps("tune"), ["--space", "lr=uniform(0.1,0.2)"]
    options = tune.arguments([*grid, *drawn, "--dry-run"])
    assert len(tune.cells(options)[0]) <= tuning.FEW
    assert options.total == 180_000
    options = table1.arguments(["--preset", "smoke", "--seeds", seeds, "--alphas", alphas, "--dry-run"])
    assert len(table1.grid(options)) <= tuning.FEW
    assert options.total == 900 * 20 * 2 * 2
    few = table1.arguments(["--preset", "smoke", "--seeds", "0,1", "--dry-run"])
    assert (len(table1.grid(few)), few.total) == (16, None)


@pytest.mark.parametrize(
    ("script", "more", "total"),
    [
        ("tune", "--space seed={many} --space lr={other}", "18,000"),
        ("table1", "--seeds {many} --alphas {other}", "72,000"),
        ("advise", "--seeds {many} --alphas {other}", "54,000"),
    ],
)
def test_more_cells_than_a_sweep_can_have_are_refused_before_any_is_made(
    sweeps: Callable[[str], ModuleType], script: str, more: str, total: str
) -> None:
    many, other = ",".join(map(str, range(900))), ",".join(str((i + 1) / 100) for i in range(20))
    argv = ["--preset", "smoke", *more.format(many=many, other=other).split()]
    tuning.require_few(10_000)
    with pytest.raises(UserError, match="10,001"):
        tuning.require_few(10_001)
    with pytest.raises(UserError, match=f"at most 10,000 cells.*{total}"):
        getattr(sweeps(script), script)(argv)


@pytest.mark.usefixtures("untimed")
def test_the_cost_of_a_few_cells_stands_for_all() -> None:
    one = planned.Bill(cells=[2.0, 4.0])
    many = planned.Bill(cells=[2.0, 4.0], times=1000.0)
    assert many.span(many.cells, 2) == 3000
    assert many.seconds(1, in_ray=False) - one.seconds(1, in_ray=False) == pytest.approx(5994, abs=1)
    assert search_space.some([range(10**9)] * 9, 3) == search_space.some([range(10**9)] * 9, 3)
    assert search_space.count({"seed": [0] * 300, "alpha": [0] * 60, "lr": None}, 10) == 180_000
