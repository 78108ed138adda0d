"""Table 1 of the Fedssyn paper, and functions for all tables; a line is a configuration, averaged over its seeds."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.errors import UserError
from fedcommons.privacy.salts import IF_SECRET
from fedcommons.reports.cells import Cell, cells, counted, fields, reached, varied
from fedcommons.reports.columns import identified, key, of_clients, place, setting, text, variant, without_sharing
from fedcommons.reports.series import value

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

RUN = ("dataset", "algorithm", "setting", "alpha", "n_clients", "participation", "seed", "learning_rate", "target",
       "rounds_to_target", "rounds", "last_accuracy", "best_accuracy", "validation_accuracy", "p", "bytes_down",
       "bytes_up", "bytes_once", "partition")  # fmt: skip
"""The columns of a table's CSV, which has one line per run."""


def compared(runs: "pd.DataFrame") -> list[Cell]:
    """Return the configurations of a table, each with the runs at its best learning rate (``at_best_rate``).

    Raises:
        UserError: runs with equal fields of data and partition and an equal seed have different partitions.
    """
    of_data = varied(runs.loc[:, [name for name in fields(runs) if name.startswith(("data.", "partition."))]])
    for _, same in runs.groupby([*of_data, "seed"], dropna=False):
        if len(set(same["partition"].dropna())) > 1:
            first_run, *_, other_run = (Path(run).name for run in same["run"])
            raise UserError(f"runs on different partitions cannot be compared: {first_run} and {other_run}.")
    return [Cell(cell.fields, at_best_rate(cell.runs)) for cell in cells(runs.drop(columns="client.lr"))]


def at_best_rate(runs: "pd.DataFrame", rate: str = "lr") -> "pd.DataFrame":
    """Return the runs at the learning rate with the highest validation accuracy (last round, mean over seeds).

    With equal accuracies the smaller learning rate is chosen. Learning rates with fewer finished seeds than another
    learning rate are left out. Test accuracy is not used. rate: name of the column with the learning rate.

    Raises:
        UserError: there are several learning rates and no validation accuracy (a method without a server model).
    """
    at = {value: runs.loc[runs[rate] == value, :] for value in sorted(set(runs[rate].dropna()))}
    if len(at) < 2:
        return runs
    if runs["validation_accuracy"].dropna().empty:
        raise UserError(
            f"runs of {runs['algorithm'].iloc[0]} have no validation accuracy to choose among the learning rates "
            f"{', '.join(f'{value:g}' for value in at)}: compare runs of one learning rate."
        )
    most = max(map(len, at.values()))
    scores = {
        value: fmean(runs_at_value["validation_accuracy"])
        for value, runs_at_value in at.items()
        if len(runs_at_value) == most
    }
    return at[max(scores, key=lambda value: scores[value])]


def rounds(runs: "pd.DataFrame") -> str:
    """Return the rounds to the target over a configuration's seeds as text (``rounds_needed``); ``-``: no accuracy."""
    if "last_accuracy" in runs and runs["last_accuracy"].dropna().empty:
        return "-"
    return rounds_needed(reached(runs), max(runs["rounds"].tolist()))


def rounds_needed(reached: Sequence[float | None], most: int) -> str:
    """Format mean ± standard deviation of rounds to the target, or ``>most (missed by n of N)`` if n of N seeds missed.

    reached: rounds of each seed; None: the seed missed the target. most: largest number of rounds of a run.
    """
    if n := reached.count(None):
        return f">{most}" if n == len(reached) else f">{most} (missed by {n} of {len(reached)})"
    return mean_std([r for r in reached if r is not None], 0 if len(reached) == 1 else 1)


def mean_rounds(runs: "pd.DataFrame") -> tuple[float, bool]:
    """Return the mean rounds to the target, and whether a run missed the target; such a run counts all its rounds."""
    needed, missed = counted(runs, "rounds_to_target")
    return fmean(needed), missed > 0


def mean_std(values: Sequence[float], digits: int | None) -> str:
    """Format ``mean ± sample standard deviation``, or one value. digits: decimals; None: four significant digits."""
    form = ".4g" if digits is None else f".{digits}f"
    mean = format(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(stdev(values), form if digits is not None else '.2g')}"


def percent(cell: Cell, accuracy: str) -> str:
    """Format a column of accuracies in percent, as mean ± standard deviation over seeds, or ``-`` without values."""
    values = [100 * fraction for fraction in cell.values(accuracy)]
    return mean_std(values, 1) if values else "-"


def share(cell: Cell) -> str:
    """Format p, the share of received examples in the clients' training data, as a mean over seeds; ``-``: unknown."""
    p = value(cell, "p")
    return "-" if p is None else f"{p:.2f}"


def speed_up(base: Cell, other: Cell) -> str:
    """Format the speed-up, the rounds to the target of ``base`` divided by those of ``other``, as ``4.0x``.

    ``>``: a run of ``base`` missed the target, so the number is a lower bound. ``<``: a run of ``other`` missed the
    target, so the number is an upper bound. ``-``: runs of both missed the target.
    """
    (slow, slow_censored), (fast, fast_censored) = mean_rounds(base.runs), mean_rounds(other.runs)
    if slow_censored and fast_censored:
        return "-"
    sign = ">" if slow_censored else "<" if fast_censored else ""
    return f"{sign}{slow / fast:.1f}x"


