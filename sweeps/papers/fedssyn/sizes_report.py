"""Report of the study of private pools over the number of images per client: table, CSV and picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcommons.cli import parse
from fedcommons.config.dotted import choose
from fedcommons.errors import quote
from fedcommons.reports import tables
from fedcommons.tune import grid
from fedcommons.tune.study import Report
from papers.fedssyn import private_presets


def report(records: Sequence[dict[str, Any]], options: parse.Options, out: Path) -> str:
    """Write the table, the CSV and the picture into ``out``, and return the table."""
    lines = [
        [str(r["n"]), r["pool"], "-" if r["sigma"] is None else f"{r['sigma']:.3g}",
         tables.mean_std([100 * a for a in r["accuracy"]], 1)]
        for r in records
    ]  # fmt: skip
    text = tables.markdown(["images", "pool", "noise multiplier", "accuracy, %"], lines)
    title, smoke = f"{options['data.name']}: what images of a private pool teach", grid.is_smoke(options)
    pictures = {"private_sizes.png": lambda path: picture(records, title, path, smoke)}
    report = Report(text + tables.numbered(notes(options)), by_seed(records, options), None, pictures)
    return report.write("private_sizes", options, out)


def notes(options: parse.Options) -> list[str]:
    g = choose(parse.flat(options), options.fields).flat
    of_steps = {name.partition(".")[2]: value for name, value in private_presets.NDPDC[options.preset].items()}
    many = options.clients
    together = f", or of {many} clients with this number of images each, if the data suffice" if many > 1 else ""
    of_ways = {
        "private": f"Private generators: {g['generator.epochs']} epochs, B = {g['generator.batch_size']}, learning "
        f"rate {g['generator.lr']:g}, channels {quote(list(g['generator.channels']))}, prediction "
        f"{g['generator.prediction']}, clip {g['generator.clip']:g}, draws {g['generator.draws']}, delta "
        f"{g['generator.delta']:g}.",
        "merf": f"FedMERF: images fitted to one noisy release of random features, of one client (alone){together}."
        + " Local: each client's release is private; summed: only the sum over clients is." * (many > 1),
        "ndpdc": "NDPDC: images fitted to a noisy sum of features of a random network in each step, of one client "
        f"(alone){together}; {', '.join(f'{name} {value}' for name, value in of_steps.items())}.",
    }
    return [
        "Accuracy, %: accuracy on real test images of a logistic regression on pixels, trained on the pool's images. A "
        "generator draws the number of images that it saw. The images that it saw are iid and the same for each seed.",
        *(text for way, text in of_ways.items() if way in options.ways),
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]


def by_seed(records: Sequence[dict[str, Any]], options: parse.Options) -> list[dict[str, Any]]:
    """Return a row of the CSV for each number of images, pool and seed."""
    return [
        {"n": r["n"], "pool": r["pool"], "noise_multiplier": r["sigma"], "seed": seed, "accuracy": accuracy}
        for r in records
        for seed, accuracy in zip(options.lists["seeds"], r["accuracy"], strict=True)
    ]


def picture(records: Sequence[dict[str, Any]], title: str, path: Path, smoke: bool) -> None:
    """Draw accuracy over the number of images: each pool's mean and standard deviation, and each seed as a point."""
    from fedcommons.reports import plots

    drawing, ((axes,),) = plots.panels(1, 1, (6, 4.8))
    for pool in dict.fromkeys(r["pool"] for r in records):
        points = [(r["n"], [100 * a for a in r["accuracy"]]) for r in records if r["pool"] == pool]
        spread = [stdev(a) if len(a) > 1 else 0 for _, a in points]
        bars = axes.errorbar(
            [n for n, _ in points], [fmean(a) for _, a in points], spread, marker="o", capsize=3, label=pool
        )
        for n, accuracies in points:
            axes.plot([n] * len(accuracies), accuracies, ".", color=bars[0].get_color(), alpha=0.6, markersize=4)
    sizes = list(dict.fromkeys(r["n"] for r in records))
    axes.set(xscale="log", xlabel="images of a client", ylabel="accuracy of a logistic regression, %")
    axes.minorticks_off()
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.grid(alpha=0.3)
    seeds = max(len(r["accuracy"]) for r in records)
    spread_of = f"bar: ± standard deviation over {seeds} seeds; dots: the seeds" if seeds > 1 else "one seed"
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8,
                   title=f"trained on; {spread_of}")  # fmt: skip
    drawing.suptitle(title, fontsize=10)
    plots.save(drawing, path, 110, smoke)
