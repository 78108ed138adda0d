"""Cells of a table: runs that differ in their seeds only, and their means over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcommons.config.dotted import is_ignored, own_fields
from fedcommons.core.communication import UntilTarget
from fedcommons.errors import UserError, shown, unknown

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

ENVIRONMENT = ("data.", "partition.", "straggler.", "federation.participation", "target")
"""How the fields begin that say what a method has to cope with: it is not ranked across them."""

IDENTIFYING = {
    "data.name": "data set", "partition.n_clients": "N", "federation.participation": "C", "partition.alpha": "alpha",
    "algorithm": "algorithm", "sharing.setting": "setting",
}  # fmt: skip
"""The fields that have a column in every table, and its head. Of what varies these are named first."""

_FIRST = tuple(IDENTIFYING)


@dataclass(frozen=True)
class Cell:
    """Its runs, one for each seed, and the fields by which it differs from the other cells; their values."""

    fields: Mapping[str, Any]
    runs: "pd.DataFrame"

    def values(self, column: str) -> list[float]:
        """The numbers of a column that its runs have, in the order of their seeds."""
        return [] if column not in self.runs else self.runs[column].dropna().tolist()


def fields(runs: "pd.DataFrame") -> list[str]:
    """The columns of a frame of ``load_runs`` that are fields of the config and may tell cells apart."""
    own = [n for n in runs.columns if n in own_fields() or ("." in n and "/" not in n)]
    return sorted((n for n in own if n != "seed" and not is_ignored(n)), key=_place)


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def varied(runs: "pd.DataFrame") -> list[str]:
    """The fields in which runs differ, without those that follow from others before them (a method's constants)."""
    found: list[str] = []
    for name in fields(runs):
        if len(set(_column(runs, name))) > 1 and not _follows(runs, name, found):
            found.append(name)
    return found


def _follows(runs: "pd.DataFrame", name: str, others: Sequence[str]) -> bool:
    """Whether runs that agree in the other fields agree in this one."""
    found: dict[tuple[Any, ...], set[Any]] = {}
    for value, *key in zip(*(_column(runs, n) for n in (name, *others)), strict=True):
        found.setdefault(tuple(key), set()).add(value)
    return bool(others) and all(len(values) == 1 for values in found.values())


def _column(runs: "pd.DataFrame", name: str) -> list[Any]:
    """The values of a column, None where there is none: nan is not equal to itself."""
    return [None if value is None or value != value else value for value in runs[name].tolist()]


def once(runs: "pd.DataFrame", say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Each experiment with each seed once: of runs in several folders the first; ``say`` is told of the others."""
    seen: dict[tuple[Any, ...], str] = {}
    kept = []
    columns = (_column(runs, name) for name in ("run", "seed", *fields(runs)))
    for run, *experiment in zip(*columns, strict=True):
        first = seen.setdefault(tuple(experiment), run)
        kept.append(first == run)
        if first != run:
            say(f"left out: {run} is the same experiment as {first}.")
    return runs.loc[kept, :]


def cells(runs: "pd.DataFrame") -> list[Cell]:
    """The cells of these runs, in the order their first runs stand in."""
    names = varied(runs)
    if not names:
        return [Cell({}, runs.sort_values("seed"))]
    return [
        Cell({n: group[n].iloc[0] for n in names}, group.sort_values("seed"))
        for _, group in runs.groupby(names, dropna=False, sort=False)
    ]


def means(runs: "pd.DataFrame", columns: str | Iterable[str], say: Callable[[str], None] = print) -> "pd.DataFrame":
    """A row a cell: what varies, ``seeds``, and of each column mean and sample standard deviation (``NAME_sd``).

    As in the tables, only finished runs count, each once, and in ``rounds_to_target`` a seed that missed the target
    counts with all its rounds: ``rounds_to_target_missed`` says how many did, and ``rounds_to_target_shown`` has the
    mean with ``>`` then. ``say`` is told what is left out. columns: a name, or several.

    Raises:
        UserError: the runs have no such column, or are no frame.
    """
    import pandas as pd

    if not isinstance(runs, pd.DataFrame):
        raise UserError(f"means takes a frame of load_runs, got {shown(runs)}.")
    several = [columns] if isinstance(columns, str) else list(columns) if isinstance(columns, Iterable) else []
    names = [str(name) for name in several if isinstance(name, str)]
    if not isinstance(columns, Iterable) or len(names) < len(several):
        raise UserError(f"means takes names of columns, got {shown(columns)}.")
    for name in names:
        if name not in runs:
            raise unknown("column", name, runs.columns)
    for run in runs.loc[runs["status"] != "finished", :].to_dict("records"):
        say(f"left out: {run['run']} is {run['status']}.")
    rows, finished = [], once(runs.loc[runs["status"] == "finished", :], say)
    for cell in cells(finished) if len(finished) else ():
        row, seeds = {**cell.fields, "seeds": len(cell.runs)}, len(cell.runs)
        for name in names:
            counts, missed = counted(cell.runs, name)
            if len(counts) < seeds:
                say(f"left out: {name} is missing in {seeds - len(counts)} of {seeds} seeds of {_words(cell)}.")
            values = pd.Series(counts, dtype=float)
            row |= {name: values.mean(), f"{name}_sd": values.std()}
            if name == "rounds_to_target":
                row |= {f"{name}_missed": missed, f"{name}_shown": f"{'>' * (missed > 0)}{values.mean():.4g}"}
        rows.append(row)
    return pd.DataFrame(rows)


def _words(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.fields.items()) or "the only cell"


def counted(runs: "pd.DataFrame", metric: str) -> tuple[list[float], int]:
    """The numbers that runs have of a metric, and how many of them missed the target.

    Of ``rounds_to_target`` a run that missed it counts with all its rounds; of other metrics it has none then.
    """
    found = [None if v is None or v != v else float(v) for v in runs[metric].tolist()] if metric in runs else []
    if metric == "rounds_to_target":
        most = runs["rounds"].tolist()
        return [float(m) if v is None else v for v, m in zip(found, most, strict=True)], found.count(None)
    return [v for v in found if v is not None], 0


def reached(runs: "pd.DataFrame") -> list[float | None]:
    """The first round of each run that has the target accuracy; None where there is none."""
    return [None if found is None or found != found else found for found in runs["rounds_to_target"].tolist()]


def until_target(runs: "pd.DataFrame") -> list[UntilTarget]:
    """What each run sent until it had the target accuracy, its rounds taken to cost the same."""
    per_round = (runs["bytes_down"] + runs["bytes_up"]) / runs["rounds"]
    facts = zip(runs["bytes_once"], per_round, reached(runs), runs["rounds"], strict=True)
    return [
        UntilTarget(once, each, most if needed is None else needed, needed is None)
        for once, each, needed, most in facts
    ]
