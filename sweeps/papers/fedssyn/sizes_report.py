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
    title, smoke = f"{options['data.name']}: test accuracy after training on a private pool", grid.is_smoke(options)
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
    """Draw accuracy over the number of images: each pool's mean and standard deviation, side by side at each number."""
    from fedcommons.reports import plots
    from fedcommons.reports.series import looks

    look = looks(r["pool"] for r in records)
    sizes = list(dict.fromkeys(r["n"] for r in records))
    drawing, ((axes,),) = plots.panels(1, 1, (2 + 1.7 * len(sizes), 5))
    for i, (pool, (colour, marker, dash)) in enumerate(look.items()):
        points = [(r["n"], [100 * a for a in r["accuracy"]]) for r in records if r["pool"] == pool]
        spread = [stdev(a) if len(a) > 1 else 0 for _, a in points]
        at = [sizes.index(n) + 0.04 * (i - (len(look) - 1) / 2) for n, _ in points]
        words = f"a private generator, {pool}" if pool.startswith("epsilon") else pool
        axes.errorbar(at, [fmean(a) for _, a in points], spread, color=colour, marker=marker, ls=dash, lw=1, ms=5,
                      capsize=3, label="a generator without privacy" if pool == "plain" else words)  # fmt: skip
    axes.set(xlabel="training images of a client (not to scale)", ylabel="accuracy of a logistic regression, %")
    axes.set_xticks(range(len(sizes)), [f"{n:,}" for n in sizes])
    seeds = max(len(r["accuracy"]) for r in records)
    spread_of = f"mean over {seeds} seeds; bar: ± standard deviation" if seeds > 1 else "one seed"
    plots.finish(drawing, f"{title}; {spread_of}", "Trained on real images, or on images of")
    plots.save(drawing, path, 110, smoke)
