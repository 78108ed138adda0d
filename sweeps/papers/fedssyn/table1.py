"""Report of Table 1 of Fedssyn: lines and notes of the table, which is written again after each finished run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets
from fedcommons.config.dotted import same_results
from fedcommons.config.experiment import Experiment
from fedcommons.reports import columns, tables
from fedcommons.reports.frames import load_rounds
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Report, Results
from papers.fedssyn import authors
from papers.fedssyn.published import fedssyn_table1

if TYPE_CHECKING:  # pandas takes a second to import, and --help does not need it
    import pandas as pd

VARIED = {*grid.GRID.values(), "partition.n_clients", "federation.participation", "client.lr", "target"}
"""Config fields in which the trials of the table may differ."""


def footnotes(cells: Sequence[sweep.Trial], options: parse.Options) -> list[str]:
    configs = [cell.config for cell in cells]
    rate = (
        f"The learning rate was fixed at {configs[0].client.lr:g} for all configurations, not chosen per configuration."
    )
    if options.lrs is not None:
        rate = (
            "The learning rate was chosen per configuration by validation accuracy of the last round, not by test "
            "data, on the seeds of the table, so its numbers favour the chosen learning rates."
        )
    elif options.preset == "authors":
        rate = f"Learning rates are those of the authors' scripts: {grid.several(configs, 'client.lr')}."
    notes = [
        "Rounds: the first round whose server model has the target test accuracy (not smoothed). A seed that missed "
        "the target counts with all its rounds, and the mean is marked with >.",
        grid.work_note(configs),
        rate,
        grid.method_note(configs),
        f"Seeds: {options.seeds}; ± is the sample standard deviation. MB: all clients, both ways, all rounds and pool.",
    ]
    if any(config.dp.local for config in configs):
        notes.append(
            "DP-SGD: an epsilon in a run's summary covers that run only. The epsilons of all runs on the same data add "
            "up, also of runs with other learning rates."
        )
    shares = any(config.sharing.setting != "real" for config in configs)
    different = grid.departures(configs, VARIED) if shares else ""  # without sharing, the runs replicate no paper
    return [*notes, f"Not as in the paper: {different}."] if different else notes


def contents(cells: Sequence[sweep.Trial], runs: "pd.DataFrame", options: parse.Options) -> Report:
    """Return the table of the finished ``runs``, its CSV, summary and picture; cells: all trials of the table."""
    import pandas as pd

    from papers.fedssyn.table1_pictures import rounds_to_target

    compared = tables.compared(runs)
    names = [*tables.RUN, *columns.others(compared[0])]
    part = [f"So far: {len(runs)} of {len(cells)} runs."] if len(runs) < len(cells) else []
    of_runs = [*tables.private_notes(runs), *tables.rejected_notes(runs), *tables.lost_notes(runs)]
    chosen, title = pd.concat([cell.runs for cell in compared]), grid.title([c.config for c in cells])
    edges = tables.edge_notes(chosen, runs) if options.lrs is not None else []
    notes = [*footnotes(cells, options), *edges, *of_runs, *part]
    table = tables.table1_markdown(compared, published(cells, options), notes) + tables.spread(compared)
    rates = "; each bar has its best learning rate by validation" * (len(set(runs["lr"])) > 1)
    return Report(
        table, tables.records(chosen, names), {"preset": options.preset, "cells": tables.records(runs, names)},
        {"table1.png": lambda path: rounds_to_target(path, compared, title + rates, grid.is_smoke(options))},
    )  # fmt: skip


def report(results: Results) -> Report:
    """Return the contents of the whole table, with a further picture of accuracy over rounds."""
    from papers.fedssyn.table1_pictures import accuracy_over_rounds

    runs, title = results.runs, grid.title(results.configs)
    result = contents([e.cell for e in results.entries], runs, results.options)

    def picture(path: Path) -> None:
        rounds = load_rounds(*runs["run"])
        accuracy_over_rounds(path, tables.compared(runs), rounds, title, results.smoke)

    return replace(result, pictures={**result.pictures, "table1_rounds.png": picture})


def row(cell: sweep.Trial) -> tuple:
    """Return the values that identify the trial's row in the table: (clients, participation, alpha, algorithm)."""
    c = cell.config
    alpha = c.flat.get("partition.alpha")
    return c.partition.n_clients, c.federation.participation, alpha, c.algorithm


def pairs_first(cells: Sequence[sweep.Trial]) -> list[sweep.Trial]:
    """Sort the trials by row of the table, so that rows finish early. In a row, trials with generators come first."""
    rows = list(dict.fromkeys(map(row, cells)))
    return sorted(cells, key=lambda cell: (rows.index(row(cell)), cell.config.generator is None))


def play(
    entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display
) -> sweep.Outcome:
    """Run the remaining trials; after each of them write the table, and display each row that is now complete."""
    cells, printed = [e.cell for e in entries], set[tuple]()
    rows: dict[str, dict[str, Any]] = {}  # finished runs by the trial's name, so that each run is read once

    def grow() -> None:
        import pandas as pd

        new = grid.finished([cell for cell in cells if cell.name not in rows], out, lambda text: None)
        rows.update((Path(line["run"]).name, line) for line in new.to_dict("records"))
        if not rows:
            return
        runs = pd.DataFrame([rows[cell.name] for cell in cells if cell.name in rows])
        contents(cells, runs, options).write("table1", options, out)
        for key in dict.fromkeys(map(row, cells)):
            group = [cell for cell in cells if row(cell) == key]
            if key not in printed and all(cell.name in rows for cell in group):
                printed.add(key)
                display.say(tables.effect(tables.compared(pd.DataFrame([rows[cell.name] for cell in group]))))

    return sweep.run_cells(replace(todo, trials=pairs_first(todo.trials)), out, display, on_end=grow)


def published(cells: Sequence[sweep.Trial], options: parse.Options) -> Mapping[tuple, str]:
    """Return the paper's rounds; empty if fields outside the table's grid differ from preset paper or authors."""
    if options.preset not in ("paper", "authors") or options.target != Experiment().target:
        return {}
    for cell in cells:
        fields = {**cell.config.flat, **presets.preset(options.preset, options.data.name)}
        expected = authors.cell(options, fields).config
        if set(same_results(expected, cell.config)) - VARIED:
            return {}
    return {key: rounds for key, (_, rounds) in fedssyn_table1().items()}
