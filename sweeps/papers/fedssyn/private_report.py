"""Figures 6 and A.6, with private generators: the files of the sweep, from its run folders and the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import cli
from fedcommons.core.salts import IF_SECRET, SECRET
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.reports.cells import Cell
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from fedcommons.sharing.synthetic_pool import Contribution


@dataclass(frozen=True)
class Entry:
    """A run: its pool in words, and whether it is one of the last epoch, as all are that stand in the table."""

    pool: str
    last: bool
    cell: sweep.Trial


@lru_cache(maxsize=256)
def images(cell: sweep.Trial) -> "Sequence[Contribution]":
    """The images that the clients of this cell contribute, and their receipts."""
    from fedcommons.artifacts import Store
    from fedcommons.runs.build import contributions, prepare

    return contributions(prepare(cell.config), Store(Path(cell.config.artifacts), storage=cell.config.storage))


def spent(cell: sweep.Trial) -> float | None:
    """The largest epsilon of the clients' pools by Renyi accounting; None where nothing protects one."""
    from fedcommons.core.accountants import epsilon

    receipts = [made.receipt for made in images(cell)]
    if not all(r is not None and r.release(0).covered for r in receipts):
        return None
    delta = cell.config.dp.delta
    return max(epsilon(r.q, r.sigma, r.steps, delta) for r in receipts if r is not None)


def table(found: Sequence[Entry], out: Path) -> tuple[str, list[dict[str, Any]]]:
    """A line for each federation, method and pool, over seeds; and its numbers."""
    head = ["alpha", "algorithm", "pool", "epochs", "epsilon of images", "with labels", "noise multiplier",
            "rounds to target", "last accuracy", "best"]  # fmt: skip
    lines, records = [], []
    runs = grids.finished([e.cell for e in found], out)
    names = {} if runs.empty else {Path(run).name: row for run, row in zip(runs["run"], range(len(runs)), strict=True)}
    groups: dict[tuple, list[Entry]] = {}
    for e in found:
        c, fields = e.cell.config, e.cell.config.flat
        if e.cell.name in names:
            groups.setdefault((c.partition.alpha, c.algorithm, e.pool, fields.get("generator.epochs")), []).append(e)
    for (alpha, algorithm, pool, epochs), of in groups.items():
        cell = Cell({}, runs.iloc[[names[e.cell.name] for e in of]])
        secret = of[0].cell.config.dp.noise == SECRET
        epsilons = [spent(e.cell) for e in of] if epochs else [None]
        known = [e for e in epsilons if e is not None]
        sigmas = [r.sigma for e in of for made in images(e.cell) if (r := made.receipt)] if known else []
        said = "-" if pool == "none" else f"{max(known):.2f}" if len(known) == len(of) else "no guarantee"
        said += " if secret" if known and not secret else ""
        lines.append(
            [
                f"{alpha:g}", algorithm, pool, str(epochs or "-"), said, tables.commons_epsilon(cell), _range(sigmas),
                tables.rounds(cell.runs), tables.percent(cell, "last_accuracy"), tables.percent(cell, "best_accuracy"),
            ]
        )  # fmt: skip
        records.append(
            {"alpha": alpha, "algorithm": algorithm, "pool": pool, "epochs": epochs, "seeds": len(of),
             "epsilon" + IF_SECRET * (not secret): max(known, default=None), "sigma": fmean(sigmas) if sigmas else None,
             "last_accuracy": fmean(cell.values("last_accuracy"))}
        )  # fmt: skip
    return tables.markdown(head, lines), records


def _range(values: Sequence[float]) -> str:
    low, high = (f"{v:.3g}" for v in (min(values), max(values))) if values else ("-", "-")
    return low if low == high else f"{low} to {high}"


