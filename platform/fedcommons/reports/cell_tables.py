"""Tables of a report on accuracy, bytes and convergence parameters, with one row per configuration (``Cell``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.reports import columns
from fedcommons.reports.cells import ENVIRONMENT, ROUNDS, Cell, counted
from fedcommons.reports.collect import Group
from fedcommons.reports.intervals import student
from fedcommons.reports.series import value
from fedcommons.reports.tables import Column, over_seeds

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

RESULTS = (
    Column(ROUNDS, "rounds to target", digits=1),
    Column("last_accuracy", "last accuracy, %", 100, 1), Column("best_accuracy", "best accuracy, %", 100, 1),
    Column("MB", "MB exchanged"), Column("bytes_once", "MB exchanged once (shared data)", 1e-6),
    Column("disclosed", "disclosed, % of examples", 100, 1), Column("test/loss", "last test loss"),
)  # fmt: skip
BYTES = (
    Column("bytes_down", "MB to clients", 1e-6), Column("bytes_up", "MB from clients", 1e-6),
    Column("bytes_once", "MB of shared data, once", 1e-6),
    Column("bytes_lost", "MB to stragglers without a reply", 1e-6),
)  # fmt: skip
CONVERGENCE = (
    Column("zeta_sq", "ζ², own data"), Column("zeta_hat_sq", "ζ̂², training data"),
    Column("zeta_mix_sq", "ζ², exact mixtures"), Column("zeta_lemma1_sq", "ζ² by Lemma 1"),
    Column("delta_sq", "δ², shift of the pool"),
)  # fmt: skip
NOISE = (
    Column("sigma_sq", "σ², own data"), Column("sigma_hat_sq", "σ̂², training data"),
    Column("sigma_mix_sq", "σ², exact mixtures"), Column("sigma_lemma1_sq", "σ² by Lemma 1"),
    Column("L_max", "L, own data, largest"), Column("L_p", "L, training data"),
    Column("L_lemma1", "L, bound of Lemma 1"),
)  # fmt: skip
NUMBERS = {column.name for column in (*RESULTS, *BYTES, *CONVERGENCE, *NOISE)}

_LATEX = {
    "%": r"\%", "_": r"\_", "ζ̂²": r"$\hat\zeta^2$", "ζ²": r"$\zeta^2$", "σ̂²": r"$\hat\sigma^2$", "σ²": r"$\sigma^2$",
    "δ²": r"$\delta^2$",
}  # fmt: skip

ROWS, LATEX = 1000, 500
"""Maximum number of rows of a table on the page (``ROWS``), and of a table that has LaTeX code (``LATEX``)."""

INTERVALS = (
    "Numbers are means over the seeds of finished runs, with the 95 % Student t interval of the mean in brackets, cut "
    "off at 0 and 100 %. A seed that missed the target counts with all its rounds; the mean is then a lower bound (>) "
    "without an interval. A number without brackets comes from one seed, or is equal for all seeds."
)

MEASURED = (
    "Measured at the server model, in the last round with a measurement. Lemma 1 of Fedssyn gives ζ² and σ² of exact "
    "mixtures of own data and the whole pool, and an upper bound of L. For the data on which clients train, ζ̂² and σ̂² "
    "are only roughly equal to these values."
)

Files = dict[str, Sequence[str]]
"""Lines of a table's download files by key: ``csv``, ``latex`` (up to the last row) and ``tail`` (the end of LaTeX)."""


@dataclass(frozen=True)
class Table:
    """A table of number columns; a row is a configuration, whose first columns are the same in all tables."""

    name: str
    title: str
    note: str  # text above the table
    columns: Sequence[Column]
    rows: Sequence[Sequence[tuple[str, float | None]]]  # text of each number, and the mean by which the page sorts
    files: Files


