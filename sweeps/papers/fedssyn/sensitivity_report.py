"""Report of figure 4 of Fedssyn: three panels, each with FedAvg without a pool and a central model as references."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcommons.reports import tables
from fedcommons.reports.intervals import student
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import grid
from fedcommons.tune.study import Report, Results
from papers.fedssyn.central_trials import Lines

KEY: tuple[str, ...] = ("panel", "n_clients", "generator", "rho", "number", "epochs")
"""Labels of an entry: panel, number N of clients, generator (None: no pool), rho, number = n~/n_i, generator's epochs.

rho: share of a client's n_i images that its generator sees; n~: synthetic images that a client gets.
"""


def records(results: Results, central: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return a record for each pool, over the finished seeds. Accuracies are in %."""
    last = dict(zip(results.runs["cell"], results.runs["last_accuracy"], strict=True))
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for e in results.finished:
        accuracies = groups.setdefault(tuple(e.labels.values()), {})
        accuracies[e.cell.config.seed] = 100 * float(last[e.cell.name])
    return [
        {**dict(zip(KEY, key, strict=True)), "seeds": len(accuracies), "last": fmean(accuracies.values()),
         "sd": stdev(accuracies.values()) if len(accuracies) > 1 else 0.0, "accuracies": list(accuracies.values()),
         "ahead": is_above([value - central[seed] for seed, value in accuracies.items() if seed in central])}
        for key, accuracies in groups.items()
    ]  # fmt: skip


def is_above(differences: Sequence[float]) -> bool | None:
    """Return whether Student's 95 % interval of the mean difference lies above 0; None with fewer than two values."""
    ends = student(differences)
    return None if ends is None else ends[0] > 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table with a line for each pool and for the runs without a pool."""
    words = {None: "-", True: "yes", False: "no"}
    lines = [
        [f"({r['panel']})", str(r["n_clients"]), r["generator"] or "no pool",
         f"{100 * r['rho']:g} %" if r["generator"] else "-", f"{r['number']:g}" if r["generator"] else "-",
         str(r["epochs"] or "-"), tables.mean_std(r["accuracies"], 1), words[r["ahead"]], str(r["seeds"])]
        for r in rows
    ]  # fmt: skip
    head = ["panel", "N", "generator", "rho", "n~/n_i", "epochs", "last accuracy, %", "above central", "seeds"]
    return tables.markdown(head, lines)


def figure(rows: Sequence[dict[str, Any]], central: Sequence[float], path: Path, title: str, smoke: bool) -> None:
    """Draw last accuracy: (a) over n~/n_i, a line per rho; (b) over epochs, a line per N; (c) a point per generator."""
    from fedcommons.reports import plots
    from fedcommons.reports.series import COLOURS, MARKERS

    drawing, (row,) = plots.panels(1, 3, (13, 4), sharey=True)
    for axes, panel, x, series, label, xlabel, subject in zip(
        row, "abc", ("number", "epochs", "generator"), ("rho", "n_clients", None), ("rho {:g}", "N = {:g}", "pool"),
        ("synthetic over real images of a client, n~/n_i", "epochs of the generators", "generator"),
        ("alpha 0.1", "alpha 0.01", "alpha 0.01"), strict=True,
    ):  # fmt: skip
        of_panel = [r for r in rows if r["panel"] == panel]
        pools = [r for r in of_panel if r["generator"]]
        for i, key in enumerate(sorted({r[series] for r in pools}) if series else [None]):
            points = [r for r in pools if series is None or r[series] == key]
            at, mean, sd = ([r[name] for r in points] for name in (x, "last", "sd"))
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": label.format(key)}
            if panel == "c":
                axes.errorbar(at, mean, sd, capsize=3, linestyle="none", **look)
            else:
                axes.plot(at, mean, **look)
                low, high = ([m + sign * s for m, s in zip(mean, sd, strict=True)] for sign in (-1, 1))
                axes.fill_between(at, low, high, color=look["color"], alpha=0.2, linewidth=0)
            for r in (r for r in points if r["ahead"]):
                axes.annotate("*", (r[x], r["last"]), textcoords="offset points", xytext=(0, 5), ha="center")
        for i, none in enumerate(r for r in of_panel if not r["generator"]):
            name = f"no pool, N = {none['n_clients']}"
            axes.axhline(none["last"], color=COLOURS[i % len(COLOURS)], linestyle="--", linewidth=1, label=name)
        if central:
            axes.axhline(fmean(central), color="k", linestyle=":", label="central, real images")
        axes.set(title=f"({panel}) {subject}", xlabel=xlabel)
        if panel == "c":
            axes.margins(x=0.2)
        else:
            axes.set_xscale("log")
            axes.minorticks_off()
            ticks = sorted({r[x] for r in pools})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.legend(fontsize=7)
    row[0].set_ylabel("last test accuracy, %")
    drawing.suptitle(title, fontsize=10)
    plots.save(drawing, path, 120, smoke)


def report(lines: Lines, results: Results) -> Report:
    """Return the report; lines: see ``Lines``."""
    out, done = results.out, results.finished
    summaries = [s for line in lines(results.entries, results.options) if (s := read_summary(out / line.name))]
    by_seed = {int(s["seed"]): 100 * float(s["last_accuracy"]) for s in summaries}
    rows, config = records(results, by_seed), done[0].cell.config
    notes = [
        f"{config.data.name}, fedavg; the pool is shuffled and divided among the clients. (a): alpha 0.1; (b) and (c): "
        "alpha 0.01. rho: share of a client's images that its generator saw. Fewer epochs are checkpoints of the same "
        "training. (b) and (c): rho 100 %, n~ = n_i.",
        grid.work_note([e.cell.config for e in done]),
        f"Accuracy after round {config.federation.rounds}. Learning rate {config.client.lr:g} in all runs and central "
        "models, not chosen per run.",
    ]
    if summaries:
        values = tables.mean_std(list(by_seed.values()), 1)
        notes.append(
            f"Central: one model on all {summaries[0]['images']} real training images, {summaries[0]['epochs']} "
            f"epochs (federation.rounds times client.epochs): {values} %. Above central: Student's 95 % interval "
            "of the differences, paired by seed, is above 0, for each pool separately; in the picture a star."
        )
    notes.append(f"Seeds: {results.options.seeds}; ± is the sample standard deviation.")
    plain = [{name: value for name, value in r.items() if name != "accuracies"} for r in rows]
    runs = [{**e.labels, "seed": e.cell.config.seed, "run": e.cell.name} for e in done]
    title = (
        f"{config.data.name}, FedAvg after round {config.federation.rounds}, {max(r['seeds'] for r in rows)} seeds; "
        "points: means; bands and bars: ± standard deviation"
    )
    return Report(
        table(rows) + tables.numbered(notes), plain, {"preset": results.options.preset, "pools": rows, "runs": runs},
        {"sensitivity.png": lambda path: figure(rows, list(by_seed.values()), path, title, results.smoke)},
    )  # fmt: skip
