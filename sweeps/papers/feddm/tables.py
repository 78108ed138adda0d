"""Tables and pictures of the FedDM sweep: methods at their learning rates, FedDM minus each method, and studies.

A frame here has a row for each pair of a run and a table that contains the run. Its columns are the labels ``table``,
``method`` and ``at`` (alpha), ``rate`` (learning rate: of the synthetic pixels for FedDM, none for REAL, of the clients
for other methods), ``level`` (noise level), and the columns of ``load_runs``.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from fedcommons.config import target
from fedcommons.core import communication
from fedcommons.federation import checkpoint
from fedcommons.flat_tensors import data
from fedcommons.reports import columns, plots, series, tables
from fedcommons.reports.cells import Cell, until_target
from fedcommons.reports.intervals import ends
from fedcommons.tune import learning_rates, study
from fedcommons.tune.study import Report, Results
from papers import curves
from papers.feddm import surrogate

MB = 10**6
METHODS, ROUND, NOISE, IPC = "methods", "round", "noise level", "images per class"
"""Tables: table 2 (``METHODS``), runs of one round for a picture (``ROUND``), figure 3 (``NOISE``), 11 (``IPC``)."""


def markdown(frame: Any, notes: Sequence[str]) -> str:
    """Return all tables of a frame; ``>`` marks means with seeds that missed the target."""
    visible = frame[frame["table"] != ROUND]  # the runs of the table ROUND are only for a picture
    parts = []
    for table, runs in visible.groupby("table", sort=False):
        parts.append(f"## {'Methods' if table == METHODS else f'By {table}'}\n\n{_rows(runs)}")
        if table == METHODS:
            parts += [f"## FedDM against each method\n\n{section}" for section in [_ahead(runs)] if section]
    return "\n".join(parts) + tables.numbered(notes)


def _rows(frame: Any) -> str:
    head = ("alpha", "method", "rate", "seeds", "last accuracy, %", "best, %", "rounds to target", "MB up per round",
            "MB down per round", "MB to target")  # fmt: skip
    lines = []
    for (alpha, method), runs in frame.groupby(["at", "method"], sort=False):
        cell, (total, missed) = Cell({}, runs), communication.sent(until_target(runs), MB, MB)
        each = [f"{(runs[name] / runs['rounds']).mean() / MB:.3f}" for name in ("bytes_up", "bytes_down")]
        accuracies = [tables.percent(cell, name) for name in ("last_accuracy", "best_accuracy")]
        rate = columns.text(series.value(cell, "rate"))  # "-" for REAL, FedDM on real images without matching
        identity = [columns.text(alpha), method, rate, len(runs), *accuracies, tables.rounds(runs)]
        lines.append([*identity, *each, f"{'>' * missed}{total:.2f}"])
    return tables.markdown(head, lines)


def _ahead(frame: Any) -> str:
    """Return a table of FedDM's last accuracy minus the last accuracy of each other method, paired by seed."""
    lines = []
    for alpha, runs in frame.groupby("at", sort=False):
        feddm = runs[runs["method"] == "feddm"]
        for method, others in runs[runs["method"] != "feddm"].groupby("method", sort=False):
            if points := study.gaps(feddm, others):
                each = ", ".join(f"{gap:+.1f}" for gap in points)
                lines.append([columns.text(alpha), method, each, f"{fmean(points):+.1f}", ends(points, "+")])
    head = ("alpha", "FedDM minus", "points, seed by seed", "mean", "95 % interval")
    return tables.markdown(head, lines) if lines else ""


def courses(frame: Any, path: Path, smoke: bool, table: str = METHODS) -> None:
    """Draw figure 2 or 11: test accuracy over rounds, and over MB sent by all clients; a column for each alpha."""
    main = frame[frame["table"] == table]
    if main.empty:
        return
    methods, width = list(main["method"].unique()), 2.6 * max(2, main["at"].nunique()) + 1
    axes_of = {"round": "round", curves.SENT: "MB sent so far, all clients, both ways"}
    figure, grid = curves.accuracy_curves(main, methods, axes_of, (width, 6.4))
    for axes in grid.flat:
        axes.xaxis.label.set_size(9)
    seeds = frame["seed"].nunique()
    spread = f"line: mean over {seeds} seeds, band: minimum to maximum" if seeds > 1 else "one seed, so no band"
    title = f"Accuracy over rounds and over MB, {frame['dataset'].iloc[0]}"
    plots.finish(figure, f"{title}\n{spread}", "REAL: the server trains on real images" * ("REAL" in methods))
    plots.save(figure, path, 110, smoke)


def noise(frame: Any, path: Path, smoke: bool) -> None:
    """Draw figure 3: last test accuracy over the noise level, a line per algorithm; points are means over seeds."""
    of_level = frame[frame["table"] == NOISE].groupby(["algorithm", "level"], sort=False)
    points = [series.point(Cell({}, runs), "level", "last_accuracy", name) for (name, _), runs in of_level]
    panel = series.Panel("feddm: as printed, not certified; others: DP-SGD", "noise level", [p for p in points if p])
    if panel.points:
        series.draw(path, [panel], "last_accuracy", "algorithm", series.title(frame), smoke)


