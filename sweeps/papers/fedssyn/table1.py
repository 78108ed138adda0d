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
from fedcommons.reports.cells import Cell
from fedcommons.reports.frames import load_rounds
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Report, Results
from papers.fedssyn import authors, central_trials, references, targets
from papers.fedssyn.published import fedssyn_table1

if TYPE_CHECKING:  # pandas takes a second to import, and --help does not need it
    import pandas as pd

VARIED = {*grid.GRID.values(), "partition.n_clients", "federation.participation", "client.lr", "target"}
"""Config fields in which the trials of the table may differ."""


def footnotes(
    cells: Sequence[sweep.Trial], options: parse.Options, central: central_trials.Chosen = central_trials.NO_MODEL
) -> list[str]:
    configs = [cell.config for cell in references.federated(cells)]
    rate = (
        f"The learning rate was fixed at {configs[0].client.lr:g} for all configurations, not chosen per configuration."
    )
    if learning_rates.tuning_seeds(options):
        rate = (
            f"The learning rate was chosen per configuration among {options.lrs} by validation accuracy of the last "
            f"round, not by test data, on seeds {options.tuning_seeds}, which the table leaves out. "
            "A learning rate at which a run diverged, also on a seed of the table, was excluded."
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
        *references.notes(cells, options, central),
    ]
    if any(config.dp.local for config in configs):
        notes.append(
            "DP-SGD: an epsilon in a run's summary covers that run only. The epsilons of all runs on the same data add "
            "up, also of runs with other learning rates."
        )
    shares = any(config.sharing.setting != "real" for config in configs)
    different = grid.departures(configs, VARIED) if shares else ""  # without sharing, the runs replicate no paper
    return [*notes, f"Not as in the paper: {different}."] if different else notes


def with_servers(runs: "pd.DataFrame") -> tuple[list[Cell], list[Cell]]:
    """Return the configurations of the table, and those of the server alone on the pool (see ``references``)."""
    alone = runs["algorithm"].isin([references.ONE_SHOT])
    parts = [runs.loc[alone == is_alone, :] for is_alone in (False, True)]
    first, servers = (tables.compared(part) if len(part) else [] for part in parts)
    return (first, servers) if first else (servers, [])


def contents(
    cells: Sequence[sweep.Trial], runs: "pd.DataFrame", options: parse.Options, of_rates: Sequence[str] = (),
    central: central_trials.Chosen = central_trials.NO_MODEL,
) -> Report:  # fmt: skip
    """Return the table of the finished ``runs``, its CSV, summary and picture.

    cells: all trials of the table. of_rates: footnotes on the choice of learning rates. central: the central model.
    """
    import pandas as pd

    from papers.fedssyn.table1_pictures import rounds_to_target

    compared, servers = with_servers(runs)
    names = [*tables.RUN, *columns.others(compared[0])]
    part = [f"So far: {len(runs)} of {len(cells)} runs."] if len(runs) < len(cells) else []
    of_runs = [*tables.private_notes(runs), *tables.rejected_notes(runs), *tables.lost_notes(runs)]
    chosen, title = pd.concat([cell.runs for cell in (*compared, *servers)]), grid.title([c.config for c in cells])
    notes = [*footnotes(cells, options, central), *of_rates, *of_runs, *part]
    alone = references.rows(compared[0], servers, central.cells)
    table = tables.table1_markdown(compared, published(cells, options), notes, alone) + tables.spread(compared)
    rates = "; one learning rate for all bars" * (len(set(runs["lr"])) == 1)
    rates = "; each bar has its best learning rate by validation" if learning_rates.tuning_seeds(options) else rates
    lines = tables.records(pd.concat([chosen, *(cell.runs for cell in central.cells)]), names)
    return Report(
        table, lines, {"preset": options.preset, "cells": tables.records(runs, names)},
        {"table1.png": lambda path: rounds_to_target(path, compared, title + rates, grid.is_smoke(options))},
    )  # fmt: skip


