"""Reader of a CSV with rounds to a target accuracy, in the form of fedssyn_table1_rounds.csv; it refuses bad values."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path

from fedcommons.errors import UserError

COLUMNS = ("dataset", "algorithm", "n_clients", "participation_rate", "alpha", "rounds_fedssyn", "rounds_vanilla")


@dataclass(frozen=True)
class Row:
    """A line of the CSV; ``where``: its file and line number, for error messages.

    rounds_fedssyn, rounds_vanilla: rounds as text, ``8``, ``>100`` (not reached) or empty.
    """

    where: str
    dataset: str
    algorithm: str
    n_clients: int
    participation: float
    alpha: float
    rounds_fedssyn: str
    rounds_vanilla: str


def rows(path: Path) -> Iterator[Row]:
    reader = csv.DictReader(StringIO(read(path)))
    if lacking := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise UserError(f"{path} has no column {lacking[0]!r}, which is required.")
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if None in row or None in row.values():
            raise UserError(f"{where} must have one value per column: the numbers of values and columns differ.")
        n, c, alpha = (number(row[name], f"{where}: {name}") for name in COLUMNS[2:5])
        if not isinstance(n, int) or c > 1 or n * c < 1 - 1e-9:
            raise UserError(f"{where}: N must be a whole number, and N C from 1 to N clients, got N = {n} and C = {c}.")
        yield Row(where, row["dataset"], row["algorithm"], n, c, alpha, *(row[name].strip() for name in COLUMNS[5:]))


def number(value: str, what: str) -> int | float:
    """Return the finite number above 0 that ``value`` spells, int if whole; what: the number's name in errors."""
    try:
        x = float(value)
    except ValueError:
        raise UserError(f"{what} must be a number, got {value!r}.") from None
    if not isfinite(x) or x <= 0:
        raise UserError(f"{what} must be finite and above 0, got {value!r}.")
    return int(x) if x.is_integer() else x


def read(path: Path) -> str:
    """Return the text of a file, without the byte order mark that spreadsheets write at its beginning."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"{path} cannot be read ({reason}).") from None
