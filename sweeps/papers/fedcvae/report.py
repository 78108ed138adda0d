"""Files that the FedCVAE sweep writes from its run folders: tables, CSV and a picture with bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import Cell
from fedcommons.reports.intervals import ends, student
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid, sweep
from papers.fedcvae.presets import METHODS, SENDS

MB = 10**6
OWN = ("fedcvae-ens", "fedcvae-kd")
CSV = ("method", "at", "rate", "chosen", "disclosed", *tables.RUN)


@dataclass(frozen=True)
class Entry:
    """A run of a row: a method at an alpha, a learning rate of its clients (None: FedCVAE's default) and a seed."""

    method: str
    alpha: float
    rate: float | None
    cell: sweep.Trial


def rows(entries: Sequence[Entry], out: Path, say: Callable[[str], None]) -> Any:
    """Return a frame with a row for each finished run: method, at (alpha), rate, the columns of a run, and chosen.

    chosen: the run has the rate of the best validation accuracy; see ``tables.at_best_rate``.
    """
    runs: Any = grid.finished([e.cell for e in entries], out, say)  # pandas' types are too wide for a checker
    if runs.empty:
        return runs
    stands = {e.cell.name: e for e in entries}
    of_runs = [stands[Path(run).name] for run in runs["run"]]
    rates = [nan if e.rate is None else e.rate for e in of_runs]
    runs = runs.assign(method=[e.method for e in of_runs], at=[e.alpha for e in of_runs], rate=rates)
    chosen_indices = [tables.at_best_rate(group, "rate").index for _, group in runs.groupby(["at", "method"])]
    return runs.assign(chosen=runs.index.isin([i for index in chosen_indices for i in index]))


def groups(frame: Any) -> dict[tuple[float, str], Any]:
    """Return the chosen runs by alpha and method, in the order of their seeds."""
    chosen = frame[frame["chosen"]].sort_values("seed")
    pairs = [(alpha, method) for alpha in dict.fromkeys(frame["at"]) for method in METHODS]
    by_pair = {(alpha, m): chosen[(chosen["at"] == alpha) & (chosen["method"] == m)] for alpha, m in pairs}
    return {pair: runs for pair, runs in by_pair.items() if not runs.empty}


def markdown(frame: Any, notes: Sequence[str]) -> str:
    """Return the table of accuracies and bytes, then FedCVAE against each other method, paired by seed."""
    by_pair, lines, ahead = groups(frame), [], []
    for (alpha, method), runs in by_pair.items():
        accuracies = [100 * value for value in runs["last_accuracy"]]
        sent = [f"{runs[name].mean() / MB:.3g}" for name in ("bytes_up", "bytes_down")]
        rate, disclosed = runs["rate"].iloc[0], f"{100 * runs['disclosed'].mean():.1f} %"
        lines.append([
            columns.text(alpha), method, "-" if rate != rate else columns.text(rate), len(runs),
            tables.percent(Cell({}, runs), "last_accuracy"), ends(accuracies), runs["rounds"].iloc[0], *sent,
            SENDS[runs["algorithm"].iloc[0]], disclosed,
        ])  # fmt: skip
    for (alpha, fedcvae), (at, other) in ((a, b) for a in by_pair for b in by_pair):
        if alpha == at and fedcvae in OWN and other not in OWN:
            both = by_pair[alpha, fedcvae].merge(by_pair[at, other], on="seed")
            gaps = [100 * gap for gap in both["last_accuracy_x"] - both["last_accuracy_y"]]
            if gaps:
                ahead.append([columns.text(alpha), fedcvae, other, f"{fmean(gaps):+.1f}", ends(gaps, "+"), len(gaps)])
    head = ("alpha", "method", "rate", "seeds", "last accuracy, %", "95 % interval", "rounds", "MB up", "MB down",
            "a client sends", "given away")  # fmt: skip
    text = tables.markdown(head, lines)
    if ahead:
        head = ("alpha", "method", "minus", "points", "95 % interval", "seeds")
        text += "\n## FedCVAE against each method\n\n" + tables.markdown(head, ahead)
    return text + tables.numbered(notes)


def notes(entries: Sequence[Entry], frame: Any, options: parse.Options) -> list[str]:
    """Return the footnotes that explain the numbers."""
    config = next((e.cell.config for e in entries if e.method != "fedavg"), entries[0].cell.config)
    epochs = options["federation.rounds"] * options["client.epochs"]
    c = config.client
    return [
        f"{config.data.name}, {config.partition.name}, {config.partition.n_clients} clients, of which those without an "
        f"image are dropped; classifier {config.model.name}. Validation holds out "
        f"{100 * config.data.validation:g} % of the images that clients would have.",
        f"Same local epochs for all: {epochs}. Clients of FedCVAE make them on an autoencoder, Adam; all others on the "
        f"classifier, {c.optimizer}, B = {c.batch_size}: fedavg in rounds of {options['client.epochs']}, the others "
        "at once.",
        grid.method_note([e.cell.config for e in entries]),
        "Rate: client.lr, of those tried the one of the best validation accuracy after the last round, the mean over "
        f"seeds, ties to the smaller: {options.rates}. FedCVAE has the rates of its paper.",
        "Accuracy after the last round, on test data, which had no part in any choice. Intervals: Student's, for the "
        "mean over seeds, and of differences seed by seed.",
        "MB: 10^6 bytes of all clients in all rounds. Given away: share of all examples from which something was made "
        "for others that no epsilon covers; a classifier and its changes do not count as such, and have no epsilon "
        "either.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
        *tables.rejected_notes(frame),
    ]


def figure(frame: Any, path: Path, title: str, smoke: bool) -> None:
    """Draw bars of the methods for each alpha, with Student's interval of the mean."""
    from fedcommons.reports import plots
    from fedcommons.reports.series import COLOURS

    by_pair = groups(frame)
    alphas, methods = list(dict.fromkeys(at for at, _ in by_pair)), [m for m in METHODS if m in {n for _, n in by_pair}]
    width = 0.8 / len(methods)
    drawing, ((axes,),) = plots.panels(1, 1, (2 + 2 * len(alphas), 4))
    for i, method in enumerate(methods):
        present = [(j, [100 * v for v in by_pair[alpha, method]["last_accuracy"]])
                 for j, alpha in enumerate(alphas) if (alpha, method) in by_pair]  # fmt: skip
        at = [j + width * (i - (len(methods) - 1) / 2) for j, _ in present]
        means = [fmean(values) for _, values in present]
        axes.bar(at, means, width, color=COLOURS[i], label=method)
        intervals = [(x, mean, mean - interval[0]) for x, mean, (_, values) in zip(at, means, present, strict=True)
                 if (interval := student(values))]  # fmt: skip
        if intervals:
            axes.errorbar(*zip(*intervals, strict=True), color="k", linestyle="none", linewidth=1, capsize=2)
    axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set(xlabel="alpha", ylabel="last test accuracy, %", ylim=(0, 100))
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.legend(loc="outside right upper", fontsize=8)
    plots.save(drawing, path, 120, smoke)


def report(entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
    """Write tables, CSV and picture from the run folders, and display the tables."""
    frame = rows(entries, out, display.say)
    if frame.empty:
        return
    if len(frame) < len(entries):
        display.say(f"{len(entries) - len(frame)} of {len(entries)} runs are not finished: they are left out.")
    text = grid.stamped(markdown(frame, notes(entries, frame, options)), options)
    records = tables.records(frame, CSV)
    write_text(out / "fedcvae.md", text)
    write_text(out / "fedcvae.csv", tables.to_csv(records))
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "runs": records})
    n, dataset = frame["seed"].nunique(), registry.label(options.data.name)
    title = f"{dataset}, {n} seeds, 95 % intervals of the mean" if n > 1 else f"{dataset}, one seed"
    figure(frame, out / "fedcvae.png", title, grid.is_smoke(options))
    display.say("\n" + text)
