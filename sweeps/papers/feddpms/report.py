"""The files of the sweep, from its run folders."""

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
    """Write the tables, the pictures and the summary from the run folders that are done, and show the tables."""
    from papers.feddpms import exchange
    from papers.feddpms import tables as own

    every = grid.finished(once(of_tables), out)
    if every.empty:
        display.say("\n")
        return
    records = tables.records(every, [*tables.RUN, *columns.others(cells(every)[0])])
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": records})
    write_text(out / "feddpms.csv", tables.to_csv(records))
    exchanges = {run: e for run in every["run"] if (e := exchange.read(Path(run)))}
    compared = {}
    for table, of in of_tables.items():
        runs = grid.finished(of, out)
        compared[table] = [] if runs.empty else tables.compared(own.with_kept(runs, exchanges))
    configs = [cell.config for cell in once(of_tables)]
    notes = [*own.NOTES, grid.work_note(configs), grid.method_note(configs)]
    text, smoke = [], grid.is_smoke(options)
    for table, of in compared.items():
        if of:
            whole = table in ("Table 1", "Table 2", "Ablations")
            said = own.methods(of, notes) if whole else own.constants(of, options.dp.delta)
            text.append(f"{table}\n\n{said}")
    if first := next((run for run in every.to_dict("records") if run["run"] in exchanges), None):
        text.append(f"Table 6\n\n{own.sent(first, exchanges[first['run']])}")
        exchange.picture(out / "feddpms.png", exchanges[first["run"]], first["dataset"], smoke)
    one, two, three = (compared.get(table, []) for table in ("Table 1", "Table 2", "Figure 3"))
    own.over_rounds(out / "feddpms_rounds.png", [*one, *three], smoke)
    own.over_federations(out / "feddpms_federations.png", [*one, *two], smoke)
    markdown = grid.stamped("\n".join(text), options)
    write_text(out / "feddpms.md", markdown)
    display.say("\n" + markdown)


def once(of_tables: Mapping[str, Sequence[sweep.Trial]]) -> list[sweep.Trial]:
    """The cells of all tables, each once."""
    return grid.once(chain.from_iterable(of_tables.values()))
