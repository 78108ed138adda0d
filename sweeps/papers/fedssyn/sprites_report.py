"""Report of figures A.9 and A.10 of Fedssyn (dSprites): table, CSV, accuracies over seeds, pictures of the pools."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fedcommons.reports import tables
from fedcommons.tune import grid
from fedcommons.tune.study import Entry, Report, Results

USUAL = 0.25
"""n~/n_i, synthetic images per real image of a client, in figure A.9 (left) and figure A.10."""
CLIENTS = (3, 5, 11)
"""Numbers of the clients in figure A.10, counted from 0."""
IMAGES = 3
"""Number of images per client and generator in figure A.10."""


def records(results: Results) -> list[dict[str, Any]]:
    """Return a record for each pool: accuracies in %, and their mean over the seeds of finished runs."""
    result = []
    for (rho, epochs, number), runs in results.groups("rho", "epochs", "number").items():
        last, best = (runs[name].mul(100).tolist() for name in ("last_accuracy", "best_accuracy"))
        result.append(
            {"rho": rho, "epochs": epochs, "number": number, "seeds": len(last), "last": fmean(last),
             "sd": stdev(last) if len(last) > 1 else 0.0, "best": fmean(best), "accuracies": last}
        )  # fmt: skip
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table with a line for each pool and for the runs without a pool."""
    head = ["rho", "epochs", "n~/n_i", "last accuracy, %", "best, %", "seeds"]
    lines = [
        ["no pool" if r["rho"] is None else f"{100 * r['rho']:g} %", str(r["epochs"] or "-"),
         f"{r['number']:g}" if r["number"] else "-", tables.mean_std(r["accuracies"], 1), f"{r['best']:.1f}",
         str(r["seeds"])]
        for r in rows
    ]  # fmt: skip
    return tables.markdown(head, lines)


def figure(rows: Sequence[dict[str, Any]], path: Path, title: str, smoke: bool) -> None:
    """Draw last accuracy over rho, a line per number of epochs (left), and over n~/n_i, a line per rho (right)."""
    from fedcommons.reports import plots
    from fedcommons.reports.series import looks

    last, pools = max(r["epochs"] for r in rows), [r for r in rows if r["rho"] is not None]
    usual, many = [r for r in pools if r["number"] == USUAL], [r for r in pools if r["epochs"] == last]
    varied = {r["rho"] for r in many if r["number"] != USUAL}
    sides = [
        (usual, "rho", "epochs", f"n~/n_i = {USUAL:g}", "share of a client's images that its generator saw, % (log)"),
        ([r for r in many if r["rho"] in varied], "number", "rho", f"{last} epochs",
         "synthetic images per real image of a client, n~/n_i (log)"),
    ]  # fmt: skip
    sides = [side for side in sides if side[0]]

    def label(series: str, r: dict[str, Any]) -> str:
        return f"{r['epochs']} epochs" if series == "epochs" else f"generator saw {100 * r['rho']:g} %"

    look = looks(label(series, r) for points, _, series, *_ in sides for r in points)
    drawing, (row,) = plots.panels(1, len(sides), (4.7 * len(sides), 4.4), sharey=True)
    for axes, (points, x, series, subject, xlabel) in zip(row, sides, strict=True):
        values = sorted({r[series] for r in points})
        for i, series_value in enumerate(values):
            line = sorted((r for r in points if r[series] == series_value), key=lambda r: r[x])
            (colour, marker, _), name = look[label(series, line[0])], label(series, line[0])
            at = [r[x] * 1.05 ** (i - (len(values) - 1) / 2) for r in line]  # bars stand side by side
            axes.errorbar(at, [r["last"] for r in line], [r["sd"] for r in line], color=colour, marker=marker,
                          capsize=3, label=name)  # fmt: skip
        for none in (r for r in rows if r["rho"] is None):
            axes.axhspan(none["last"] - none["sd"], none["last"] + none["sd"], color="0.6", alpha=0.3, linewidth=0)
            axes.axhline(none["last"], color="0.5", linestyle="--", label=f"no pool: {none['last']:.1f} %")
        axes.set(xscale="log", xlabel=xlabel, title=subject)
        axes.minorticks_off()
        ticks = sorted({r[x] for r in points})
        axes.set_xticks(ticks, [f"{100 * t:g}" if x == "rho" else f"{t:g}" for t in ticks])
        axes.margins(x=0.1)
    row[0].set_ylabel("last test accuracy, %")
    several = "; bar: ± standard deviation over seeds" * any(r["sd"] for r in rows)
    plots.finish(drawing, f"{title}; point: mean{several}", loc="panels")
    plots.save(drawing, path, 120, smoke)