def figure(found: Sequence[Entry], out: Path, path: Path, title: str, smoke: bool) -> None:
    """Epsilon over epochs of each private pool, and the accuracy over rounds of each method with each pool."""
    from fedcommons.core.accountants import epsilon
    from fedcommons.reports import plots
    from fedcommons.reports.frames import load_rounds
    from fedcommons.reports.series import COLOURS

    pools = list(dict.fromkeys(e.pool for e in found))
    colours = dict(zip(pools, [COLOURS[i % len(COLOURS)] for i in range(len(pools))], strict=True))
    last = [e for e in found if e.last]
    panels = list(dict.fromkeys((e.cell.config.partition.alpha, e.cell.config.algorithm) for e in last))
    rounds: Any = load_rounds(out)
    rounds["cell"] = [Path(run).name for run in rounds["run"]]
    drawing, (row,) = plots.panels(1, 1 + len(panels), (3.8 * (1 + len(panels)), 3.4))
    for pool in pools:
        of = next(e for e in last if e.pool == pool)
        if "generator.clip" in of.cell.config.flat:
            epochs, delta = of.cell.config.flat["generator.epochs"], of.cell.config.dp.delta
            shown = sorted({max(1, round(epochs * k / 20)) for k in range(1, 21)})
            receipts = [r for made in images(of.cell) if (r := made.receipt)]
            largest = [max(epsilon(r.q, r.sigma, r.steps * e // epochs, delta) for r in receipts) for e in shown]
            row[0].plot(shown, largest, color=colours[pool], label=pool)
    said = "epsilon" if found[0].cell.config.dp.noise == SECRET else "epsilon, were the noise secret"
    row[0].set(xlabel="epochs of the generator", ylabel=said, yscale="log", title="privacy spent by generators")
    for axes, (alpha, algorithm) in zip(row[1:], panels, strict=True):
        for pool in pools:
            mine = [e.cell.name for e in last if (e.cell.config.partition.alpha, e.cell.config.algorithm, e.pool) ==
                    (alpha, algorithm, pool)]  # fmt: skip
            course = 100 * rounds[rounds["cell"].isin(mine)].groupby("round")["test/accuracy"].agg(["mean", "std"])
            axes.plot(course.index, course["mean"], color=colours[pool], label=pool)
            low, high = course["mean"] - course["std"].fillna(0), course["mean"] + course["std"].fillna(0)
            axes.fill_between(course.index, low, high, color=colours[pool], alpha=0.2, linewidth=0)
        axes.set(xlabel="rounds", ylabel="test accuracy, %", title=f"{algorithm}, alpha {alpha:g}")
    row[-1].legend(fontsize=7, title="pool")
    drawing.suptitle(title, fontsize=10)
    plots.save(drawing, path, 110, smoke)


def pictures(found: Sequence[Entry], path: Path, smoke: bool) -> None:
    """Images of the pools that the first seed's first method shared: a row each, two images of each class."""
    from fedcommons.reports import plots

    first = found[0].cell.config
    mine = [e for e in found if e.pool != "none" and e.cell.config.algorithm == first.algorithm]
    rows = [e for e in mine if (e.cell.config.seed, e.cell.config.partition) == (first.seed, first.partition)]
    n_classes, sets = 0, []
    for e in rows:
        made = [m.examples for m in images(e.cell)]
        n_classes = max([n_classes, *(int(m.y.max()) + 1 for m in made)])
        sets.append([(x, int(y)) for m in made for x, y in zip(m.x, m.y, strict=True)])
    wide = 2 * min(n_classes, 10)
    drawing, grid = plots.panels(len(rows), wide, (0.55 * wide + 1.5, 0.65 * len(rows) + 0.3))
    for e, pool, row in zip(rows, sets, grid, strict=True):
        for place, axes in enumerate(row):
            axes.set(xticks=[], yticks=[])
            of_class = [x for x, y in pool if y == place // 2]
            if of_class:
                x = of_class[(place % 2) * (len(of_class) - 1)]
                axes.imshow(x.movedim(0, -1).squeeze().numpy(), cmap="gray", vmin=0, vmax=255)
        epochs = e.cell.config.flat["generator.epochs"]
        row[0].set_ylabel(f"{e.pool}\n{epochs} epochs", fontsize=7, rotation=0, ha="right", va="center")
    plots.save(drawing, path, 110, smoke)


def report(found: Sequence[Entry], options: cli.Options, out: Path, display: Display) -> None:
    """Write table, curves and pictures from the run folders and the store, and show the table."""
    done = [e for e in found if sweep.is_done(e.cell, out)]
    if len(done) < len(found):
        display.say(f"{len(found) - len(done)} of {len(found)} runs are not finished: they are left out.")
    if not (found := done):
        return
    text, records = table(found, out)
    private = [e.cell.config.flat for e in found if "generator.clip" in e.cell.config.flat]
    notes = [
        f"Epsilon is that of the largest client's pool at delta {found[0].cell.config.dp.delta:g} by Renyi accounting, "
        "from what the generators' receipts say was used. With labels: of the whole pool, as labels follow each "
        "client's class counts; none: these are not covered (generator.label_noise 0). Nothing covers the updates of "
        "the model, which every run sends. So the guarantee of the whole run is: none.",
        *(
            f"Private generators: B = {g['generator.batch_size']}, draws an image: {g['generator.draws']}, clip "
            f"{g['generator.clip']:g}, rho = {g['generator.rho']:g}."
            for g in private[:1]
        ),
        grids.work_note([e.cell.config for e in found]),
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]
    markdown = grids.stamped(text + tables.numbered(notes), options)
    write_text(out / "private_fedssyn.md", markdown)
    write_text(out / "private_fedssyn.csv", tables.to_csv(records))
    write_json(out / "summary.json", {"name": out.name, "cells": records})
    title = grids.title([e.cell.config for e in found])
    figure(found, out, out / "private_fedssyn.png", title, grids.is_smoke(options))
    pictures(found, out / "private_fedssyn_images.png", grids.is_smoke(options))
    display.say("\n" + markdown)
