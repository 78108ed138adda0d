"""Tables and pictures of the FedDPMS sweep: methods, constants of FedDPMS, and communication of FedDPMS."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from fedcommons.federation.client_sampling import joining
from fedcommons.privacy.accountants import epsilon
from fedcommons.reports import columns, plots, series, tables
from fedcommons.reports.cells import Cell
from fedcommons.reports.cells import cells as configurations
from fedcommons.reports.frames import load_rounds
from fedcommons.reports.metrics import words
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.study import Report, Results, gaps
from papers.feddpms import costs, exchange
from papers.feddpms.exchange import Exchange

SHARE = "kept"
"""Column: codes that clients sent, divided by codes that the quotas allow; None if clients send means."""

NOTES = (
    "Accuracy in %: top-1 of the server model on the whole test set; last: after the last round, best: highest of all "
    "rounds. ± is the sample standard deviation over seeds; the difference to FedAvg is paired by seed.",
    "FedDPMS and FedVAE train the whole autoencoder. The other methods train its encoder and classifier only, without "
    "a log-variance.",
)


def methods(cells: Sequence[Cell], notes: Sequence[str]) -> str:
    """Return tables 1 and 2, figure 2 or the ablations as Markdown: a line for each cell (a method in a federation)."""
    head, identities = columns.identified(cells)
    baselines = {"last - FedAvg's": ("algorithm", "fedavg")}
    if "feddpms.receive" in cells[0].fields:
        baselines["last - with nothing received"] = "feddpms.receive", "nothing"
    lines = [
        [*line, columns.text(series.value(cell, "lr")),
         tables.percent(cell, "last_accuracy"), tables.percent(cell, "best_accuracy"),
         *(ahead(cell, cells, *baseline) for baseline in baselines.values()),
         tables.mean_std(cell.values("MB"), 2), len(cell.runs)]
        for cell, line in zip(cells, identities, strict=True)
    ]  # fmt: skip
    head += ["rate", "last acc.", "best acc.", *baselines, "MB", "seeds"]
    return tables.markdown(head, lines) + tables.numbered(notes)


def ahead(cell: Cell, cells: Sequence[Cell], field: str, than: str) -> str:
    """Return the cell's last accuracy minus the baseline's, in points, paired by seed; empty for the baseline itself.

    The baseline is the first cell in the same federation whose ``field`` has the value ``than``.
    """
    same = [o for o in cells if columns.place(o) == columns.place(cell) and series.value(o, field) == than]
    if not same or same[0] is cell:
        return ""
    points = gaps(cell.runs, same[0].runs)
    return tables.mean_std(points, 1) if points else ""


def constants(cells: Sequence[Cell], delta: float) -> str:
    """Return table 5 or figure 3 as Markdown: only FedDPMS, with a column for each constant that varies."""
    names = columns.others(cells[0])
    head = [*names, "rate", "last acc.", "best acc.", "codes sent, % of the quota", "seeds"]
    lines = []
    for cell in cells:
        shares = cell.values(SHARE)
        lines.append([
            *(columns.text(series.value(cell, name)) for name in (*names, "lr")), tables.percent(cell, "last_accuracy"),
            tables.percent(cell, "best_accuracy"), tables.mean_std([100 * k for k in shares], 0) if shares else "-",
            len(cell.runs),
        ])  # fmt: skip
    notes = []
    if "feddpms.preliminary_rounds" in names:
        notes.append("feddpms.preliminary_rounds: - means 0.4 of the rounds.")
    sound = [series.value(c, "feddpms.sigma") for c in cells if series.value(c, "feddpms.privacy") == "sound"]
    if sound:
        spent = "; ".join(f"noise multiplier {s:g}: {epsilon(1, s, 1, delta):.2f}" for s in dict.fromkeys(sound))
        notes.append(
            f"privacy sound, epsilon of a client's codes at delta {delta:g} if their noise is secret: {spent}. With "
            "seeded noise (dp.noise) there is no guarantee, as anyone who knows the seed can draw the noise again. No "
            "epsilon covers the names of a client's abundant classes, or the models that clients send. With privacy "
            "paper there is no guarantee at all."
        )
    return tables.markdown(head, lines) + (tables.numbered(notes) if notes else "")


def with_shares(runs: pd.DataFrame, exchanges: Mapping[str, Exchange]) -> pd.DataFrame:
    """Return the runs with the column ``SHARE``: the sent codes as a share of the codes that the quotas allow."""
    return runs.assign(**{SHARE: [_share(run, exchanges.get(run["run"])) for run in runs.to_dict("records")]})


def _share(run: Mapping[Any, Any], e: Exchange | None) -> float | None:
    if e is None or run["feddpms.privacy"] == "sound":  # the value "sound": clients send means, not codes
        return None
    return e.n_own / (run["partition.n_clients"] * run["feddpms.quota"] * run["feddpms.classes"])


def sent(run: Mapping[Any, Any], e: Exchange) -> str:
    """Return table 6: bytes of a run by the paper's closed forms, and as counted; run: its row of ``load_runs``."""
    clients, rounds = run["partition.n_clients"], run["federation.rounds"]
    k = joining(clients, run["federation.participation"])
    model = 2 * k * rounds * 4 * e.model
    # Clients send a decoder in the last round of stage I, and receive one at their first selection in stage II.
    downloads = costs.expected_downloads(rounds, e.preliminary, clients, k)
    codes = 2 * k * 4 * e.model * costs.of_codes(run["feddpms.quota"], run["feddpms.classes"], e.latent, e.model)
    closed = {"model": model, "decoders": 4 * (k + downloads) * e.decoder, "codes, at most": codes}
    counted = run["bytes_down"] + run["bytes_up"]
    every = {**closed, "sum": sum(closed.values()), "counted": counted}
    lines = [[name, f"{value:.0f}", f"{100 * value / model:.2f}"] for name, value in every.items()]
    ratio = 100 * costs.of_decoder(rounds, e.preliminary, clients, k)
    note = (
        f"{Path(run['run']).name}; the counted bytes include labels (8 bytes per code) and flags. The paper's r_2, for "
        f"a decoder as large as the model: {ratio:.2f} %. Additional computation: T_p / T = {e.preliminary} / {rounds}."
    )
    return tables.markdown(["closed form", "bytes", "% of the model's"], lines) + f"\n{note}\n"


