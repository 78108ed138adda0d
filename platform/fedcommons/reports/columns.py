"""Texts that describe a configuration (``Cell``) in tables and pictures."""

from collections.abc import Sequence
from typing import Any

from fedcommons.config.dotted import NO_SHARING_SHOWN, SHORT_NAMES
from fedcommons.reports.cells import ENVIRONMENT, IDENTIFYING, Cell
from fedcommons.reports.series import value

_OF_SETTING = ("sharing.", "generator.")

_NO_HEADS = [SHORT_NAMES[short] for short in ("p", "rounds", "clients", "epochs", "batch_size")]
_HEADS = {full: short for short, full in SHORT_NAMES.items() if full not in _NO_HEADS} | IDENTIFYING
"""Column titles of config fields. ``p`` and ``rounds`` are results in tables: the share of received examples, and the
rounds to the target."""


def others(cell: Cell) -> list[str]:
    """Return the varying config fields that have no column in the papers' tables (``IDENTIFYING``)."""
    return [name for name in cell.fields if name not in IDENTIFYING]


def identified(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return the titles of a table's first columns, and for each configuration the texts in these columns."""
    names = [*IDENTIFYING, *others(cells[0])]
    return [head(name) for name in names], [[text(value(cell, name), name) for name in names] for cell in cells]


def key(cell: Cell) -> tuple[Any, ...]:
    """Return the values in the columns ``IDENTIFYING``, which identify a configuration in the papers' tables."""
    return tuple(value(cell, name) for name in IDENTIFYING)


def text(value: object, field: str = "") -> str:
    """Format the value of a config field for a table: short numbers, ``-`` for None, ``no sharing`` for ``real``."""
    if value == "real" and field in ("sharing.setting", "setting"):
        return NO_SHARING_SHOWN
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def of_clients(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Return (column name, title) of each statistic of the clients' accuracies that these runs measured."""
    names = {
        f"{which}/{rows}accuracy_{what}": f"{head} acc.{kind}, {label}"
        for which, head in (("clients", "clients'"), ("personal", "personal"), ("new", "new clients'"))
        for rows, kind in (("", ""), ("train_", " (training data)"), ("adapted_", " (adapted)"))
        for what, label in (("mean", "mean"), ("worst_decile", "worst tenth"), ("std", "std"))
    }
    return [(name, head) for name, head in names.items() if any(cell.values(name) for cell in cells)]


def place(cell: Cell) -> str:
    """Return data and federation as text, such as ``digits, N = 10, C = 1, alpha = 0.1`` (C: participation)."""
    dataset, *names = [name for name in (*IDENTIFYING, *others(cell)) if name.startswith(ENVIRONMENT)]
    return ", ".join([value(cell, dataset), *(f"{head(name)} = {text(value(cell, name))}" for name in names)])


def method(cell: Cell) -> str:
    """Return the algorithm and varying fields, except those of sharing, as text, such as ``fedprox fedprox.mu 0.1``."""
    return named(cell, "algorithm", [name for name in others(cell) if not name.startswith(_OF_SETTING)])


def setting(cell: Cell) -> str:
    """Return the sharing strategy and its varying fields as text, such as ``shuffled_synthetic rho 0.5``."""
    return named(cell, "sharing.setting", [name for name in others(cell) if name.startswith(_OF_SETTING)])


def named(cell: Cell, first: str, more: Sequence[str]) -> str:
    """Return the value of the field ``first``, and names and values of the fields ``more``, as text."""
    texts = [f"{head(name)} {text(field_value)}" for name in more if (field_value := value(cell, name)) is not None]
    return " ".join([text(value(cell, first), first), *texts])


def head(name: str) -> str:
    """Return the column title of a config field: its short name, or its full name if it has no short name."""
    return _HEADS.get(name, name)


def without_sharing(cells: Sequence[Cell]) -> list[Cell | None]:
    """Return for each configuration its counterpart: equal fields, but no sharing (``real``). None: it is missing."""
    names = [name for name in cells[0].fields if not name.startswith(_OF_SETTING)] if cells else []
    keys = [tuple(value(cell, name) for name in names) for cell in cells]
    real = {k: cell for k, cell in zip(keys, cells, strict=True) if value(cell, "sharing.setting") == "real"}
    return [real.get(k) for k in keys]
