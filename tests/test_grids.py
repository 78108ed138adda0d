"""What the sweeps over a grid put into their cells and say under their tables."""

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


def _cells(table1: ModuleType, options: str) -> list[Experiment]:
    return [cell.config for cell in table1.grid(table1.arguments(options.split()))]


def test_small_has_the_papers_five_algorithms_with_and_without_the_pool(table1: ModuleType) -> None:
    cells = _cells(table1, "--seeds 0,1,2")
    assert {c.algorithm for c in cells} == {"fedavg", "scaffold", "fedprox", "feddyn", "fedpvr"}
    assert {c.sharing.setting for c in cells} == {"real", "shuffled_synthetic"}
    assert {(c.partition.n_clients, c.federation.participation) for c in cells} == {(10, 1.0)}
    assert len(cells) == 5 * 2 * 2 * 3


def test_the_columns_of_the_paper_come_on_request_and_with_its_preset(table1: ModuleType) -> None:
    federations = {(10, 1.0), (10, 0.4), (40, 0.2), (100, 0.1)}
    asked = _cells(table1, f"--federations {table1.COLUMNS}")
    papers = _cells(table1, "--preset paper")
    for cells in (asked, papers):
        assert {(c.partition.n_clients, c.federation.participation) for c in cells} == federations
    assert len(papers) == 4 * 2 * 5 * 2 * 3  # and three learning rates
    targets = {c.partition.n_clients: c.target for c in papers if c.partition.alpha == 0.1}
    assert targets == {10: 0.66, 40: 0.66, 100: 0.66}


def test_preset_authors_sets_each_cell_and_yields_to_an_option(table1: ModuleType) -> None:
    options = "--preset authors --alphas 0.1 --federations 10:1 --algorithms fedavg,feddyn"
    rates = {(c.algorithm, c.sharing.setting): c.client.lr for c in _cells(table1, options)}
    assert rates == {
        ("fedavg", "real"): 0.05, ("fedavg", "shuffled_synthetic"): 0.1,
        ("feddyn", "real"): 0.01, ("feddyn", "shuffled_synthetic"): 0.01,
    }  # fmt: skip
    asked = _cells(table1, f"{options} --client.lr 0.1 --generator.epochs 7")  # 0.1 is the preset's own value too
    assert {(c.client.lr, c.generator and c.generator.epochs, c.client.batch_size) for c in asked} == {
        (0.1, None, 128), (0.1, 7, 128)}  # fmt: skip
    rates = _cells(table1, f"{options} --lrs 0.05,0.1")
    assert {c.client.lr for c in rates} == {0.05, 0.1}
    assert len({tuning.cell(c, grids.VARIED).name for c in rates}) == len(rates) == 8
    with pytest.raises(UserError, match="knows the cells of Table 1 only"):
        _cells(table1, "--preset authors --federations 20:1")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--preset paper", True),
        ("--preset authors", True),
        ("--preset paper --client.epochs 3", False),
        ("--preset authors --client.epochs 3", False),
        ("--preset paper --target 0.5", False),
        ("--preset small --dataset cifar10", False),
    ],
)
@pytest.mark.long
def test_published_values_stand_only_beside_the_papers_own_setting(
    table1: ModuleType, options: str, shown: bool
) -> None:
    given = table1.arguments(options.split())
    assert bool(of_table1.published(table1.grid(given), given)) == shown


def test_departures_name_every_field_that_is_not_the_papers() -> None:
    paper = presets.experiment("paper", "cifar10")
    assert grids.departures([paper], ()) == ""
    values = {"client.batch_size": 10, "seed": 3, "algorithm": "fedprox", "fedprox.mu": 0.5, "measure.every": 5}
    other = override(paper, values)
    assert grids.departures([other], ("seed",)) == "client.batch_size 10 (paper: 256); fedprox.mu 0.5 (paper: 0.01)"
    values = {"data.limit": 50, "sharing.setting": "shuffled_synthetic", "generator.channels": (8, 16)}
    limited = presets.experiment("paper", "cifar10", values)
    assert grids.departures([limited], ()) == (
        "data.limit 50 (paper: none); generator.channels 8-16 (paper: 64-128-128-128)"
    )
    assert grids.departures([paper, other], ("seed", "fedprox.mu")) == "client.batch_size 256, 10 (paper: 256)"