def effect(cells: Sequence[Cell]) -> str:
    """Return a line of text on an algorithm: rounds to the target by sharing strategy, and speed-up over no sharing."""
    _, n, c, alpha, algorithm, _ = key(cells[0])
    parts = [algorithm, f"alpha {text(alpha)}", f"N {n}", f"C {c:g}"]
    pairs = zip(cells, without_sharing(cells), strict=True)
    for cell, base in sorted(pairs, key=lambda pair: value(pair[0], "sharing.setting") != "real"):
        parts.append(f"{variant(cell)} {rounds(cell.runs)} rounds")
        parts += [speed_up(base, cell)] if base and base is not cell else []
    return "  ".join(parts)


def table1_markdown(cells: Sequence[Cell], published: Mapping[tuple, str], footnotes: Sequence[str]) -> str:
    """Return Table 1 of the Fedssyn paper in markdown. published: the paper's rounds, by ``key(cell)``."""
    head, values_of_cells = identified(cells)
    head += ["target", "rounds", "speed-up", "last acc.", "best acc.", "p", "lr", "MB exchanged"]
    private = any(map(has_epsilon, cells))
    more = of_clients(cells)
    head += ["ε of shared data"] * private + [name for _, name in more]
    lines = []
    for cell, line, base in zip(cells, values_of_cells, without_sharing(cells), strict=True):
        line += [
            target.in_words(value(cell, 'target')), rounds(cell.runs),
            speed_up(base, cell) if base and base is not cell else "", percent(cell, "last_accuracy"),
            percent(cell, "best_accuracy"), share(cell), text(value(cell, "lr")), f"{fmean(cell.values('MB')):.1f}",
            *[commons_epsilon(cell)] * private, *(percent(cell, name) for name, _ in more),
        ]  # fmt: skip
        lines.append(line + ([published.get(key(cell), "")] if published else []))
    return markdown([*head, *(["paper"] if published else [])], lines) + numbered(footnotes)


def numbered(notes: Sequence[str]) -> str:
    """Return the footnotes as numbered lines of markdown, to print below a table."""
    return "".join(f"\n{i}. {note}" for i, note in enumerate(notes, 1)) + "\n"


def rejected_notes(runs: "pd.DataFrame") -> list[str]:
    """Return a footnote for each run in which the server rejected clients' replies: run and reason."""
    if "rejections" not in runs:
        return []
    with_rejections = runs.dropna(subset="rejections")
    return [
        f"{Path(run).name}: {sentence}."
        for run, sentence in zip(with_rejections["run"], with_rejections["rejections"], strict=True)
    ]


POOL_EPSILON = ("pool_epsilon", f"pool_epsilon{IF_SECRET}")
"""Columns of ``load_runs``: epsilon of shared data with secret noise, and epsilon if seeded noise were secret."""


def has_epsilon(cell: Cell) -> bool:
    """Return whether a run has an epsilon of the shared data, in one of the columns ``POOL_EPSILON``."""
    return any(cell.values(name) for name in POOL_EPSILON)


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
    earned = not cell.values(f"pool_epsilon{IF_SECRET}")
    return "-" if epsilon is None else f"{epsilon:.3g}" if earned else f"{epsilon:.3g} if secret"


def private_notes(runs: "pd.DataFrame") -> list[str]:
    """Return a footnote that explains the epsilon of the shared data, or an empty list if no run has an epsilon."""
    if all(name not in runs or runs[name].dropna().empty for name in POOL_EPSILON):
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
    if "bytes_lost" not in runs:
        return []
    with_losses = runs.loc[runs["bytes_lost"] > 0, :]
    return [
        f"{Path(run).name}: {lost / 1e6:.1f} of the MB exchanged were downloads of stragglers, whose replies did not "
        f"arrive (straggler.rule {rule})."
        for run, lost, rule in zip(
            with_losses["run"], with_losses["bytes_lost"], with_losses["straggler.rule"], strict=True
        )
    ]


def spread(cells: Sequence[Cell]) -> str:
    """Return a text on how much the algorithms differ in each federation and sharing strategy; empty for one algorithm.

    The text gives the range of the mean accuracy in the last round, in percentage points, and the minimum and maximum
    of the mean rounds to the target. Means are over seeds.
    """
    places: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        places.setdefault(place(cell), {}).setdefault(setting(cell), []).append(cell)
    lines = []
    for where, groups in places.items():
        parts = []
        for name, group in groups.items():
            group = [cell for cell in group if cell.values("last_accuracy")]
            if len(group) > 1:
                last = [100 * fmean(cell.values("last_accuracy")) for cell in group]
                needed = sorted(mean_rounds(cell.runs) for cell in group)
                ends = (needed[0], needed[-1])
                apart = " to ".join(f"{'>' if censored else ''}{mean:.3g}" for mean, censored in ends)
                parts.append(f"{name} {max(last) - min(last):.1f} points of last accuracy, {apart} rounds")
        if parts:
            lines.append(f"- {where}: {'; '.join(parts)}.")
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
    whole = (
        "n_clients",
        "rounds_to_target",
        "generator.epochs",
    )  # as Int64, because pandas turns whole numbers into floats if a value is missing
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