def report(results: Results) -> Report | None:
    """Return the contents of the whole table, with bytes and work to each target, and accuracies over the rounds."""
    from papers import client_work
    from papers.fedssyn.table1_pictures import accuracy_over_rounds

    configs = {e.cell.name: e.cell.config for e in results.entries if not e.is_tuning}
    runs, options = results.runs[results.runs["cell"].isin(configs)], results.options
    if runs.empty:
        return None
    title, of_rates = grid.title([*configs.values()]), learning_rates.notes(results.entries)
    models = references.central_lines(results.entries, options)
    central = central_trials.at_best_rate(models, results.entries, results.out)
    result = contents([e.cell for e in results.entries if not e.is_tuning], runs, options, of_rates, central)
    cells, servers = with_servers(runs)
    finished = {name: configs[name] for name in runs["cell"]}
    work = client_work.of_runs(finished, results.out, results.display)
    section = targets.section(cells, servers, grid.listed(options, "targets", float), work)

    def picture(path: Path) -> None:
        accuracy_over_rounds(path, cells, load_rounds(*runs["run"]), title, results.smoke, servers, central.cells)

    return replace(result, text=result.text + section, pictures={**result.pictures, "table1_rounds.png": picture})


def row(cell: sweep.Trial) -> tuple:
    """Return the values that identify the trial's row in the table: (clients, participation, alpha, algorithm)."""
    c = cell.config
    alpha = c.flat.get("partition.alpha")
    return c.partition.n_clients, c.federation.participation, alpha, c.algorithm


def line(cell: sweep.Trial) -> str:
    """Return the name of the line to which the trial belongs with all its seeds."""
    n, c, alpha, algorithm = row(cell)
    texts = [columns.text(cell.config.sharing.setting, "setting"), f"N {n}", f"C {c:g}"]
    return ", ".join([algorithm, *texts, *([] if alpha is None else [f"alpha {alpha:g}"])])


def pairs_first(cells: Sequence[sweep.Trial]) -> list[sweep.Trial]:
    """Sort the trials by row of the table, so that rows finish early. In a row, trials with generators come first."""
    rows = list(dict.fromkeys(map(row, cells)))
    return sorted(cells, key=lambda cell: (rows.index(row(cell)), cell.config.generator is None))


def play(
    entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display
) -> sweep.Outcome:
    """Run the remaining trials; after each of them write the table, and display each row that is now complete."""
    rows: dict[str, dict[str, Any]] = {}  # finished runs by the trial's name, so that each run is read once
    every, printed = [e.cell for e in entries if not e.is_tuning], set[tuple]()

    def run(planned: Sequence[Entry], remaining: sweep.Todo) -> sweep.Outcome:
        cells = [e.cell for e in planned if not e.is_tuning]

        def grow() -> None:
            import pandas as pd

            new = grid.finished([cell for cell in cells if cell.name not in rows], out, lambda text: None)
            rows.update((Path(line["run"]).name, line) for line in new.to_dict("records"))
            finished = [rows[cell.name] for cell in cells if cell.name in rows]
            if not finished:
                return
            of_rates = learning_rates.notes(planned)
            contents(every, pd.DataFrame(finished), options, of_rates).write("table1", options, out)
            for key in dict.fromkeys(map(row, references.federated(cells))):
                group = [cell for cell in cells if row(cell) == key and cell.name in rows]
                if key not in printed and len(group) == sum(row(cell) == key for cell in every):
                    printed.add(key)
                    display.say(tables.effect(tables.compared(pd.DataFrame([rows[cell.name] for cell in group]))))

        return sweep.run_cells(replace(remaining, trials=pairs_first(remaining.trials)), out, display, on_end=grow)

    return learning_rates.play(entries, options, todo, out, display, run=run)


def published(cells: Sequence[sweep.Trial], options: parse.Options) -> Mapping[tuple, str]:
    """Return the paper's rounds; empty if fields outside the table's grid differ from preset paper or authors."""
    if options.preset not in ("paper", "authors") or options.target != Experiment().target:
        return {}
    for cell in references.federated(cells):
        fields = {**cell.config.flat, **presets.preset(options.preset, options.data.name)}
        expected = authors.cell(options, fields).config
        if set(same_results(expected, cell.config)) - VARIED:
            return {}
    return {key: rounds for key, (_, rounds) in fedssyn_table1().items()}