def pictures(frame: Any, path: Path, smoke: bool) -> None:
    """Draw figures 14 to 17: for each class, the first of the synthetic images that clients sent."""
    runs = frame[frame["table"].isin((ROUND, NOISE)) & (frame["algorithm"] == "feddm")]
    sets = {}
    for run, method in runs.drop_duplicates("method")[["run", "method"]].to_numpy():  # only the first seed's run
        checkpointed = checkpoint.load_latest(Path(run) / "checkpoints")
        if checkpointed and "images" in checkpointed.state:
            sets[method] = data(checkpointed.state["images"]), data(checkpointed.state["labels"])
    if not sets:
        return
    labels = sorted({label for _, y in sets.values() for label in y.tolist()})[:20]
    figure, grid = plots.panels(len(sets), len(labels), (0.8 * len(labels) + 1.6, len(sets) + 0.9))
    for row, (method, (x, y)) in zip(grid, sets.items(), strict=True):
        for axes, label in zip(row, labels, strict=True):
            axes.set(xticks=[], yticks=[])
            if (y == label).any():
                image = x[y == label][0].movedim(0, -1).numpy()
                low, high = image.min(), image.max()
                axes.imshow(((image - low) / (high - low)).squeeze(), cmap="gray")
        label_text = method.removeprefix("feddm, ")
        last = "\nnoise level 0" if label_text.startswith("round") else "\nlast round"
        row[0].set_ylabel(label_text + last, fontsize=8, rotation=0, ha="right", va="center")
    for axes, label in zip(grid[0], labels, strict=True):
        axes.set_title(f"class {label}", fontsize=8)
    dataset, alpha, seed = runs[["dataset", "at", "seed"]].iloc[0]
    facts = f"{dataset}, alpha {alpha:g}, seed {seed}; black to white: each image's minimum to maximum"
    figure.suptitle(f"Images that clients sent, the first of each class\n{facts}", fontsize=10)
    plots.save(figure, path, 110, smoke)


def figure1(path: Path, smoke: bool) -> None:
    """Draw figure 1 for three seeds: the loss of one weight, its surrogate from 20 matched points, and its tangent."""
    w = np.linspace(-2, 10, 200)
    figure, (row,) = plots.panels(1, 3, (9, 3.5), sharey=True)
    for seed, axes in enumerate(row):
        real = surrogate.draw(seed)
        matched = surrogate.match(real, surrogate.first(real, seed), seed)
        for points, name, colour, dash in (
            (real, "of 100 real points", "#0072b2", "-"),
            (matched, "of 20 matched points (the surrogate)", "#cc79a7", "--")):  # fmt: skip
            axes.plot(w, surrogate.loss(w, points), dash, color=colour, label=name)
        axes.plot(w, surrogate.tangent(w, real), ":", color="0.4", label="tangent at 0")
        axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xlabel="weight w", title=f"seed {seed}", ylim=(0, 2))
    row[0].set_ylabel("loss")
    plots.finish(figure, "A loss and its surrogate, matched at w = 0; each panel has another draw of points")
    plots.save(figure, path, 110, smoke)


def notes(results: Results) -> list[str]:
    goal = target.plain(results.options.target)
    reach = f"{target.in_words(goal)}{'' if isinstance(goal, str) else ' test accuracy'}"
    server = results.options.get("feddm.server_lr")
    return [
        f"Rounds: the first round whose server model has {reach}.",
        "MB: 10^6 bytes over all clients. In rounds and MB to target, a seed that missed the target counts with all "
        "its rounds, and the mean is marked with >.",
        f"Seeds: {results.options.seeds}; ± is the sample standard deviation; intervals: Student's t, for the mean "
        "over seeds.",
        "Rate: learning rate, for feddm of the pixels (feddm.image_lr), for other methods client.lr; REAL has none.",
        learning_rates.choice_note(results.entries),
        *learning_rates.notes(results.entries),
        *([] if server is None else [f"FedDM and REAL train the server model with feddm.server_lr {server:g}, which "
                                     "was not chosen per row."]),
        *tables.rejected_notes(results.reported.drop_duplicates("run")),
    ]  # fmt: skip


def report(results: Results) -> Report:
    """Return the report; ``level`` is the noise level: FedDM's sigma, or the noise multiplier of DP-SGD."""
    runs, smoke = results.reported, results.smoke
    empty = np.full(len(runs), np.nan)
    sigma, private = (pd.Series(runs.get(name, empty), dtype=float) for name in ("feddm.sigma", "sigma"))
    frame = study.with_rate(runs.assign(level=private.fillna(sigma).fillna(0.0)))
    stands = [
        {"table": e["table"], "method": e["method"], "alpha": e["at"], "run_dir": e.cell.name}
        for e in results.entries if not e.is_tuning
    ]  # fmt: skip
    return Report(
        markdown(frame, notes(results)),
        tables.records(frame, ("table", "method", "at", "level", "rate", *tables.RUN)),
        {"preset": results.options.preset, "entries": stands},
        {
            "feddm.png": lambda path: courses(frame, path, smoke),
            "feddm_ipc.png": lambda path: courses(frame, path, smoke, IPC),
            "feddm_noise.png": lambda path: noise(frame, path, smoke),
            "feddm_images.png": lambda path: pictures(frame, path, smoke),
            "feddm_figure1.png": lambda path: figure1(path, smoke),
        },
    )
