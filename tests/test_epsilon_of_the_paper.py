"""Every number of docs/notes/epsilon_of_the_paper.md is what the accountants give."""

from collections.abc import Mapping
from fractions import Fraction
from math import log
from pathlib import Path

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from fedcommons.core.accountants import epsilon, noise_for

PAGE = (Path(__file__).parent.parent / "docs" / "notes" / "epsilon_of_the_paper.md").read_text()
DELTA = 1e-5


def rows() -> list[Mapping[str, str]]:
    """The lines of the page's tables, by the heads of their columns."""
    found, head = [], []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            head = []
        elif not head:
            head = cells
        elif not cells[0].startswith("--"):
            found.append(dict(zip(head, cells, strict=True)))
    return found


def renyi_of_old(q: float, sigma: float, steps: int) -> float:
    """min over orders of rdp + log(1/delta)/(alpha - 1): Mironov (2017), proposition 3."""
    orders = np.asarray(RDPAccountant.DEFAULT_ALPHAS)
    costs = np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=orders.tolist()))
    return float((costs + log(1 / DELTA) / (orders - 1)).min())


def test_the_page_has_its_tables() -> None:
    assert len(rows()) == 6 + 5 + 3


@pytest.mark.parametrize("row", rows(), ids=lambda row: next(iter(row.values())))
def test_each_epsilon_of_the_page(row: Mapping[str, str]) -> None:
    course = float(Fraction(row["q"])), float(row["noise multiplier"]), int(row["steps"])
    assert f"{epsilon(*course, DELTA):.2f}" == row["RDP"]
    if "PRV" in row:
        assert f"{epsilon(*course, DELTA, 'prv'):.2f}" == row["PRV"]
    if "old conversion" in row:
        assert f"{renyi_of_old(*course):.2f}" == row["old conversion"] == row["printed"]


@pytest.mark.slow
def test_opacus_solves_for_the_noise_of_the_paper() -> None:
    assert "solves for a noise multiplier of 1.9067" in PAGE
    assert f"{noise_for(10.0, 1 / 40, 20_000, DELTA, 'prv'):.4f}" == "1.9067"