def pictures(entries: Sequence[Entry], path: Path, smoke: bool) -> None:
    """Draw images of three clients of the first seed: a column for each number of epochs, a row for each generator."""
    from fedcommons.reports.plots import image_grid
    from fedcommons.runs.assemble import contributions
    from fedcommons.runs.build import build
    from fedcommons.storage.artifact_store import Store

    first = [e for e in entries if e["rho"] is not None and e["number"] == USUAL]
    of_first_seed = [e for e in first if e.cell.config.seed == first[0].cell.config.seed]
    epochs = sorted({e["epochs"] for e in of_first_seed})
    images: dict[tuple[int, float, int], Sequence[np.ndarray]] = {}
    seen: dict[tuple[int, float], int] = {}
    for e in of_first_seed:
        prepared = build(e.cell.config)
        contributed = contributions(prepared, Store(Path(e.cell.config.artifacts), storage=e.cell.config.storage))
        for client in (c for c in CLIENTS if c < len(contributed)):
            images[client, e["rho"], e["epochs"]] = [x.numpy() for x in contributed[client].examples.x[:IMAGES]]
            seen[client, e["rho"]] = len(prepared.requests[client].examples)
    rows = [
        (f"client {c}, {n:,} images", [x for epoch in epochs for x in _padded(images.get((c, rho, epoch), ()))])
        for (c, rho), n in sorted(seen.items())
    ]
    title = "Synthetic images of three clients' generators\nimages: number of real images that the generator saw"
    image_grid(path, rows, [f"{epoch} epochs" for epoch in epochs], title, smoke)


def _padded(images: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    return [*images, *[None] * (IMAGES - len(images))]


def report(results: Results) -> Report:
    done, rows, options = results.finished, records(results), results.options
    config = done[0].cell.config
    data = config.data.name
    pooled = next((e.cell.config.flat for e in done if e["rho"] is not None), {})
    training = {"B": "batch_size", "learning rate": "lr", "C": "capacity", "ramp": "ramp", "filters": "filters"}
    constants = [f"{w} = {pooled[f'generator.{n}']:g}" for w, n in training.items() if f"generator.{n}" in pooled]
    note = ["The sprites are drawn by this package from the factors of dSprites; they are not dSprites."]
    notes = [
        *note * (data == "procedural_sprites"),
        "12 clients, each with one shape in one quadrant; labels are shapes. Every client trains a generator on the "
        "share rho of its images, and all generated images are shuffled and divided among the clients. Epochs: of the "
        "generators; fewer epochs are checkpoints of the same training.",
        *([f"{pooled['generator.name']}: {', '.join(constants)}."] if constants else []),
        grid.work_note([e.cell.config for e in done]),
        f"Accuracy after round {config.federation.rounds}; best: of all rounds. Learning rate {config.client.lr:g} in "
        f"all runs. Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]
    title = f"{data}, {grid.several([e.cell.config for e in done], 'algorithm')}, seeds {options.seeds}"
    usual = any(r["number"] == USUAL for r in rows)
    return Report(
        table(rows) + tables.numbered(notes), [{k: v for k, v in r.items() if k != "accuracies"} for r in rows],
        {"preset": options.preset, "cells": rows},
        {"dsprites.png": lambda path: figure(rows, path, title, results.smoke),
         "dsprites_images.png": lambda path: pictures(done, path, results.smoke)} if usual else {},
    )  # fmt: skip
