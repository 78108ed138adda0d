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
    result = []
    for key, runs in results.groups(*KEY).items():
        last = runs["last_accuracy"].mul(100).tolist()
        differences = [value - central[seed] for seed, value in zip(runs["seed"], last, strict=True) if seed in central]
        result.append(
            {**dict(zip(KEY, key, strict=True)), "seeds": len(last), "last": fmean(last),
             "sd": stdev(last) if len(last) > 1 else 0.0, "accuracies": last, "ahead": is_above(differences)}
        )  # fmt: skip
    return result


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
    from fedcommons.reports.series import looks

    sides = {
        "a": ("number", "rho", "rho {:g}", "synthetic over real images of a client, n~/n_i (log)", "alpha 0.1"),
        "b": ("epochs", "n_clients", "N = {:g}", "epochs of the generators (log)", "alpha 0.01"),
        "c": ("generator", "n_clients", "N = {:g}", "generator", "alpha 0.01"),
    }
    pools, numbers = [r for r in rows if r["generator"]], list(dict.fromkeys(r["n_clients"] for r in rows))
    look = looks(sides[r["panel"]][2].format(r[sides[r["panel"]][1]]) for r in pools)
    drawing, (row,) = plots.panels(1, 3, (13, 4.6))
    for axes, (panel, (x, series, label, xlabel, subject)) in zip(row, sides.items(), strict=True):
        inside = [r for r in pools if r["panel"] == panel]
        keys = sorted({r[series] for r in inside})
        for i, key in enumerate(keys):
            points, (colour, marker, _) = [r for r in inside if r[series] == key], look[label.format(key)]
            at, mean, sd = ([r[name] for r in points] for name in (x, "last", "sd"))
            if panel != "c":  # bars stand side by side
                at = [value * 1.04 ** (i - (len(keys) - 1) / 2) for value in at]
            axes.errorbar(at, mean, sd, color=colour, marker=marker, ls="none" if panel == "c" else "-",
                          label=label.format(key))  # fmt: skip
            for place, r in zip(at, points, strict=True):
                if r["ahead"]:
                    axes.annotate("*", (place, r["last"]), (0, 5), textcoords="offset points", ha="center")
        for n, last in ((r["n_clients"], r["last"]) for r in rows if r["panel"] == panel and not r["generator"]):
            dash = ("--", "-.", (0, (1, 1)))[numbers.index(n) % 3]
            axes.axhline(last, color="0.5", linestyle=dash, linewidth=1.3, label=f"no pool, N = {n}")
        if central:
            axes.axhline(fmean(central), color="k", linestyle=":", label="central model, real images")
        axes.set_title(f"({panel}) {subject}", fontsize=10)
        axes.set(xlabel=xlabel, ylabel="last test accuracy, %")
        if panel == "c":
            axes.margins(x=0.2)
        else:
            axes.set_xscale("log")
            axes.minorticks_off()
            ticks = sorted({r[x] for r in inside})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    star = "; star: significantly above the central model" * any(r["ahead"] for r in pools)
    plots.finish(drawing, f"{title}\nThe panels' scales differ{star}", loc="panels")
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
        "points: means; bars: ± standard deviation"
    )
    return Report(
        table(rows) + tables.numbered(notes), plain, {"preset": results.options.preset, "pools": rows, "runs": runs},
        {"sensitivity.png": lambda path: figure(rows, list(by_seed.values()), path, title, results.smoke)},
    )  # fmt: skip
