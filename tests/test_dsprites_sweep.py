"""The sweep on dSprites: which runs it plays, what it refuses, and its table and pictures."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from papers.fedssyn.sprites_report import figure, table


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("dsprites")


def found(script: ModuleType, *argv: str) -> list[Any]:
    return script.entries(script.arguments(argv))


def test_preset_paper_is_the_papers_grid(script: ModuleType) -> None:
    entries = found(script, "--preset", "paper", "--seeds", "0,1")
    assert len(entries) == 2 * (1 + 8 * 4 + 4 * 4)  # no pool; figure A.9, left; what its right has besides
    usual = [e for e in entries if e.number == 0.25 and e.cell.config.seed == 0]
    assert [e.rho for e in usual[::4]] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1]
    assert [e.epochs for e in usual[:4]] == [36, 90, 180, 360]
    fields = usual[0].cell.config.flat
    assert fields["sharing.p"] == pytest.approx(0.2)  # n~ = p n_i/(1 - p) = n_i/4
    assert (fields["data.name"], fields["model.name"], fields["generator.ramp"]) == ("dsprites", "vgg11", 24)
    assert (fields["partition.name"], fields["data.validation"]) == ("by_factor", 0)
    assert entries[0].cell.config.sharing.setting == "real"


def test_what_generators_see_is_nested_and_checkpoints_share_a_training(script: ModuleType) -> None:
    entries = found(script, "--preset", "smoke")
    needs = {(e.rho, e.epochs): prepare(e.cell.config).needs for e in entries if e.rho}
    for part, whole in zip(needs[0.5, 8], needs[1, 8], strict=True):
        seen = {x.numpy().tobytes() for x in whole.examples.x}
        assert {x.numpy().tobytes() for x in part.examples.x} <= seen
        assert len(part.examples) == len(whole.examples) // 2
        assert len(part.labels.unique()) == 1
    for early, late in zip(needs[0.5, 4], needs[0.5, 8], strict=True):
        assert early.course_facts == late.course_facts
        assert early.n == round(len(needs[1, 8][early.client].examples) / 4)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--preset", "authors"], "authors"),
        (["--generator.rho", "0.5"], "use --rhos"),
        (["--sharing.p", "0.5"], "use --numbers"),
        (["--rhos", "0"], "--rhos"),
        (["--checkpoints", "2"], "--checkpoints"),
    ],
)
def test_bad_requests_are_refused(argv: list[str], why: str, script: ModuleType) -> None:
    with pytest.raises(UserError, match=why):
        found(script, *argv)


def row(rho: float | None, epochs: int, number: float, last: float) -> dict[str, Any]:
    return {"rho": rho, "epochs": epochs, "number": number, "seeds": 2, "last": last, "sd": 1.0, "best": last,
            "accuracies": [last - 1, last + 1]}  # fmt: skip


@pytest.mark.parametrize("more", [[], [row(1.0, 8, 1.0, 60.0)]])
def test_table_and_figure(more: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = [row(None, 0, 0.0, 33.0), row(0.5, 8, 0.25, 40.0), row(1.0, 8, 0.25, 50.0), *more]
    lines = table(rows).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:4]] == ["no pool", "-", "-"]
    assert [cell.strip() for cell in lines[3].split("|")[1:5]] == ["50 %", "8", "0.25", "40.0 ± 1.4"]
    figure(rows, tmp_path / "a.png", "title", smoke=False)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
def test_the_command(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--preset", "smoke", "--rhos", "0.5", "--artifacts", str(tmp_path / "artifacts"), "--out", str(out)]
    assert script.dsprites(argv) == 0
    with (out / "dsprites.csv").open() as file:
        pools = [(line["rho"], line["epochs"]) for line in csv.DictReader(file)]
    assert pools == [("", "0"), ("0.5", "4"), ("0.5", "8")]
    assert (out / "dsprites.md").read_text().startswith("**SMOKE")
    for name in ("dsprites.png", "dsprites_images.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
