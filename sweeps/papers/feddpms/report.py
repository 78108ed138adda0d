"""Report of the FedDPMS sweep from its run folders: tables, CSV, summary and pictures."""

from functools import partial
from pathlib import Path

from fedcommons.reports import columns, tables
from fedcommons.reports.cells import cells
from fedcommons.tune import grid
from fedcommons.tune.study import Report, Results
from papers.feddpms import exchange
from papers.feddpms import tables as feddpms


def report(results: Results) -> Report:
    every = results.runs.drop_duplicates("cell")
    records = tables.records(every, [*tables.RUN, *columns.others(cells(every)[0])])
    exchanges = {run: e for run in every["run"] if (e := exchange.read(Path(run)))}
    compared = {
        table: tables.compared(feddpms.with_kept(runs.dropna(axis="columns", how="all"), exchanges))
        for table, runs in results.runs.groupby("table", sort=False)
    }
    configs, delta = [cell.config for cell in grid.once(e.cell for e in results.entries)], results.options.dp.delta
    notes = [*feddpms.NOTES, grid.work_note(configs), grid.method_note(configs)]
    text, pictures = [], {}
    for table, of_table in compared.items():
        whole = table in ("Table 1", "Table 2", "Ablations")
        body = feddpms.methods(of_table, notes) if whole else feddpms.constants(of_table, delta)
        text.append(f"{table}\n\n{body}")
    if first := next((run for run in every.to_dict("records") if run["run"] in exchanges), None):
        sent = exchanges[first["run"]]
        text.append(f"Table 6\n\n{feddpms.sent(first, sent)}")
        pictures["feddpms.png"] = partial(exchange.picture, exchange=sent, dataset=first["dataset"])
    table1, table2, figure3 = (compared.get(table, []) for table in ("Table 1", "Table 2", "Figure 3"))
    pictures["feddpms_rounds.png"] = partial(feddpms.over_rounds, cells=[*table1, *figure3])
    pictures["feddpms_federations.png"] = partial(feddpms.over_federations, cells=[*table1, *table2])
    drawn = {name: partial(draw, smoke=results.smoke) for name, draw in pictures.items()}
    return Report("\n".join(text), records, {"preset": results.options.preset, "cells": records}, drawn)