def build_tables(groups: Sequence[Group], first: "pd.DataFrame") -> list[Table]:
    """Return the report's tables that are not empty. first: the ``first_columns`` of all groups' configurations."""
    import pandas as pd

    cells = [cell for group in groups for cell in group.cells]
    more = (Column(name, head, 100, 1) for name, head in columns.of_clients(cells))
    candidates_of = (
        ("results", "Results", INTERVALS, RESULTS),
        ("clients", "Accuracies of clients and of personal models", "Means over seeds, as above.", tuple(more)),
        ("bytes", "Bytes", "Bytes of all messages of all clients and rounds; an MB has 10⁶ bytes.", BYTES),
        ("convergence", "Convergence parameters and their bounds", MEASURED, CONVERGENCE),
        ("noise", "Gradient noise and smoothness", "Measured as the convergence parameters.", NOISE),
    )
    finished = [cell.runs.loc[cell.runs["status"] == "finished", :] for cell in cells]
    several = len(groups) > 1  # with several groups, the first column of LaTeX is the group's title
    first = first.assign(seeds=[str(len(runs)) for runs in finished])
    first.insert(0, "group", [group.title for group in groups for _ in group.cells])
    tables = []
    for name, title, note, candidates in candidates_of:
        # The table of results shows the rounds to the target even if all runs missed the target.
        metrics = [c for c in candidates if c is RESULTS[0] or any(cell.values(c.name) for cell in cells)]
        if not metrics:
            continue
        rows = [[over_seeds(runs, column, with_interval=True) for column in metrics] for runs in finished[:ROWS]]
        means = pd.DataFrame([_means(runs, metrics) for runs in finished])
        texts = pd.DataFrame([[text for text, _ in row] for row in rows], columns=pd.Index([c.head for c in metrics]))
        latex = pd.concat([first.iloc[:, 1 - several :], texts], axis="columns")
        files = table_files(pd.concat([first, means], axis="columns"), latex, 1 + len(metrics))
        tables.append(Table(name, title, note, metrics, rows, files))
    return tables


def _means(runs: "pd.DataFrame", metrics: Sequence[Column]) -> dict[str, float | None]:
    """Return the mean of each column over these runs and the ends of its interval, by their names in the CSV."""
    line: dict[str, float | None] = {}
    for column in metrics:
        values, missed = counted(runs, column.name)
        low, high = (None, None) if missed else student(values, column.most / column.scale) or (None, None)
        line |= {column.name: fmean(values) if values else None}
        line |= {f"{column.name}_low": low, f"{column.name}_high": high}
        line |= {f"{ROUNDS}_missed": missed} if column.name == ROUNDS else {}
    return line


def first_columns(cells: Sequence[Cell]) -> "pd.DataFrame":
    """Return the texts of the first columns: method, sharing strategy, other varying fields, and share p."""
    import pandas as pd

    varied = dict.fromkeys(name for cell in cells for name in columns.others(cell) if not name.startswith(ENVIRONMENT))
    titles = {"algorithm": "method"} | {name: columns.head(name) for name in ("sharing.setting", *varied)}
    texts = {title: [columns.text(value(cell, name), name) for cell in cells] for name, title in titles.items()}
    if "sharing.p" not in varied:
        texts["p"] = [f"{p:.2f}" if (p := value(cell, "p")) else "-" for cell in cells]
    return pd.DataFrame(texts)


def table_files(frame: "pd.DataFrame", texts: "pd.DataFrame | None" = None, n_right: int = 0) -> Files:
    """Return ``frame`` as CSV and ``texts`` (default: ``frame``) as LaTeX. n_right: number of right-aligned columns."""
    import pandas as pd

    csv = frame.to_csv(index=False, lineterminator="\n").splitlines()
    if len(csv) != 1 + len(frame):  # a text has a line break, which user-defined trackers can write into a summary
        csv = frame.replace(r"[\r\n]+", " ", regex=True).to_csv(index=False, lineterminator="\n").splitlines()
    if len(frame) > LATEX:
        return {"csv": csv, "latex": (), "tail": ()}
    texts = frame if texts is None else texts
    titles = [reduce(lambda title, pair: title.replace(*pair), _LATEX.items(), str(title)) for title in texts]
    style = texts.set_axis(pd.Index(titles), axis="columns").style.hide(axis="index")
    style.format(escape="latex")
    columns = "l" * (len(titles) - n_right) + "r" * n_right
    lines = style.to_latex(hrules=True, column_format=columns).splitlines()
    end = lines.index(r"\midrule") + 1 + len(texts)
    return {"csv": csv, "latex": lines[:end], "tail": lines[end:]}
