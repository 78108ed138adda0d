"""Studies: sweeps that run configurations, and write a table, a CSV, a summary and pictures of the finished runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.experiment import Experiment
from fedcommons.reports.tables import to_csv
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid, main, sweep
from fedcommons.tune.sweep import Outcome, Todo, Trial

if TYPE_CHECKING:
    from fedcommons.tune.dry_run import ExtraJob


Row = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A line of a table: its labels, and config fields that differ from the command's."""


@dataclass(frozen=True)
class Entry:
    """A trial in a line of a table; ``labels`` name the line. A trial may be in several lines."""

    cell: Trial
    labels: Mapping[str, Any]

    def __getitem__(self, label: str) -> Any:
        return self.labels[label]

    @property
    def is_tuning(self) -> bool:
        """Return whether the trial only serves to choose learning rates, so that no table reports it."""
        return bool(self.labels.get("tuning"))


@dataclass(frozen=True)
class Results:
    """The results of a study.

    runs: a frame with a row for each entry whose run is finished. A row has the entry's labels, ``cell`` (name of the
    trial) and the columns of ``load_runs``, except columns that have the name of a label.
    """

    entries: Sequence[Entry]
    runs: Any  # pandas' types are too wide to check
    options: parse.Options
    out: Path
    display: Display

    @property
    def configs(self) -> list[Experiment]:
        """Return the experiments of the table, without those that only choose learning rates."""
        return [entry.cell.config for entry in self.entries if not entry.is_tuning]

    @property
    def finished(self) -> list[Entry]:
        names = set(self.runs["cell"])
        return [entry for entry in self.entries if entry.cell.name in names]

    @property
    def reported(self) -> Any:
        """Return the rows of ``runs`` that the table shows, without those that only choose learning rates."""
        return self.runs[self.runs["cell"].isin([e.cell.name for e in self.entries if not e.is_tuning])]

    @property
    def smoke(self) -> bool:
        return grid.is_smoke(self.options)

    def groups(self, *labels: str) -> dict[tuple[Any, ...], Any]:
        """Return the rows of ``runs``, in the order of the entries, by their entries' values of these labels."""
        cells: dict[tuple[Any, ...], list[str]] = {}
        for entry in self.finished:
            cells.setdefault(tuple(entry[label] for label in labels), []).append(entry.cell.name)
        runs = self.runs.drop_duplicates("cell").set_index("cell")
        return {key: runs.loc[names] for key, names in cells.items()}


@dataclass(frozen=True)
class Report:
    """The contents of NAME.md, NAME.csv, pictures (file name -> function) and, unless None, summary.json of a study."""

    text: str
    lines: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    pictures: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)

    def write(self, name: str, options: parse.Options, out: Path) -> str:
        """Write all files into ``out``, and return the table."""
        text = grid.stamped(self.text, options)
        if self.summary is not None:
            write_json(out / "summary.json", {"name": out.name, **self.summary})
        write_text(out / f"{name}.md", text)
        write_text(out / f"{name}.csv", to_csv(self.lines))
        for file, draw in self.pictures.items():
            draw(out / file)
        return text