def over_rounds(path: Path, cells: Sequence[Cell], smoke: bool) -> None:
    """Draw figure 3: test accuracy over rounds in the first federation, a curve for each cell (runs of all seeds)."""
    figure, (row,) = plots.panels(1, 2, (10, 4.8))
    first = {tuple(cell.runs["run"]): cell for cell in cells if columns.place(cell) == columns.place(cells[0])}.values()
    courses = {columns.method(c): series.course(load_rounds(*c.runs["run"]), "test/accuracy") for c in first}
    last, seeds = max(max(course) for course in courses.values()), max(len(cell.runs) for cell in first)
    late = [v for course in courses.values() for r, (_, *ends) in course.items() if r >= last / 3 for v in ends]
    for axes, title in zip(row, ("all rounds", "the last two thirds, enlarged"), strict=True):
        plots.curves(axes, courses, courses)
        axes.set(xlabel="round", ylabel="test accuracy" + plots.percent(axes.yaxis), title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    row[1].set(xlim=(last / 3, last), ylim=(min(late) - 0.005, max(late) + 0.005))
    spread = f"line: mean over {seeds} seeds, band: minimum to maximum" if seeds > 1 else "one seed, so no band"
    plots.finish(figure, f"Accuracy over rounds; {columns.place(cells[0])}; {spread}")
    plots.save(figure, path, 120, smoke)


def over_federations(path: Path, cells: Sequence[Cell], smoke: bool) -> None:
    """Draw figure 2 and table 2: the last accuracy over alpha, and over the number of clients."""
    panels = []
    for name in ("partition.alpha", "partition.n_clients"):
        inside = [cell for cell in cells if name in cell.fields]
        points = [series.point(cell, name, "last_accuracy", cell.runs["algorithm"].iloc[0]) for cell in inside]
        apart = [replace(p, x=columns.text(p.x)) for p in sorted((p for p in points if p), key=lambda p: p.x)]
        panels += [series.Panel("", words(name), apart)] if inside else []
    if panels:
        seeds = f"mean over {n} seeds" if (n := max(len(cell.runs) for cell in cells)) > 1 else "one seed"
        title = f"Last accuracy; {cells[0].runs['dataset'].iloc[0]}; {seeds}"
        series.draw(path, panels, "last_accuracy", "algorithm", title, smoke)


def report(results: Results) -> Report:
    reported = results.reported
    every = reported.drop_duplicates("cell")
    records = tables.records(every, [*tables.RUN, *columns.others(configurations(every)[0])])
    exchanges = {run: e for run in every["run"] if (e := exchange.read(Path(run)))}
    compared = {
        table: tables.compared(with_shares(runs.dropna(axis="columns", how="all"), exchanges))
        for table, runs in reported.groupby("table", sort=False)
    }
    configs, delta = results.configs, results.options.dp.delta
    notes = [*NOTES, grid.work_note(configs), grid.method_note(configs), learning_rates.choice_note(results.entries),
             *learning_rates.notes(results.entries)]  # fmt: skip
    text, pictures = [], {}
    for table, of_table in compared.items():
        whole = table in ("Table 1", "Table 2", "Ablations")
        body = methods(of_table, notes) if whole else constants(of_table, delta)
        text.append(f"{table}\n\n{body}")
    if first := next((run for run in every.to_dict("records") if run["run"] in exchanges), None):
        exchanged = exchanges[first["run"]]
        text.append(f"Table 6\n\n{sent(first, exchanged)}")
        pictures["feddpms.png"] = partial(exchange.picture, exchange=exchanged, dataset=first["dataset"])
    table1, table2, figure3 = (compared.get(table, []) for table in ("Table 1", "Table 2", "Figure 3"))
    if table1 or figure3:
        pictures["feddpms_rounds.png"] = partial(over_rounds, cells=[*table1, *figure3])
    pictures["feddpms_federations.png"] = partial(over_federations, cells=[*table1, *table2])
    drawings = {name: partial(draw, smoke=results.smoke) for name, draw in pictures.items()}
    return Report("\n".join(text), records, {"preset": results.options.preset, "cells": records}, drawings)
