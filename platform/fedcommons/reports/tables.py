"""Table 1 of the Fedssyn paper, and functions for all tables; a line is a configuration, averaged over its seeds."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.errors import UserError
from fedcommons.privacy.salts import IF_SECRET
from fedcommons.reports import columns
from fedcommons.reports.cells import ROUNDS, Cell, cells, counted, fields, reached, values, varied
from fedcommons.reports.columns import identified, key, named, of_clients, others, place, setting, text, without_sharing
from fedcommons.reports.intervals import format_rounds, mean_interval, mean_std
from fedcommons.reports.series import value

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

RUN = ("dataset", "algorithm", "setting", "alpha", "n_clients", "participation", "seed", "learning_rate", "target",
       "rounds_to_target", "rounds", "last_accuracy", "best_accuracy", "validation_accuracy", "p", "bytes_down",
       "bytes_up", "bytes_once", "partition")  # fmt: skip
"""The columns of a table's CSV, which has one line per run."""

POOL_EPSILON = ("pool_epsilon", f"pool_epsilon{IF_SECRET}")
"""Columns of ``load_runs``: epsilon of shared data with secret noise, and epsilon if seeded noise were secret."""


@dataclass(frozen=True)
class Column:
    """A column of numbers in a table of configurations."""

    name: str  # column of ``load_runs``
    head: str  # title
    scale: float = 1.0  # factor by which values are multiplied for printing; 100 for shares
    digits: int | None = None  # number of decimals; None: significant digits

    @property
    def most(self) -> float:
        """The largest possible printed value."""
        return 100.0 if self.scale == 100 else inf


def over_seeds(runs: "pd.DataFrame", column: Column, with_interval: bool = False) -> tuple[str, float | None]:
    """Return the number over seeds in a column as text, and its mean; ``-`` and None without a value.

    The text is mean ± standard deviation, mean (95 % interval), or ``>17 (missed by 1 of 2)`` for a missed target.
    """
    numbers, missed = counted(runs, column.name)
    if not numbers or (
        missed == len(numbers) and "last_accuracy" in runs and {*values(runs, "last_accuracy")} == {None}
    ):
        return "-", None  # without an accuracy no run can reach a target
    printed = [column.scale * number for number in numbers]
    if missed:
        return format_rounds(printed, missed), fmean(numbers)
    spread = mean_interval(printed, column.digits, column.most) if with_interval else mean_std(printed, column.digits)
    return spread, fmean(numbers)


def compared(runs: "pd.DataFrame") -> list[Cell]:
    """Return a table's configurations at their best learning rates; different partitions are a UserError."""
    of_data = varied(runs.loc[:, [name for name in fields(runs) if name.startswith(("data.", "partition."))]])
    for _, same in runs.groupby([*of_data, "seed"], dropna=False):
        if len(set(same["partition"].dropna())) > 1:
            first_run, *_, other_run = (Path(run).name for run in same["run"])
            raise UserError(f"runs on different partitions cannot be compared: {first_run} and {other_run}.")
    return [Cell(cell.fields, at_best_rate(cell.runs)) for cell in cells(runs.drop(columns="client.lr"))]


