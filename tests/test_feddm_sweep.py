"""FedDM's sweep: which runs it needs, how rates are chosen, and its tables from made numbers and from small runs."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
from sweep_runs import complete, rows_of

from papers.feddm import tables as feddm_tables

feddm = report_runs.script("feddm")


def test_a_run_of_several_tables_is_run_once_and_preset_paper_has_the_papers_numbers(feddm: ModuleType) -> None:
    result = feddm.entries(feddm.arguments(["--rates=0.2,2", "--image-rates=1,0.03", "--noisy=feddm,scaffold"]))
    names = {(e.table, e.method, e.rate): e.cell.name for e in result if e.alpha == 0.1 and e.cell.config.seed == 0}
    same = [("methods", "feddm", 1), ("images per class", "feddm, ipc 3", 1), ("radius", "feddm, radius 5", 1),
            ("noise level", "feddm, noise level 0", 1)]  # fmt: skip
    assert len({names[each] for each in same}) == 1
    assert next(e for e in result if e.method == "REAL").cell.config.flat["feddm.iterations"] == 0
    for e in result:
        name, rates = ("client.lr", (0.2, 2)) if "scaffold" in e.method else ("feddm.image_lr", (1, 0.03))
        assert e.method == "REAL" or e.cell.config.flat[name] == e.rate in rates
    options = feddm.arguments(["--preset", "paper", "--dataset", "cifar100", "--noisy", "feddm,scaffold"])
    result = feddm.entries(options)
    one = result[0].cell.config.flat
    wanted = {"iterations": 1000, "ipc": 5, "radius": 5.0, "server_epochs": 500, "image_lr": 1.0, "match_batch": 256}
    assert {name: one[f"feddm.{name}"] for name in wanted} == wanted
    assert (one["federation.rounds"], one["model.width"], one["client.batch_size"]) == (20, 128, 256)
    noisy = {e.method: e.cell.config.flat for e in result if e.table == "noise level"}
    assert noisy["feddm, noise level 3"]["feddm.sigma"] == 3
    scaffold = noisy["scaffold, noise level 3"]
    assert (scaffold["dp.local"], scaffold["dp.noise_multiplier"]) == (True, 3)
    assert not noisy["scaffold, noise level 0"]["dp.local"]


def frame(*lines: tuple[str, str, float | None, int, float, float]) -> pd.DataFrame:
    """Runs: table, method, rate, seed, validation and test accuracy; as the sweep's frame has them."""
    same: dict[str, Any] = {"at": 0.1, "level": 0.0, "rounds": 8, "bytes_once": 0, "bytes_up": 4e6, "bytes_down": 8e6}
    names = ("table", "method", "rate", "seed", "validation_accuracy", "last_accuracy")
    rows = [{**same, **dict(zip(names, line, strict=True)), "run": str(i)} for i, line in enumerate(lines)]
    made = pd.DataFrame(rows).astype({"rate": float})
    algorithm = made["method"].str.replace(r",.*|REAL", "", regex=True).replace("", "feddm")
    return made.assign(algorithm=algorithm, best_accuracy=made["last_accuracy"], rounds_to_target=4)


def kept(result: pd.DataFrame) -> list[str]:
    return result.loc[feddm_tables.with_choice(result)["chosen"], "run"].tolist()


def cells_of(text: str, title: str) -> list[list[str]]:
    """The table below this heading, with its head."""
    return rows_of(text.partition(f"## {title}\n\n")[2].partition("\n\n")[0], "| ")


