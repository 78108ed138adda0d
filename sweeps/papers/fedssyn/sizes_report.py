"""Report of the study of private pools over the number of images per client: table, CSV and picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.config.dotted import choose
from fedcommons.errors import quote
from fedcommons.reports import tables
from fedcommons.reports.cells import plain
from fedcommons.tune import grid
from fedcommons.tune.study import Report
from papers.fedssyn import private_presets


def report(rows: Sequence[dict[str, Any]], options: parse.Options, out: Path) -> str:
    """Write the table, the CSV and the picture of the rows of ``sizes.study`` into ``out``, and return the table."""
    import pandas as pd

    frame: Any = pd.DataFrame(rows)
    lines = []
    for (n, pool), group in frame.groupby(["n", "pool"], sort=False):
        sigma = plain(group["noise_multiplier"].iloc[0])
        accuracies = tables.mean_std(group["accuracy"].mul(100).tolist(), 1)
        lines.append([n, pool, "-" if sigma is None else f"{sigma:.3g}", accuracies])
    text = tables.markdown(["images", "pool", "noise multiplier", "accuracy, %"], lines)
    title, smoke = f"{options['data.name']}: test accuracy after training on a private pool", grid.is_smoke(options)
    pictures = {"private_sizes.png": lambda path: picture(frame, title, path, smoke)}
    return Report(text + tables.numbered(notes(options)), rows, None, pictures).write("private_sizes", options, out)


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


def picture(frame: Any, title: str, path: Path, smoke: bool) -> None:
    """Draw accuracy over the number of images: each pool's mean and standard deviation, side by side at each number."""
    from fedcommons.reports import plots
    from fedcommons.reports.series import looks

    look, sizes = looks(frame["pool"]), list(frame["n"].unique())
    drawing, ((axes,),) = plots.panels(1, 1, (2 + 1.7 * len(sizes), 5))
    for i, (pool, (colour, marker, dash)) in enumerate(look.items()):
        accuracy = frame[frame["pool"] == pool].groupby("n", sort=False)["accuracy"]
        at = [sizes.index(n) + 0.04 * (i - (len(look) - 1) / 2) for n, _ in accuracy]
        words = f"a private generator, {pool}" if pool.startswith("epsilon") else pool
        words = "a generator without privacy" if pool == "plain" else words
        axes.errorbar(at, 100 * accuracy.mean(), 100 * accuracy.std().fillna(0), color=colour, marker=marker, ls=dash,
                      lw=1, ms=5, capsize=3, label=words)  # fmt: skip
    axes.set(xlabel="training images of a client (not to scale)", ylabel="accuracy of a logistic regression, %")
    axes.set_xticks(range(len(sizes)), [f"{n:,}" for n in sizes])
    seeds = frame["seed"].nunique()
    spread_of = f"mean over {seeds} seeds; bar: ± standard deviation" if seeds > 1 else "one seed"
    plots.finish(drawing, f"{title}; {spread_of}", "Trained on real images, or on images of")
    plots.save(drawing, path, 110, smoke)