def test_the_notes_name_every_value_that_cells_have(table1: ModuleType) -> None:
    """The released code's cells differ in epochs, rates and FedDyn's weight: none may stand for all."""
    given = table1.arguments(["--preset", "authors", "--algorithms", "feddyn,fedavg", "--federations", "10:1,40:0.2"])
    notes = " ".join(of_table1.footnotes(table1.grid(given), given))
    for part in ("E = 10, 30,", "alpha 0.001, 0.01,", "client.epochs 10, 30 (paper: 10)", "sharing.p 0.5263, 0.5",
                 "scripts: 0.01, 0.1, 0.05."):  # fmt: skip
        assert part in notes, notes


def test_digits_train_without_onednn_and_nothing_else_does() -> None:
    """A recorded field: a folder that was written before it was there holds a run with oneDNN."""
    small, others = presets.experiment("small", "digits"), (("small", "mnist"), ("paper", "digits"))
    assert not small.client.onednn
    assert not presets.experiment("smoke", "digits").client.onednn
    assert all(config.client.onednn for config in [Experiment(), *(presets.experiment(*other) for other in others)])
    written = to_dict(small)
    del written["client"]["onednn"]
    assert same_results(from_dict(written), small) == ["client.onednn"]
    assert deciding(from_dict(written)) == {n: v for n, v in deciding(small).items() if n != "client.onednn"}


def test_the_note_on_methods_has_those_that_ran() -> None:
    of = [override(Experiment(), {"algorithm": name}) for name in ("fedavg", "fedprox", "fedpvr", "feddyn")]
    assert grids.method_note(of) == (
        "Clients weigh alike; FedProx's mu 0.01; FedDyn's alpha 0.01, clip 10, squared on."
    )
    weighted = override(of[2], {"federation.weighting": "samples", "fedpvr.layers": "network.last"})
    assert grids.method_note([weighted]) == (
        "Clients weigh by their numbers of examples; FedPVR's layers network.last."
    )


def test_one_experiment_and_tune_take_the_authors_values_too() -> None:
    base = presets.experiment("authors", "cifar10", {
        "algorithm": "feddyn", "partition.n_clients": 40, "federation.participation": 0.2,
    })  # fmt: skip
    settled = authors.settled("authors", base, {"client.lr"})
    assert (settled.client.lr, settled.client.epochs, settled.flat["feddyn.alpha"]) == (base.client.lr, 30, 0.001)
    assert authors.settled("paper", base, ()) == base


def test_table1_says_that_the_epsilons_of_its_runs_add_up(table1: ModuleType) -> None:
    for extra, said in (("--dp.local true", True), ("", False)):
        options = table1.arguments(f"--lrs 0.05,0.1 {extra}".split())
        notes = of_table1.footnotes(table1.grid(options), options)
        assert any("add up" in note and "learning rates" in note for note in notes) == said


OWNED = {
    "table1": {"seed": "seeds", "partition.alpha": "alphas", "algorithm": "algorithms", "sharing.setting": "settings"},
    "figure3": {"seed": "seeds", "partition.alpha": "alphas"},
    "advise": {"seed": "seeds", "sharing.p": "p"},
    "convergence_parameters": {"seed": "seeds", "sharing.p": "p", "sharing.setting": "p",
                               "measure.smoothness": "hessians"},
}  # fmt: skip


