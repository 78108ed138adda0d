"""What the images of private generators of ever more images teach: table, CSV and picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcommons.config import cli, presets
from fedcommons.config.flat import choose
from fedcommons.errors import shown
from fedcommons.files import write_text


def report(records: Sequence[dict[str, Any]], options: cli.Options, out: Path) -> str:
    """Table, CSV and picture; the table is returned."""
    from fedcommons.reports import plots, tables

    lines = [
        [str(r["n"]), r["pool"], "-" if r["sigma"] is None else f"{r['sigma']:.3g}",
         tables.mean_std([100 * a for a in r["accuracy"]], 1)]
        for r in records
    ]  # fmt: skip
    g = choose(cli.flat(options), options.fields).flat
    notes = [
        "Accuracy: of a logistic regression on pixels, trained on as many images of the pool as the generator saw, on "
        "real test images, %. The images that generators see are drawn iid, and are the same for each seed.",
        f"Private generators: {g['generator.epochs']} epochs, B = {g['generator.batch_size']}, learning rate "
        f"{g['generator.lr']:g}, channels {shown(list(g['generator.channels']))}, prediction "
        f"{g['generator.prediction']}, clip {g['generator.clip']:g}, draws {g['generator.draws']}, delta "
        f"{g['generator.delta']:g}.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]
    text = tables.markdown(["images", "pool", "noise multiplier", "accuracy, %"], lines) + tables.numbered(notes)
    smoke = options.preset == "smoke"
    text = f"**{presets.SMOKE}**\n\n{text}" if smoke else text
    write_text(out / "private_sizes.md", text)
    rows = [{**r, "accuracy": fmean(r["accuracy"]), "seeds": len(r["accuracy"])} for r in records]
    write_text(out / "private_sizes.csv", tables.to_csv(rows))
    drawing, ((axes,),) = plots.panels(1, 1, (5, 3.6))
    for pool in dict.fromkeys(r["pool"] for r in records):
        of = [r for r in rows if r["pool"] == pool]
        axes.plot([r["n"] for r in of], [100 * r["accuracy"] for r in of], marker="o", label=pool)
    axes.set(xscale="log", xlabel="images that the generator saw", ylabel="accuracy that its images teach, %")
    sizes = list(dict.fromkeys(r["n"] for r in rows))
    axes.minorticks_off()
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.legend(fontsize=8, title="trained on")
    drawing.suptitle(f"{g['data.name']}, seeds {options.seeds}", fontsize=10)
    plots.save(drawing, out / "private_sizes.png", 110, smoke)
    return text
