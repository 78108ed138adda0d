"""Report of the FedCVAE sweep from its run folders: tables, CSV and a bar chart."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcommons.config import registry
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import Cell, plain
from fedcommons.reports.intervals import ends, student
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.study import Report, Results, by_method, gaps, with_rate
from papers.fedcvae.presets import METHODS, SENDS

MB = 10**6
FEDCVAE = ("fedcvae-ens", "fedcvae-kd")
CSV = ("method", "at", "rate", "disclosed", *tables.RUN)


def markdown(frame: Any, notes: Sequence[str]) -> str:
    """Return Markdown tables: accuracies and bytes; FedCVAE's accuracy minus each other method's, paired by seed."""
    by_pair, lines, ahead = by_method(frame, METHODS), [], []
    for (alpha, method), runs in by_pair.items():
        accuracies = [100 * value for value in runs["last_accuracy"]]
        sent = [f"{runs[name].mean() / MB:.3g}" for name in ("bytes_up", "bytes_down")]
        rate, disclosed = runs["rate"].iloc[0], f"{100 * runs['disclosed'].mean():.1f} %"
        lines.append([
            columns.text(alpha), method, columns.text(plain(rate)), len(runs),
            tables.percent(Cell({}, runs), "last_accuracy"), ends(accuracies), runs["rounds"].iloc[0], *sent,
            SENDS[runs["algorithm"].iloc[0]], disclosed,
        ])  # fmt: skip
    for (alpha, fedcvae), (at, other) in ((a, b) for a in by_pair for b in by_pair):
        is_pair = alpha == at and fedcvae in FEDCVAE and other not in FEDCVAE
        if is_pair and (points := gaps(by_pair[alpha, fedcvae], by_pair[at, other])):
            words = f"{fmean(points):+.1f}", ends(points, "+")
            ahead.append([columns.text(alpha), fedcvae, other, *words, len(points)])
    head = ("alpha", "method", "rate", "seeds", "last accuracy, %", "95 % interval", "rounds", "MB up", "MB down",
            "a client sends", "disclosed")  # fmt: skip
    text = tables.markdown(head, lines)
    if ahead:
        head = ("alpha", "method", "minus", "points", "95 % interval", "seeds")
        text += "\n## FedCVAE against each method\n\n" + tables.markdown(head, ahead)
    return text + tables.numbered(notes)


def notes(results: Results) -> list[str]:
    entries, options = results.entries, results.options
    config = next((e.cell.config for e in entries if e["method"] != "fedavg"), entries[0].cell.config)
    epochs = options["federation.rounds"] * options["client.epochs"]
    c = config.client
    return [
        f"{config.data.name}, {config.partition.name}, {config.partition.n_clients} clients; clients without an "
        f"image are dropped; classifier {config.model.name}. {100 * config.data.validation:g} % of the training images "
        "are held out for validation.",
        f"All methods have {epochs} local epochs. FedCVAE's clients train an autoencoder with Adam; the other clients "
        f"train the classifier with {c.optimizer}, batch size B = {c.batch_size}. fedavg has "
        f"{options['client.epochs']} local epochs per round, the other methods have all epochs in one round.",
        grid.method_note(results.configs),
        "Rate: learning rate client.lr; FedCVAE has the learning rates of its paper.",
        learning_rates.choice_note(results.entries),
        *learning_rates.notes(results.entries),
        "Accuracy after the last round on test data, which were not used for any choice. Intervals: Student's t, for "
        "the mean over seeds and for differences paired by seed.",
        "MB: 10^6 bytes of all clients in all rounds. Disclosed: share of all examples that a client disclosed to "
        "others, as data or through a decoder, without an epsilon. Classifiers and their updates are not counted here; "
        "they have no epsilon either.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
        *tables.rejected_notes(results.reported),
    ]


def figure(frame: Any, path: Path, title: str, smoke: bool) -> None:
    """Draw a bar for each alpha and method: the mean last accuracy over seeds, with Student's 95 % interval."""
    from fedcommons.reports import plots
    from fedcommons.reports.series import looks

    by_pair = by_method(frame, METHODS)
    alphas, methods = list(dict.fromkeys(at for at, _ in by_pair)), [m for m in METHODS if m in {n for _, n in by_pair}]
    width, look = 0.8 / len(methods), looks(methods)
    drawing, ((axes,),) = plots.panels(1, 1, (2 + 2 * len(alphas), 4))
    for i, method in enumerate(methods):
        present = [(j, [100 * v for v in by_pair[alpha, method]["last_accuracy"]])
                 for j, alpha in enumerate(alphas) if (alpha, method) in by_pair]  # fmt: skip
        at = [j + width * (i - (len(methods) - 1) / 2) for j, _ in present]
        means = [fmean(values) for _, values in present]
        axes.bar(at, means, width, color=look[method][0], label=method)
        intervals = [(x, mean, mean - interval[0]) for x, mean, (_, values) in zip(at, means, present, strict=True)
                 if (interval := student(values))]  # fmt: skip
        if intervals:
            axes.errorbar(*zip(*intervals, strict=True), color="k", linestyle="none", linewidth=1, capsize=2)
    axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set(xlabel="alpha", ylabel="last test accuracy, %", ylim=(0, 100))
    plots.finish(drawing, f"Last test accuracy; {title}", "method", "outside right upper")
    plots.save(drawing, path, 120, smoke)


def report(results: Results) -> Report:
    frame, options = with_rate(results.reported), results.options
    records = tables.records(frame, CSV)
    n, dataset = frame["seed"].nunique(), registry.label(options.data.name)
    title = f"{dataset}, {n} seeds, 95 % intervals of the mean" if n > 1 else f"{dataset}, one seed"
    return Report(
        markdown(frame, notes(results)), records, {"preset": options.preset, "runs": records},
        {"fedcvae.png": lambda path: figure(frame, path, title, results.smoke)},
    )  # fmt: skip