def at_best_rate(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Return the runs at the learning rate with the highest validation accuracy (last round, mean over seeds).

    With equal accuracies the smaller rate is chosen. Rates with fewer finished seeds than another rate are left out.
    Several rates without a validation accuracy are a UserError.
    """
    at = {value: runs.loc[runs["lr"] == value, :] for value in sorted(set(runs["lr"].dropna()))}
    if len(at) < 2:
        return runs
    if runs["validation_accuracy"].dropna().empty:
        raise UserError(
            f"runs of {runs['algorithm'].iloc[0]} have no validation accuracy to choose among the learning rates "
            f"{', '.join(f'{value:g}' for value in at)}: compare runs of one learning rate."
        )
    most = max(map(len, at.values()))
    return max(
        (at_rate for at_rate in at.values() if len(at_rate) == most), key=lambda at: fmean(at["validation_accuracy"])
    )


def rounds(runs: "pd.DataFrame") -> str:
    """Format the rounds to the target over a configuration's seeds; ``-``: no accuracy."""
    return over_seeds(runs, Column(ROUNDS, "rounds", digits=0 if len(runs) == 1 else 1))[0]


def percent(cell: Cell, accuracy: str) -> str:
    """Format a column of accuracies in percent, as mean ± standard deviation over seeds, or ``-`` without values."""
    return over_seeds(cell.runs, Column(accuracy, "", 100, 1))[0]


def share(cell: Cell) -> str:
    """Format p, the share of received examples in the clients' training data, as a mean over seeds; ``-``: unknown."""
    p = value(cell, "p")
    return "-" if p is None else f"{p:.2f}"


def speed_up(base: Cell, other: Cell) -> str:
    """Format the rounds to the target of ``base`` divided by those of ``other`` as ``4.0x``.

    ``>``: a run of ``base`` missed the target. ``<``: a run of ``other`` missed it. ``-``: runs of both missed it.
    A run that missed the target counts with all its rounds.
    """
    (slow, slow_missed), (fast, fast_missed) = counted(base.runs, ROUNDS), counted(other.runs, ROUNDS)
    sign = ">" if slow_missed else "<" if fast_missed else ""
    return "-" if slow_missed and fast_missed else f"{sign}{fmean(slow) / fmean(fast):.1f}x"


def effect(cells: Sequence[Cell]) -> str:
    """Return a line of text on an algorithm: rounds to the target by sharing strategy, and speed-up over no sharing."""
    _, n, c, alpha, algorithm, _ = key(cells[0])
    parts = [algorithm, f"alpha {text(alpha)}", f"N {n}", f"C {c:g}"]
    pairs = zip(cells, without_sharing(cells), strict=True)
    for cell, base in sorted(pairs, key=lambda pair: value(pair[0], "sharing.setting") != "real"):
        parts.append(f"{named(cell, 'sharing.setting', others(cell))} {rounds(cell.runs)} rounds")
        parts += [speed_up(base, cell)] if base and base is not cell else []
    return "  ".join(parts)


def verdict(groups: Iterable[Sequence[Cell]]) -> str:
    """Return a sentence on the first comparison of sharing with no sharing, and the count of all; "" if there is none.

    Configurations of a group may be compared. Each counts at its best learning rate, with its finished runs only.
    """
    every = [pair for cells in groups for pair in _pairs(cells)]
    if not every:
        return ""
    directions = [_directions(*pair) for pair in every]
    cell, n = every[0][1], len(directions[0])
    usual, needed = (format_rounds(*counted(c.runs, ROUNDS)) for c in every[0])
    who = columns.method(cell) + f" ({place(cell)})" * (len({place(c) for _, c in every}) > 1)
    instead = f"{needed} rounds, as without sharing," if needed == usual else f"{needed} rounds instead of {usual}"
    text = f"With {setting(cell)}, {who} needs {instead} to reach {target.in_words(value(cell, 'target'))}; {n} seed"
    if n > 1:
        is_same = len({*directions[0]}) == 1 and any(directions[0])
        fewer = f"fewer rounds in {directions[0].count(-1)} of them"
        text += f"s, {'all in the same direction' if is_same else fewer}"
    better = sum({*of_pair} == {-1} for of_pair in directions)
    more = f"; in {better} of all {len(every)} comparisons with no sharing, every seed needs fewer rounds"
    return f"{text}{more * (len(every) > 1)}."


def _pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return the pairs (without sharing, with sharing) of configurations that have the same seeds and an accuracy."""
    import pandas as pd

    runs = pd.concat([cell.runs.loc[cell.runs["status"] == "finished", :] for cell in cells])
    try:
        finished = compared(runs) if len(runs) else []
    except UserError:  # several learning rates, and no validation data to choose among them
        return []
    pairs = zip(without_sharing(finished), finished, strict=True)
    return [
        (base, cell) for base, cell in pairs
        if base and base is not cell and "-" not in (rounds(base.runs), rounds(cell.runs))
        and base.runs["seed"].tolist() == cell.runs["seed"].tolist()
    ]  # fmt: skip


def _directions(base: Cell, cell: Cell) -> list[int]:
    """Return for each seed -1, 0 or 1: ``cell`` needs fewer, equal, more rounds to the target, which both may miss."""
    usual, needed = ([inf if r is None else r for r in reached(c.runs)] for c in (base, cell))
    return [(b > a) - (b < a) for a, b in zip(usual, needed, strict=True)]


def table1_markdown(
    cells: Sequence[Cell], published: Mapping[tuple, str], footnotes: Sequence[str],
    references: Sequence[Mapping[str, str]] = (),
) -> str:  # fmt: skip
    """Return Table 1 of the Fedssyn paper in markdown.

    published: the paper's rounds, by ``key(cell)``. references: further lines, as title of a column -> text.
    """
    head, values_of_cells = identified(cells)
    private, more = any(largest_epsilon(cell) is not None for cell in cells), of_clients(cells)
    head += ["target", "rounds", "speed-up", "last acc.", "best acc.", "p", "lr", "MB exchanged"]
    head += ["ε of shared data"] * private + [name for _, name in more] + ["paper"] * bool(published)
    lines = []
    for cell, line, base in zip(cells, values_of_cells, without_sharing(cells), strict=True):
        line += [
            target.in_words(value(cell, 'target')), rounds(cell.runs),
            speed_up(base, cell) if base and base is not cell else "", percent(cell, "last_accuracy"),
            percent(cell, "best_accuracy"), share(cell), text(value(cell, "lr")), f"{fmean(cell.values('MB')):.1f}",
            *[commons_epsilon(cell)] * private, *(percent(cell, name) for name, _ in more),
            *[published.get(key(cell), "")] * bool(published),
        ]  # fmt: skip
        lines.append(line)
    lines += [[reference.get(name, "-") for name in head] for reference in references]
    return markdown(head, lines) + numbered(footnotes)


def numbered(notes: Sequence[str]) -> str:
    """Return the footnotes as numbered lines of markdown, to print below a table."""
    return "".join(f"\n{i}. {note}" for i, note in enumerate(notes, 1)) + "\n"


def rejected_notes(runs: "pd.DataFrame") -> list[str]:
    """Return a footnote for each run in which the server rejected clients' replies: run and reason."""
    notes = zip(values(runs, "run"), values(runs, "rejections"), strict=True)
    return [f"{Path(run).name}: {sentence}." for run, sentence in notes if sentence is not None]


def largest_epsilon(cell: Cell) -> float | None:
    """Return the largest epsilon of the shared data over all clients and seeds, or None if no run has an epsilon."""
    return max((e for name in POOL_EPSILON for e in cell.values(name)), default=None)


def commons_epsilon(cell: Cell) -> str:
    """Format the largest epsilon of the shared data over all clients and seeds.

    ``10 if secret``: the noise was seeded, so 10 would hold only if the noise were secret. ``none``: shared data
    without a privacy guarantee. ``-``: nothing was shared.
    """
    if "uncovered" in cell.values("commons"):
        return "none"
    epsilon = largest_epsilon(cell)
    return "-" if epsilon is None else f"{epsilon:.3g}{' if secret' * bool(cell.values(POOL_EPSILON[1]))}"


def private_notes(runs: "pd.DataFrame") -> list[str]:
    """Return a footnote that explains the epsilon of the shared data, or an empty list if no run has an epsilon."""
    if largest_epsilon(Cell({}, runs)) is None:
        return []
    deltas = ", ".join(f"{delta:g}" for delta in sorted(set(runs["dp.delta"].dropna())))
    return [
        f"ε of shared data, at δ = {deltas}: the largest ε of all clients and seeds. none: no guarantee. if secret: "
        "the ε if the noise were secret; these runs used dp.noise seeded, so anyone who knows the seed can draw the "
        "noise again (--dp.noise secret prevents that). This ε is no guarantee of the whole run: without DP-SGD "
        "clients send unprotected model updates in every round."
    ]


def lost_notes(runs: "pd.DataFrame") -> list[str]:
    """Return a footnote with the MB of downloads for each run in which stragglers downloaded but did not reply."""
    facts = zip(*(values(runs, name) for name in ("run", "bytes_lost", "straggler.rule")), strict=True)
    why = "of the MB exchanged were downloads of stragglers, whose replies did not arrive"
    return [f"{Path(run).name}: {lost / 1e6:.1f} {why} (straggler.rule {rule})." for run, lost, rule in facts if lost]


def spread(cells: Sequence[Cell]) -> str:
    """Return the range of results over algorithms as text, per federation and sharing strategy."""
    places: dict[str, dict[str, list[Cell]]] = {}
    for cell in (cell for cell in cells if cell.values("last_accuracy")):
        places.setdefault(place(cell), {}).setdefault(setting(cell), []).append(cell)
    lines = []
    for where, groups in places.items():
        parts = []
        for name, group in ((name, group) for name, group in groups.items() if len(group) > 1):
            last = [100 * fmean(cell.values("last_accuracy")) for cell in group]
            needed = sorted((counted(cell.runs, ROUNDS) for cell in group), key=lambda n: (fmean(n[0]), n[1]))
            apart = " to ".join(format_rounds(*counts) for counts in (needed[0], needed[-1]))
            parts.append(f"{name} {max(last) - min(last):.1f} points of last accuracy, {apart} rounds")
        lines += [f"- {where}: {'; '.join(parts)}."] if parts else []
    return "\nSpread between the algorithms:\n" + "\n".join(lines) + "\n" if lines else ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a markdown table with columns of equal width in each line. head: titles of the columns."""
    rows = [[str(v) for v in row] for row in [head, *lines]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    out = ["| " + " | ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) + " |" for row in rows]
    out.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(out) + "\n"


def records(runs: "pd.DataFrame", columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return per run the plain values of ``columns`` (None: missing), and its folder's name as ``run_dir``."""
    if runs.empty:
        return []
    whole = ("n_clients", ROUNDS, "generator.epochs")  # pandas turns whole numbers into floats if a value is missing
    selected = runs.reindex(columns=list(columns)).astype({name: "Int64" for name in whole if name in columns})
    plain = selected.astype(object).where(selected.notna(), None)
    return plain.assign(run_dir=[Path(run).name for run in runs["run"]]).to_dict("records")


def to_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV text with one line per mapping, without keys whose value in the first line is a list or mapping."""
    names = [name for name, value in lines[0].items() if not isinstance(value, list | dict)]
    content = io.StringIO()
    writer = csv.DictWriter(content, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return content.getvalue()