def test_rates_are_chosen_by_the_mean_validation_accuracy_over_seeds() -> None:
    """For each method, table and alpha alone; REAL keeps its only runs, the run of one round that of the longer run.

    Ties go to the smaller rate; a rate without all seeds is left out.
    """
    noise = "feddm, noise level 0"
    one = frame(
        ("methods", "feddm", 0.03, 0, 0.90, 0.50), ("methods", "feddm", 0.03, 1, 0.80, 0.50),
        ("methods", "feddm", 0.3, 0, 0.70, 0.99), ("methods", "feddm", 0.3, 1, 0.99, 0.99),
        ("methods", "REAL", None, 0, 0.1, 0.1), ("methods", "REAL", None, 1, 0.1, 0.1),
        ("methods", "fedavg", 0.3, 0, 0.2, 0.9), ("methods", "fedavg", 1.0, 0, 0.3, 0.8),
        ("noise level", noise, 0.03, 0, 0.6, 0.6), ("noise level", noise, 0.3, 0, 0.7, 0.5),
        ("round", "feddm, round 1", 0.03, 0, 0.4, 0.4), ("round", "feddm, round 1", 0.3, 0, 0.2, 0.2),
    )  # fmt: skip
    assert kept(one) == ["0", "1", "4", "5", "7", "9", "11"]
    lines = [("methods", "fedavg", rate, seed, 0.5, 0.5) for rate in (2.0, 0.3, 1.0) for seed in (0, 1)]
    assert kept(frame(*lines)) == ["2", "3"]
    best = ("methods", "fedavg", 0.1, 0, 0.9, 0.9)  # its seed 1 failed
    assert kept(frame(*lines, best)) == ["2", "3"]


def test_tables_have_the_rate_what_was_tried_and_how_far_feddm_is_ahead() -> None:
    lines: Sequence[tuple[str, str, float | None, int, float, float]] = (
        *(("methods", "feddm", 0.03, seed, 0.90, 0.80 + seed / 100) for seed in (0, 1, 2)),
        *(("methods", "feddm", 0.3, seed, 0.70, 0.99) for seed in (0, 1, 2)),
        *(("methods", "REAL", None, seed, 0.6, 0.79) for seed in (0, 1, 2)),
    )
    text = feddm_tables.markdown(feddm_tables.with_choice(frame(*lines)), ["a note"])
    _, one, real = cells_of(text, "Methods")
    assert one[:5] == ["0.1", "feddm", "0.03", "3", "81.0 ± 1.0"]
    assert real[:5] == ["0.1", "REAL", "-", "3", "79.0 ± 0.0"]
    _, ahead = cells_of(text, "FedDM against each method")  # 2 ± 4.303 / sqrt(3)
    assert ahead == ["0.1", "REAL", "+1.0, +2.0, +3.0", "+2.0", "[-0.5, +4.5]"]
    head, tried = cells_of(text, "Rates that were tried")
    assert (head, tried) == (["alpha", "method", "0.03", "0.3"], ["0.1", "feddm", "**90.0** (81.0)", "70.0 (99.0)"])


@pytest.mark.long
def test_tables_and_pictures_from_small_runs(feddm: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset=smoke", "--seeds=0", "--alphas=0.5", "--study-alpha=0.5", "--algorithms=feddm", "--sigmas=2",
            "--wandb=off", "--noisy=feddm,fedavg", "--image-rates=0.1,0.3", "--ipcs=", "--radii=",
            "--feddm.server_epochs=2", f"--out={tmp_path}"]  # fmt: skip
    entries = feddm.entries(feddm.arguments(argv))
    text = complete(feddm.feddm, argv, [e.cell for e in entries], tmp_path)
    every = pd.read_csv(tmp_path / "feddm.csv")
    assert len(every) == len(entries)
    chosen = every[every["chosen"]]
    of_methods = chosen[chosen["table"] == "methods"]
    lines = rows_of(text, "| 0.5 ")[:2]
    assert [line[4] for line in lines] == [f"{100 * a:.1f}" for a in of_methods["last_accuracy"]]
    noisy = ["feddm, noise level 0", "fedavg, noise level 0", "feddm, noise level 2", "fedavg, noise level 2"]
    assert chosen["method"].tolist() == ["feddm", "REAL", *noisy, "feddm, round 1"]
    first = chosen.iloc[0]
    of_class = 4 * 64 * 3 + 8  # three images of 8x8 float32, and a label of 8 bytes
    sent = first["bytes_up"] / first["rounds"] / of_class
    assert sent == pytest.approx(round(sent), abs=1e-6)
    assert 10 <= sent <= 40
