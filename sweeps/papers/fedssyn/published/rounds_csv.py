"""Reader of a CSV with rounds to a target accuracy, in the form of fedssyn_table1_rounds.csv; it refuses bad values."""

import csv
from collections.abc import Iterator
from io import StringIO
from math import isfinite
from pathlib import Path

from fedcommons.errors import UserError

COLUMNS = ("dataset", "algorithm", "n_clients", "participation_rate", "alpha", "rounds_fedssyn", "rounds_vanilla")


def rows(path: Path) -> Iterator[tuple[str, tuple[str, int, float, float, str], dict[str, str]]]:
    """Yield per line: file and line number, the key of ``fedssyn_table_a2``, and rounds by sharing strategy.

    Rounds are texts: ``8``, ``>100`` (not reached) or empty.
    """
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
        rounds = {"shuffled_synthetic": row["rounds_fedssyn"].strip(), "real": row["rounds_vanilla"].strip()}
        yield where, (row["dataset"], n, c, alpha, row["algorithm"]), rounds


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
