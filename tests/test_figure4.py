"""Figure 4 of Fedssyn: which runs it plays, what it refuses, and its table and picture."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from papers.fedssyn.sensitivity_report import figure, is_above, table


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("sensitivity")


def entries(script: ModuleType, *argv: str) -> list[Any]:
    return script.entries(script.arguments(argv))


def test_preset_paper_is_the_whole_grid(script: ModuleType) -> None:
    found = entries(script, "--preset", "paper", "--seeds", "0,1")
    assert len(found) == 2 * ((1 + 5 * 5) + 2 * (1 + 5) + (1 + 2))
    assert {(e.panel, e.n_clients, e.cell.config.flat["partition.alpha"]) for e in found} == {
        ("a", 10, 0.1), ("b", 10, 0.01), ("b", 40, 0.01), ("c", 10, 0.01)
    }  # fmt: skip
    fields = [(e, e.cell.config.flat) for e in found if e.generator]
    assert all(flat["sharing.p"] == pytest.approx(e.number / (1 + e.number)) for e, flat in fields)
    assert all(flat["generator.rho"] == e.rho and flat["generator.epochs"] == e.epochs for e, flat in fields)
    assert len({flat["client.lr"] for _, flat in fields}) == 1
    assert {e.cell.config.sharing.setting for e in found if not e.generator} == {"real"}


def test_pools_of_one_generator_share_its_training(script: ModuleType) -> None:
    found = entries(script, "--preset", "smoke")
    needs = {(e.panel, e.n_clients, e.rho, e.number, e.epochs): prepare(e.cell.config).needs
             for e in found if e.generator == "ddpm"}  # fmt: skip
    for few, many in zip(needs["a", 4, 0.5, 0.25, 2], needs["a", 4, 0.5, 1.0, 2], strict=True):
        assert few.course_facts == many.course_facts
        assert few.n == round(many.n / 4)
    for part, whole in zip(needs["a", 4, 0.5, 1.0, 2], needs["a", 4, 1.0, 1.0, 2], strict=True):
        seen = {x.numpy().tobytes() for x in whole.examples.x}
        assert {x.numpy().tobytes() for x in part.examples.x} <= seen
        assert len(part.examples) == pytest.approx(len(whole.examples) / 2, abs=len(whole.labels.unique()))
    for early, late in zip(needs["b", 4, 1.0, 1.0, 1], needs["b", 4, 1.0, 1.0, 2], strict=True):
        assert early.course_facts == late.course_facts
    usual = next(e for e in found if (e.panel, e.n_clients, e.epochs) == ("b", 4, 2))
    assert usual.cell.name == next(e for e in found if (e.panel, e.generator) == ("c", "ddpm")).cell.name


def test_the_central_model_makes_as_many_epochs_as_a_client(script: ModuleType) -> None:
    found = entries(script, "--preset", "smoke", "--seeds", "0,1")
    lines = script.central_lines(found)
    assert len(lines) == 2
    assert {line.epochs for line in lines} == {2 * 2}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--preset", "authors"], "authors"),
        (["--rhos", "2"], r"--rhos must lie in \(0, 1\], got 2"),
        (["--clients", "1"], "--clients must lie in"),
        (["--sharing.p", "0.5"], "use --numbers"),
        (["--generators", "dppm"], "dppm"),
        (["--partition.alpha", "1"], "partition.alpha is not for figure 4"),
        (["--partition.name", "iid"], "figure 4 varies partition.alpha, which iid has not"),
    ],
)
def test_bad_requests_are_refused(argv: list[str], why: str, script: ModuleType) -> None:
    with pytest.raises(UserError, match=why):
        entries(script, *argv)


def test_above_is_told_by_students_interval() -> None:
    assert is_above([1.0]) is None
    assert is_above([1.0, 1.2, 1.1])
    assert not is_above([1.0, 5.0, -0.5])
    assert not is_above([-1.0, -1.2, -1.1])


def row(panel: str, n: int, generator: str | None, number: float, epochs: int, last: float) -> dict[str, Any]:
    return {"panel": panel, "n_clients": n, "generator": generator, "rho": 0.5 if generator else 0.0, "number": number,
            "epochs": epochs, "seeds": 2, "last": last, "sd": 1.0, "accuracies": [last - 1, last + 1],
            "ahead": last > 60}  # fmt: skip


def test_table_and_figure(tmp_path: Path) -> None:
    rows = [row("a", 4, None, 0, 0, 33.0), row("a", 4, "ddpm", 0.25, 8, 40.0), row("a", 4, "ddpm", 1, 8, 70.0),
            row("b", 4, None, 0, 0, 33.0), row("b", 4, "ddpm", 1, 4, 50.0), row("c", 4, "gan", 1, 8, 50.0)]  # fmt: skip
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows).splitlines()]
    assert lines[2] == ["(a)", "4", "no pool", "-", "-", "-", "33.0 ± 1.4", "no", "2"]
    assert lines[4] == ["(a)", "4", "ddpm", "50 %", "1", "8", "70.0 ± 1.4", "yes", "2"]
    figure(rows, [60.0, 62.0], tmp_path / "a.png", "title", smoke=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
def test_the_command(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--preset", "smoke", "--rhos", "1", "--numbers", "1", "--clients", "4", "--generators", "ddpm",
            "--artifacts", str(tmp_path / "artifacts"), "--out", str(out)]  # fmt: skip
    assert script.sensitivity(argv) == 0
    with (out / "sensitivity.csv").open() as file:
        pools = [(line["panel"], line["generator"], line["epochs"]) for line in csv.DictReader(file)]
    assert pools == [("a", "", "0"), ("a", "ddpm", "2"), ("b", "", "0"), ("b", "ddpm", "1"), ("b", "ddpm", "2"),
                     ("c", "", "0"), ("c", "ddpm", "2")]  # fmt: skip
    text = (out / "sensitivity.md").read_text()
    assert text.startswith("**SMOKE")
    assert "Central: one model on all" in text
    assert (out / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
