"""What tables and pictures say of a cell: the papers' columns, and one for every other field that varies."""

from collections.abc import Sequence
from typing import Any

from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.reports.cells import ENVIRONMENT, IDENTIFYING, Cell
from fedcommons.reports.series import value

_OF_SETTING = ("sharing.", "generator.")

_HEADS = {full: short for short, full in SHORT_NAMES.items() if short != "p"} | IDENTIFYING
"""What a field is called in short. ``p`` stands for the share that the clients got, not for what was asked for."""


def others(cell: Cell) -> list[str]:
    """The fields besides those of the papers' columns in which this cell may differ from the others of its table."""
    return [name for name in cell.fields if name not in IDENTIFYING]


def identified(of: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """The first columns of a table: their heads, and the values of each cell. Other fields have their short name."""
    names = [*IDENTIFYING, *others(of[0])]
    return [head(name) for name in names], [[text(value(cell, name)) for name in names] for cell in of]


def key(cell: Cell) -> tuple[Any, ...]:
    """What the papers know a cell by: the values of ``IDENTIFYING``."""
    return tuple(value(cell, name) for name in IDENTIFYING)


def text(found: object) -> str:
    """A value in short; ``-`` where there is none."""
    if isinstance(found, tuple):
        return "-".join(map(str, found))
    return "-" if found is None else f"{found:g}" if isinstance(found, float) else str(found)


def of_clients(of: Sequence[Cell]) -> list[tuple[str, str]]:
    """Columns of accuracies over clients, and their heads: those that ``evaluate.clients`` gave these runs.

    Heads say which model, and where it was not on test examples.
    """
    whats = {"mean": "mean", "worst_decile": "worst tenth", "std": "std"}
    names = {
        f"{which}/{rows}accuracy_{what}": f"{head} acc.{' (training data)' if rows else ''}, {said}"
        for which, head in (("clients", "clients'"), ("personal", "personal"))
        for rows in ("", "train_")
        for what, said in whats.items()
    }
    return [(name, head) for name, head in names.items() if any(cell.values(name) for cell in of)]


def place(cell: Cell) -> str:
    """The federation: ``digits, N = 10, C = 1, alpha = 0.1``, and other fields that methods have to cope with."""
    dataset, *names = [name for name in (*IDENTIFYING, *others(cell)) if name.startswith(ENVIRONMENT)]
    return ", ".join([value(cell, dataset), *(f"{head(name)} = {text(value(cell, name))}" for name in names)])


def method(cell: Cell) -> str:
    """The algorithm, and the other fields that vary but for those of sharing: ``fedprox fedprox.mu 0.1``."""
    return _named(cell, "algorithm", [name for name in others(cell) if not name.startswith(_OF_SETTING)])


def setting(cell: Cell) -> str:
    """The data setting, and the fields of sharing and generators that vary: ``shuffled_synthetic rho 0.5``."""
    return _named(cell, "sharing.setting", [name for name in others(cell) if name.startswith(_OF_SETTING)])


def variant(cell: Cell) -> str:
    """The data setting, and all other fields that vary."""
    return _named(cell, "sharing.setting", others(cell))


def _named(cell: Cell, first: str, more: Sequence[str]) -> str:
    known = [f"{head(name)} {text(found)}" for name in more if (found := value(cell, name)) is not None]
    return " ".join([value(cell, first), *known])


def head(name: str) -> str:
    """What a field is called in short."""
    return _HEADS.get(name, name)


def without_sharing(of: Sequence[Cell]) -> list[Cell | None]:
    """For each cell the one of setting real that differs from it in sharing only."""
    names = [name for name in of[0].fields if not name.startswith(_OF_SETTING)] if of else []
    keys = [tuple(value(cell, name) for name in names) for cell in of]
    real = {k: cell for k, cell in zip(keys, of, strict=True) if value(cell, "sharing.setting") == "real"}
    return [real.get(k) for k in keys]
