"""Columns that describe a cell in tables and pictures: the papers' columns, and every other field that varies."""

from collections.abc import Sequence
from typing import Any

from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.reports.cells import ENVIRONMENT, IDENTIFYING, Cell
from fedcommons.reports.series import value

_OF_SETTING = ("sharing.", "generator.")

_HEADS = {full: short for short, full in SHORT_NAMES.items() if short != "p"} | IDENTIFYING
"""Short names of fields. ``p`` is the share that the clients got, not the requested share."""


def others(cell: Cell) -> list[str]:
    """Return the varying fields of a cell that are not among the papers' columns (``IDENTIFYING``)."""
    return [name for name in cell.fields if name not in IDENTIFYING]


def identified(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return the first columns of a table: their heads, and each cell's values as texts."""
    names = [*IDENTIFYING, *others(cells[0])]
    return [head(name) for name in names], [[text(value(cell, name)) for name in names] for cell in cells]


def key(cell: Cell) -> tuple[Any, ...]:
    """Return the values of the papers' columns (``IDENTIFYING``), which identify a cell in the papers."""
    return tuple(value(cell, name) for name in IDENTIFYING)


def text(value: object) -> str:
    """Format a value in short, ``-`` for None."""
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def of_clients(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Return names and heads of the accuracies over clients that these cells have from ``evaluate.clients``.

    A head names the model, and marks accuracies on training data.
    """
    whats = {"mean": "mean", "worst_decile": "worst tenth", "std": "std"}
    names = {
        f"{which}/{rows}accuracy_{what}": f"{head} acc.{' (training data)' if rows else ''}, {label}"
        for which, head in (("clients", "clients'"), ("personal", "personal"))
        for rows in ("", "train_")
        for what, label in whats.items()
    }
    return [(name, head) for name, head in names.items() if any(cell.values(name) for cell in cells)]


def place(cell: Cell) -> str:
    """Describe the environment: ``digits, N = 10, C = 1, alpha = 0.1``, and varying fields of ``ENVIRONMENT``."""
    dataset, *names = [name for name in (*IDENTIFYING, *others(cell)) if name.startswith(ENVIRONMENT)]
    return ", ".join([value(cell, dataset), *(f"{head(name)} = {text(value(cell, name))}" for name in names)])


def method(cell: Cell) -> str:
    """Describe the algorithm and the varying fields, without fields of sharing: ``fedprox fedprox.mu 0.1``."""
    return _named(cell, "algorithm", [name for name in others(cell) if not name.startswith(_OF_SETTING)])


def setting(cell: Cell) -> str:
    """Describe the sharing strategy and varying fields of sharing and generators: ``shuffled_synthetic rho 0.5``."""
    return _named(cell, "sharing.setting", [name for name in others(cell) if name.startswith(_OF_SETTING)])


def variant(cell: Cell) -> str:
    """Describe the sharing strategy and all varying fields that are not in the papers' columns."""
    return _named(cell, "sharing.setting", others(cell))


def _named(cell: Cell, first: str, more: Sequence[str]) -> str:
    texts = [f"{head(name)} {text(field_value)}" for name in more if (field_value := value(cell, name)) is not None]
    return " ".join([value(cell, first), *texts])


def head(name: str) -> str:
    """Return the short name of a field."""
    return _HEADS.get(name, name)


def without_sharing(cells: Sequence[Cell]) -> list[Cell | None]:
    """Return for each cell the cell without sharing (``real``) that differs in sharing only, or None."""
    names = [name for name in cells[0].fields if not name.startswith(_OF_SETTING)] if cells else []
    keys = [tuple(value(cell, name) for name in names) for cell in cells]
    real = {k: cell for k, cell in zip(keys, cells, strict=True) if value(cell, "sharing.setting") == "real"}
    return [real.get(k) for k in keys]
