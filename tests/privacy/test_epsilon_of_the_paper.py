"""The numbers in the tables of docs/notes/epsilon_of_the_paper.md are what the accountants give."""

import csv
from collections.abc import Mapping
from fractions import Fraction
from math import log
from pathlib import Path

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from fedcommons.privacy.accountants import epsilon, noise_for

NOTES = Path(__file__).parents[2] / "docs" / "notes"
DELTA = 1e-5
INPUTS = ("setting", "command", "q", "noise multiplier", "steps")
"""Columns of what an epsilon is computed from; all others are epsilons."""


def table_rows() -> list[Mapping[str, str]]:
    lines = [file.read_text(encoding="utf-8").splitlines() for file in sorted(NOTES.glob("epsilon_of_*.csv"))]
    return [row for table in lines for row in csv.DictReader(table)]


def older_conversion(q: float, sigma: float, steps: int) -> float:
    """min over orders of rdp + log(1/delta)/(alpha - 1): Mironov (2017), proposition 3."""
    orders = np.asarray(RDPAccountant.DEFAULT_ALPHAS)
    costs = np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=orders.tolist()))
    return float((costs + log(1 / DELTA) / (orders - 1)).min())


@pytest.mark.long
def test_each_epsilon_of_the_page() -> None:
    assert len(table_rows()) == 6 + 5 + 3
    for row in table_rows():
        course = float(Fraction(row["q"])), float(row["noise multiplier"]), int(row["steps"])
        computed = {"RDP": epsilon(*course, DELTA), "old conversion": older_conversion(*course)}
        computed["PRV"] = epsilon(*course, DELTA, "prv") if "PRV" in row else 0.0
        computed["printed"] = computed["old conversion"]
        numbers = {name: f"{value:.2f}" for name, value in computed.items() if name in row}
        assert numbers == {name: row[name] for name in row if name not in INPUTS}


@pytest.mark.slow
def test_opacus_solves_for_the_noise_of_the_paper() -> None:
    assert f"{noise_for(10.0, 1 / 40, 20_000, DELTA, 'prv'):.4f}" == "1.9067"