@dataclass(frozen=True)
class Study:
    """A script that runs a study; calling it with the words of a command line returns the exit code.

    Args:
        name: the script's name, with which the names of the result files begin.
        arguments: parses the command line and refuses bad options.
        configurations: returns an entry for each trial and line of the table.
        render: returns the report of at least one finished run; None: nothing is written.
        play: runs the unfinished trials, and further jobs of the study, if it has any.
        plan: returns the entries to report, for example at the learning rates that the finished runs in a folder
            choose; default: all entries.
        extra: returns the further jobs that ``play`` runs, for the dry run.
    """

    name: str
    arguments: Callable[[Sequence[str]], parse.Options]
    configurations: Callable[[parse.Options], Sequence[Entry]]
    render: Callable[[Results], Report | None]
    play: Callable[[Sequence[Entry], parse.Options, Todo, Path, Display], Outcome] | None = None
    extra: Callable[[Sequence[Entry], parse.Options], "Sequence[ExtraJob]"] = lambda entries, options: ()
    plan: Callable[[Sequence[Entry], Path], Sequence[Entry]] = lambda entries, out: entries

    def __call__(self, argv: Sequence[str]) -> int:
        options = self.arguments(argv)
        entries = self.configurations(options)
        if options.dry_run and any(entry.is_tuning for entry in entries):
            print("Not counted: learning rates that are tried if the best one is at an edge of its list.")
        return main.run(
            options, self.name, grid.once(e.cell for e in entries), partial(self.report, entries, options),
            play=partial(self.play, entries, options) if self.play else sweep.run_cells,
            extra=lambda: self.extra(entries, options),
        )  # fmt: skip

    def report(self, entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
        """Write the files from the folders of the finished runs in ``out``, and display the table."""
        results = load(self.plan(entries, out), options, out, display)
        if results.runs.empty:
            return
        if any(entry.is_tuning for entry in results.entries):  # report.html leaves the tuning out, too
            options.reported = [out / entry.cell.name for entry in results.finished if not entry.is_tuning]
        if results.reported.empty:
            return
        planned = {entry.cell.name for entry in results.entries if not entry.is_tuning}
        if missing := planned - set(results.runs["cell"]):
            display.say(f"{len(missing)} of {len(planned)} runs are not finished: they are left out.")
        if report := self.render(results):
            display.say("\n" + report.write(self.name, options, out))


def expand(options: parse.Options, rows: Sequence[Row], *, by_seed: bool = False) -> list[Entry]:
    """Return an entry for each row and seed of ``--seeds``. by_seed: all rows of the first seed come first."""
    base, seeds = grid.base(options), grid.values(options, "seeds", int)
    sweep.require_few(len(rows) * len(seeds))
    pairs = [(row, seed) for seed in seeds for row in rows] if by_seed else list(product(rows, seeds))
    return [Entry(grid.cell(options, {**base, **fields, "seed": seed}), labels) for (labels, fields), seed in pairs]


def load(entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> Results:
    """Return the results of the finished runs in ``out``, and display a message for each run that cannot be read."""
    import pandas as pd

    runs = grid.finished(grid.once(entry.cell for entry in entries), out, display.say)
    if not runs.empty:
        runs = runs.copy().assign(cell=[Path(run).name for run in runs["run"]])
        names = set(runs["cell"])
        lines = [{**entry.labels, "cell": entry.cell.name} for entry in entries if entry.cell.name in names]
        others = runs.drop(columns=[*entries[0].labels], errors="ignore")
        runs = pd.DataFrame(lines).merge(others, on="cell", how="left").copy()
    return Results(entries, runs, options, out, display)


def gaps(runs: Any, others: Any) -> list[float]:
    """Return the last accuracy of ``runs`` minus that of ``others``, in points, for each seed that both have."""
    both = runs.merge(others, on="seed").sort_values("seed")
    return [100 * gap for gap in (both["last_accuracy_x"] - both["last_accuracy_y"]).dropna()]


def by_method(frame: Any, methods: Iterable[str]) -> dict[tuple[float, str], Any]:
    """Return the rows of ``frame`` by (alpha, method), in the order of ``methods`` and seeds."""
    ordered, pairs = frame.sort_values("seed"), product(dict.fromkeys(frame["at"]), methods)
    by_pair = {(alpha, m): ordered[(ordered["at"] == alpha) & (ordered["method"] == m)] for alpha, m in pairs}
    return {pair: runs for pair, runs in by_pair.items() if not runs.empty}


def with_rate(runs: Any) -> Any:
    """Return the runs with the column ``rate``: the value of the config field that the label ``field`` names."""
    rates = [run[run["field"]] if run["field"] else None for run in runs.to_dict("records")]
    return runs.assign(rate=rates).astype({"rate": float})
