"""Report of the FedDPMS sweep from its run folders: tables, CSV, summary and pictures."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import cells
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid, sweep


def report(of_tables: Mapping[str, Sequence[sweep.Trial]], options: parse.Options, out: Path, display: Display) -> None:
    """Write tables, CSV, summary and pictures of finished runs into ``out``; of_tables: trials by the table's title."""
    from papers.feddpms import exchange
    from papers.feddpms import tables as feddpms

    every = grid.finished(once(of_tables), out)
    if every.empty:
        display.say("\n")
        return
    records = tables.records(every, [*tables.RUN, *columns.others(cells(every)[0])])
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": records})
    write_text(out / "feddpms.csv", tables.to_csv(records))
    exchanges = {run: e for run in every["run"] if (e := exchange.read(Path(run)))}
    compared = {}
    for table, of_table in of_tables.items():
        runs = grid.finished(of_table, out)
        compared[table] = [] if runs.empty else tables.compared(feddpms.with_kept(runs, exchanges))
    configs = [cell.config for cell in once(of_tables)]
    notes = [*feddpms.NOTES, grid.work_note(configs), grid.method_note(configs)]
    text, smoke = [], grid.is_smoke(options)
    for table, of_table in compared.items():
        if of_table:
            whole = table in ("Table 1", "Table 2", "Ablations")
            body = feddpms.methods(of_table, notes) if whole else feddpms.constants(of_table, options.dp.delta)
            text.append(f"{table}\n\n{body}")
    if first := next((run for run in every.to_dict("records") if run["run"] in exchanges), None):
        text.append(f"Table 6\n\n{feddpms.sent(first, exchanges[first['run']])}")
        exchange.picture(out / "feddpms.png", exchanges[first["run"]], first["dataset"], smoke)
    table1, table2, figure3 = (compared.get(table, []) for table in ("Table 1", "Table 2", "Figure 3"))
    feddpms.over_rounds(out / "feddpms_rounds.png", [*table1, *figure3], smoke)
    feddpms.over_federations(out / "feddpms_federations.png", [*table1, *table2], smoke)
    markdown = grid.stamped("\n".join(text), options)
    write_text(out / "feddpms.md", markdown)
    display.say("\n" + markdown)


def once(of_tables: Mapping[str, Sequence[sweep.Trial]]) -> list[sweep.Trial]:
    """Return the trials of all tables, each trial once."""
    return grid.once(chain.from_iterable(of_tables.values()))