@pytest.mark.parametrize("script", OWNED)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_field_that_the_sweep_sets_is_refused_when_asked_for_with_its_default(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, script: str, in_file: bool
) -> None:
    for field, option in OWNED[script].items():
        value = Experiment().flat.get(field)
        text = "null" if value is None else str(value)
        (tmp_path / "c.yaml").write_text(f"{field}: {text}\n")
        words = ["--config", str(tmp_path / "c.yaml")] if in_file else [f"--{field}={text}"]
        with pytest.raises(UserError, match=f"{field} is set by the sweep's own option: use --{option} "):
            sweeps(script).arguments(["--preset", "smoke", *words])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--lrs 0.1 --client.lr 0.1", "client.lr is set by the sweep's own option: use --lrs"),
        ("--federations 10:1 --partition.n_clients 4", "partition.n_clients is set"),
        ("--preset paper --federation.participation 1", "federation.participation is set"),
        ("--alphas nan", "--alphas takes finite float values separated by commas, got 'nan'."),
        ("--alphas 0.1,inf", "got 'inf'."),
        ("--seeds 1.5", "--seeds takes int values separated by commas, got '1.5'."),
        ("--lrs nan", "--lrs takes finite float values"),
        ("--lrs=", "--lrs takes finite float values"),
        ("--federations 10:nan", "--federations takes pairs N:C such as 10:0.4, got '10:nan'."),
        ("--federations=", "--federations takes"),
        ("--federations 10:1,10:1.0", "--federations takes different pairs N:C"),
    ],
)
def test_values_that_no_grid_can_have_are_refused(table1: ModuleType, options: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        table1.grid(table1.arguments(options.split()))
    assert said in str(error.value)


def test_a_dry_run_refuses_what_the_run_would(sweeps: Callable[[str], ModuleType]) -> None:
    with pytest.raises(UserError, match="--alphas takes finite"):
        sweeps("advise").advise(["--preset", "smoke", "--alphas", "nan", "--dry-run"])


def test_a_field_that_is_swept_is_not_set_besides(sweeps: Callable[[str], ModuleType]) -> None:
    tune = sweeps("tune")
    options = tune.arguments(["--preset", "smoke", "--space", "lr=0.1,0.2", "--client.lr", "0.1"])
    with pytest.raises(UserError, match=r"client\.lr is set by the sweep's own option: use --space"):
        tune.cells(options)


def test_a_preset_in_a_config_file_counts_and_a_later_one_more(table1: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("preset: authors\ndataset: cifar100\nalgorithms: fedavg\nclient: {epochs: 7}\n")
    cells = _cells(table1, f"--config {path} --federations 10:1 --alphas 0.1")
    assert {(c.data.name, c.client.epochs, c.client.batch_size) for c in cells} == {("cifar100", 7, 128)}
    other = table1.arguments(f"--preset smoke --config {path}".split())
    assert (other.preset, other.generator.sampling_steps) == ("authors", 250)


def test_table1_runs_row_by_row_and_in_a_row_first_what_needs_generators(table1: ModuleType) -> None:
    cells = table1.grid(table1.arguments(["--algorithms", "fedavg,scaffold", "--seeds", "0,1"]))
    ordered = of_table1.pairs_first(cells)
    rows = [(c.config.partition.alpha, c.config.algorithm) for c in ordered]
    assert list(dict.fromkeys(rows)) == [(a, name) for a in (0.01, 0.1) for name in ("fedavg", "scaffold")]
    assert [c.config.sharing.setting for c in ordered] == [*["shuffled_synthetic"] * 2, *["real"] * 2] * 4
    assert [rows.count(row) for row in dict.fromkeys(rows)] == [4] * 4
    assert sorted(c.name for c in ordered) == sorted(c.name for c in cells)


@pytest.mark.long
def test_table1_grows_as_runs_end(table1: ModuleType, recorded: Callable[..., None], tmp_path: Path) -> None:
    """A table of what is done is there at any time; a row is said once, when all its runs are."""
    words = ["--preset", "smoke", "--algorithms", "fedavg,scaffold", "--alphas", "0.1", "--federation.rounds", "30"]
    options = table1.arguments([*words, "--out", str(tmp_path)])
    cells, said = table1.grid(options), io.StringIO()
    growing, display = of_table1.Growing(cells, options), Display(Console(file=said, width=200))
    growing.grow(tmp_path, display)
    assert not list(tmp_path.iterdir())
    for number, cell in enumerate(of_table1.pairs_first(cells), 1):
        recorded(tmp_path / cell.name, cell.config, 24 if cell.config.sharing.setting == "real" else 3)
        growing.grow(tmp_path, display)
        growing.grow(tmp_path, display)
        table = (tmp_path / "table1.md").read_text()
        assert table.count("| digits") == number
        assert ("So far: " in table) == (number < 4)
        assert len(said.getvalue().splitlines()) == number // 2
    assert said.getvalue().splitlines() == [
        f"{name}  alpha 0.1  N 4  C 1  real 24 rounds  shuffled_synthetic 3 rounds  8.0x"
        for name in ("fedavg", "scaffold")
    ]


def test_table1_reads_a_run_once_and_names_those_it_cannot_read(
    table1: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    options = table1.arguments(["--preset=smoke", "--algorithms=fedavg,scaffold", "--alphas=0.1", f"--out={tmp_path}"])
    cells, said = table1.grid(options), []
    growing = of_table1.Growing(cells, options)
    good, changed, old, other = cells
    for cell, more in ((good, {}), (changed, {"bytes_up": "few"}), (old, {"config": None}), (other, {"p": -1})):
        recorded(tmp_path / cell.name, cell.config, 1, **more)
    for _ in range(2):
        text = growing.write(tmp_path, said.append)
        (tmp_path / good.name / "rounds.jsonl").unlink(missing_ok=True)  # is not looked at again
    assert text.count("| digits") == 1
    assert "So far: 1 of 4 runs." in text
    assert said == 2 * [
        f"left out: {tmp_path / changed.name / 'summary.json'} is damaged: bytes_up is 'few'.",
        f"left out: {tmp_path / old.name} is of an earlier version: its summary.json does not have the config.",
        f"left out: {tmp_path / other.name / 'summary.json'} is damaged: p is -1.",
    ]


def test_very_many_cells_are_counted_and_none_but_a_few_are_made(sweeps: Callable[[str], ModuleType]) -> None:
    seeds, alphas = ",".join(map(str, range(900))), ",".join(str(0.1 + i / 10) for i in range(20))
    grid = ["--preset", "smoke", "--setting", "real", "--space", f"seed={seeds}", "--space", f"alpha={alphas}"]
    tune, drawn = sweeps("tune"), ["--space", "lr=uniform(0.1,0.2)"]
    options = tune.arguments([*grid, *drawn, "--dry-run"])
    assert len(tune.cells(options)[0]) <= tuning.FEW
    assert options.total == 180_000
    table1 = sweeps("table1")
    options = table1.arguments(["--preset", "smoke", "--seeds", seeds, "--alphas", alphas, "--dry-run"])
    assert len(table1.grid(options)) <= tuning.FEW
    assert options.total == 900 * 20 * 2 * 2
    few = table1.arguments(["--preset", "smoke", "--seeds", "0,1", "--dry-run"])
    assert len(table1.grid(few)) == 16
    assert few.total is None


@pytest.mark.parametrize(
    ("script", "more", "said"),
    [
        ("tune", "--space seed={many} --space lr={other}", "these lists make 18,000: give fewer values"),
        ("table1", "--seeds {many} --alphas {other}", "these lists make 72,000: give fewer values"),
        ("figure3", "--seeds {many} --alphas {other}", "these lists make 72,000: give fewer values"),
        ("convergence_parameters", "--seeds {many} --p {other}", "these lists make 18,000: give fewer values"),
        ("feddpms", "--seeds {many} --alphas {other}", "these lists make 18,000: give fewer values"),
        ("advise", "--seeds {many} --alphas {other}", "these lists make 54,000: give fewer values"),
    ],
)
def test_more_cells_than_a_sweep_can_have_are_refused_before_any_is_made(
    sweeps: Callable[[str], ModuleType], script: str, more: str, said: str
) -> None:
    many, other = ",".join(map(str, range(900))), ",".join(str((i + 1) / 100) for i in range(20))
    argv = ["--preset", "smoke", *more.format(many=many, other=other).split()]
    with pytest.raises(UserError, match=f"a sweep has at most 10,000 cells, and {said}"):
        getattr(sweeps(script), script)(argv)


@pytest.mark.long
def test_what_a_few_cells_cost_stands_for_all() -> None:
    one = planned.Bill(cells=[2.0, 4.0])
    many = planned.Bill(cells=[2.0, 4.0], times=1000.0)
    assert many.span(many.cells, 2) == 3000
    assert many.seconds(1, in_ray=False) - one.seconds(1, in_ray=False) == pytest.approx(5994, abs=1)
    assert search_space.some([range(10**9)] * 9, 3) == search_space.some([range(10**9)] * 9, 3)
    assert search_space.count({"seed": [0] * 300, "alpha": [0] * 60, "lr": None}, 10) == 180_000
