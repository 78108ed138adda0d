"""Report of figures 6 and A.6 of Fedssyn (private generators), from the run folders and the store of images."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.privacy.salts import IF_SECRET, SECRET
from fedcommons.reports import intervals, tables
from fedcommons.reports.cells import Cell
from fedcommons.tune import grid as grids
from fedcommons.tune import sweep
from fedcommons.tune.study import Entry, Report, Results
from papers.fedssyn import private_presets

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from torch import Tensor

    from fedcommons.data.examples import Examples
    from fedcommons.generators.requests import Contribution, GenerationRequest
    from fedcommons.privacy.release import Release


@lru_cache(maxsize=256)
def images(cell: sweep.Trial) -> "Sequence[Contribution]":
    """Return the images that this trial's clients contribute, with the noise of their generators (``receipt``)."""
    from fedcommons.runs.assemble import contributions
    from fedcommons.runs.build import build
    from fedcommons.storage.artifact_store import Store

    return contributions(build(cell.config), Store(Path(cell.config.artifacts), storage=cell.config.storage))


def is_fitted(cell: sweep.Trial) -> bool:
    """Return whether images are fitted to clients' noisy sums (merf, ndpdc), so that there are no generators."""
    return cell.config.sharing.setting in private_presets.OF_SUMS


@lru_cache(maxsize=256)
def releases(cell: sweep.Trial) -> "Sequence[Release]":
    """Return the privacy ledger entries of the clients' noisy sums in this trial; no images are fitted for this."""
    from fedcommons.runs.build import build
    from fedcommons.sharing.stage import Contributions

    prepared = build(cell.config)
    return prepared.stage.release(prepared.client_data, Contributions.from_generated(prepared.client_data, []))[1]


@lru_cache(maxsize=16)
def fitted_images(cell: sweep.Trial) -> "Examples":
    """Return the images that this trial fits to noisy sums; they are computed, as no store has them."""
    from fedcommons.core.worker import set_up_process
    from fedcommons.runs.build import build
    from fedcommons.sharing.exchange import contribute

    set_up_process()
    prepared = build(cell.config)
    return contribute(prepared.stage, prepared.client_data, []).store[slice(len(prepared.train), None)]


def shown_images(cell: sweep.Trial, client: int, label: int) -> "Tensor":
    """Return images (n, C, H, W) of one label in the client's pool.

    Images fitted to noisy sums form one pool of all clients. There the client's number decides which image comes first.
    """
    of_all = is_fitted(cell)
    examples = fitted_images(cell) if of_all else images(cell)[client].examples
    of_label = examples.x[examples.y == label]
    return of_label.roll(-client, 0) if of_all else of_label


def spent(cell: sweep.Trial) -> float | None:
    """Return the largest epsilon of the clients' images (privacy ledger); None if an image lacks a guarantee."""
    from fedcommons.privacy.accountants import epsilon

    receipts = [] if is_fitted(cell) else [contribution.receipt for contribution in images(cell)]
    events = releases(cell) if is_fitted(cell) else [r.release(0) for r in receipts if r is not None]
    if len(events) < len(receipts) or not all(event.covered for event in events):
        return None
    return max(epsilon(e.q, e.sigma, e.steps, cell.config.dp.delta) for e in events)


def table(results: Results) -> tuple[str, list[dict[str, Any]]]:
    """Return a Markdown table and its lines as records: means over seeds for each alpha, method, pool and epochs."""
    head = ["alpha", "algorithm", "pool", "epochs", "epsilon of images", "with labels", "noise multiplier",
            "rounds to target", "last accuracy, %", "best, %"]  # fmt: skip
    lines, records = [], []
    runs = results.runs.drop_duplicates("cell").set_index("cell")
    for (alpha, algorithm, pool, epochs), group in _groups(results.finished).items():
        cell = Cell({}, runs.loc[[e.cell.name for e in group]])
        secret = group[0].cell.config.dp.noise == SECRET
        epsilons = [None] if pool == "none" else [spent(e.cell) for e in group]
        covered = [e for e in epsilons if e is not None]
        sigmas = [r.sigma for e in group for c in images(e.cell) if (r := c.receipt)] if covered else []
        sigmas += [event.sigma for e in group if is_fitted(e.cell) for event in releases(e.cell)]
        budget = "-" if pool == "none" else f"{max(covered):.2f}" if len(covered) == len(group) else "no guarantee"
        budget += " if secret" if covered and not secret else ""
        lines.append(
            [
                f"{alpha:g}", algorithm, pool, str(epochs or "-"), budget, tables.commons_epsilon(cell), _range(sigmas),
                tables.rounds(cell.runs), tables.percent(cell, "last_accuracy"), tables.percent(cell, "best_accuracy"),
            ]
        )  # fmt: skip
        records.append(
            {"alpha": alpha, "algorithm": algorithm, "pool": pool, "epochs": epochs, "seeds": len(group),
             "epsilon" + IF_SECRET * (not secret): max(covered, default=None),
             "noise_multiplier": fmean(sigmas) if sigmas else None,
             "last_accuracy": fmean(cell.values("last_accuracy"))}
        )  # fmt: skip
    return tables.markdown(head, lines), records


_ABOVE = (
    "Test accuracy minus that of the same seed's run without a pool, in points: mean and 95 % interval (Student's t "
    "over the seeds). Lines without a pool: the accuracy itself, in percent."
)


def gains(entries: Sequence[Entry], out: Path) -> str:
    """Return a table of test accuracies minus the accuracies of the same seed's run without a pool, in points.

    Columns are rounds 1, 2 and the last; differences have 95 % intervals. The lines without a pool have the accuracy
    itself instead of a difference.
    """
    from fedcommons.reports.frames import load_rounds

    rounds: Any = load_rounds(*(out / e.cell.name for e in entries))
    rounds["cell"] = [Path(run).name for run in rounds["run"]]
    accuracy = rounds.set_index(["cell", "round"])["test/accuracy"].mul(100).to_dict()
    every = set.intersection(*(set(group["round"]) for _, group in rounds.groupby("cell")))
    after = sorted({1, 2, max(every)} & every)
    groups, lines = _groups(entries), []
    for (alpha, algorithm, pool, epochs), group in groups.items():
        alone = {e.cell.config.seed: e.cell.name for e in groups.get((alpha, algorithm, "none", None), [])}
        texts = []
        for r in after:
            values = [accuracy[e.cell.name, r] for e in group]
            pairs = [(v, accuracy[alone[seed], r]) for v, e in zip(values, group, strict=True)
                     if (seed := e.cell.config.seed) in alone]  # fmt: skip
            over = [v - base for v, base in pairs]
            of_pool = f"{fmean(over):+.1f} {intervals.ends(over)}" if over else "-"
            texts.append(tables.mean_std(values, 1) if pool == "none" else of_pool)
        lines.append([f"{alpha:g}", algorithm, pool, str(epochs or "-"), *texts])
    return tables.markdown(["alpha", "algorithm", "pool", "epochs", *(f"after round {r}" for r in after)], lines)


def _groups(entries: Sequence[Entry]) -> dict[tuple, list[Entry]]:
    """Group the runs by (alpha, algorithm, pool, epochs of the generators); epochs: None without generators."""
    groups: dict[tuple, list[Entry]] = {}
    for e in entries:
        c, fields = e.cell.config, e.cell.config.flat
        groups.setdefault((c.partition.alpha, c.algorithm, e["pool"], fields.get("generator.epochs")), []).append(e)
    return groups


def _range(values: Sequence[float]) -> str:
    low, high = (f"{v:.3g}" for v in (min(values), max(values))) if values else ("-", "-")
    return low if low == high else f"{low} to {high}"


def figure(entries: Sequence[Entry], out: Path, path: Path, title: str, smoke: bool) -> None:
    """Draw epsilon against the generators' epochs for each private pool, and accuracy over rounds with each pool."""
    from fedcommons.privacy.accountants import epsilon
    from fedcommons.reports import plots
    from fedcommons.reports.frames import load_rounds
    from fedcommons.reports.series import course, looks

    pools = list(dict.fromkeys(e["pool"] for e in entries))
    look = looks(pools)
    last = [e for e in entries if e["last"]]
    panels = list(dict.fromkeys((e.cell.config.partition.alpha, e.cell.config.algorithm) for e in last))
    rounds: Any = load_rounds(out)
    rounds["cell"] = [Path(run).name for run in rounds["run"]]
    drawing, (row,) = plots.panels(1, 1 + len(panels), (3.8 * (1 + len(panels)), 4.2))
    for pool in pools:
        entry = next(e for e in last if e["pool"] == pool)
        if "generator.clip" in entry.cell.config.flat:
            epochs, delta = entry.cell.config.flat["generator.epochs"], entry.cell.config.dp.delta
            ticks = sorted({max(1, round(epochs * k / 20)) for k in range(1, 21)})
            receipts = [r for contribution in images(entry.cell) if (r := contribution.receipt)]
            largest = [max(epsilon(r.q, r.sigma, r.steps * e // epochs, delta) for r in receipts) for e in ticks]
            row[0].plot(ticks, largest, color=look[pool][0])
            row[0].annotate(pool, (ticks[-1], largest[-1]), (-4, 6), textcoords="offset points", ha="right", fontsize=8)
    ylabel = "epsilon" if entries[0].cell.config.dp.noise == SECRET else "epsilon, if the noise were secret"
    row[0].set(xlabel="epochs of the generator", ylabel=f"{ylabel} (log)", yscale="log")
    row[0].set_title("epsilon spent by generators, first seed", fontsize=10)
    row[0].margins(y=0.15)
    plots.plain_ticks(row[0].yaxis)
    for axes, (alpha, algorithm) in zip(row[1:], panels, strict=True):
        courses = {}
        for pool in pools:
            names = [e.cell.name for e in last if (e.cell.config.partition.alpha, e.cell.config.algorithm, e["pool"]) ==
                    (alpha, algorithm, pool)]  # fmt: skip
            courses[pool] = course(rounds[rounds["cell"].isin(names) & (rounds["round"] > 0)], "test/accuracy")
        plots.curves(axes, courses, pools)
        axes.set_title(f"{algorithm}, alpha {alpha:g}", fontsize=10)
        axes.set(xlabel="round (log)", ylabel="test accuracy" + plots.percent(axes.yaxis), xscale="log")
        plots.plain_ticks(axes.xaxis)
    seeds = len({e.cell.config.seed for e in last})
    spread = f"line: mean, band: minimum to maximum over {seeds} seeds" if seeds > 1 else "one seed, so no band"
    plots.finish(drawing, f"{title}\n{spread}", "shared pool")
    plots.save(drawing, path, 110, smoke)


def columns(needs: "Sequence[GenerationRequest]") -> list[tuple[int, int, int]]:
    """Return for each class (at most ten) the clients whose generators saw most and fewest images of the class.

    needs: the clients' generation requests. Clients that request no image of the class are ignored. An entry is
    ``(class, index of the client, number of images of the class that the client's generator saw)``.
    """
    chosen = []
    for label in range(min(needs[0].n_classes, 10)):
        requested = [i for i, need in enumerate(needs) if int((need.labels[: need.n] == label).sum())]
        seen = {i: int((needs[i].examples.y == label).sum()) for i in requested}
        if requested:
            ends = max(requested, key=seen.__getitem__), min(requested, key=seen.__getitem__)
            chosen += [(label, i, seen[i]) for i in dict.fromkeys(ends)]
    return chosen


def pictures(entries: Sequence[Entry], path: Path, smoke: bool) -> None:
    """Draw images of the pools of the first seed and the first method: a row per pool, two images per class."""
    from fedcommons.reports import plots
    from fedcommons.runs.build import build

    first = entries[0].cell.config
    of_method = [e for e in entries if e["pool"] != "none" and e.cell.config.algorithm == first.algorithm]
    rows = [e for e in of_method if (e.cell.config.seed, e.cell.config.partition) == (first.seed, first.partition)]
    if not rows:
        return
    by_generators = [e for e in rows if not is_fitted(e.cell)]
    if not by_generators:
        return
    places = columns(build(by_generators[0].cell.config).requests)
    drawing, grid = plots.panels(len(rows), len(places), (0.55 * len(places) + 1.5, 0.65 * len(rows) + 1.1))
    for e, row in zip(rows, grid, strict=True):
        for axes, (label, client, _) in zip(row, places, strict=True):
            axes.set(xticks=[], yticks=[])
            if len(of_class := shown_images(e.cell, client, label)):
                axes.imshow(of_class[0].movedim(0, -1).squeeze().numpy(), cmap="gray", vmin=0, vmax=255)
        epochs = e.cell.config.flat.get("generator.epochs")
        row_label = e["pool"] if epochs is None else f"{e['pool']}\n{epochs} epochs"
        row[0].set_ylabel(row_label, fontsize=7, rotation=0, ha="right", va="center")
    for axes, (label, _, seen) in zip(grid[0], places, strict=True):
        axes.set_title(f"label {label}\nsaw {seen}", fontsize=7, color="#c0392b" if not seen else "k")
    drawing.suptitle(
        "Images of the pools. Of each label: from the generator that saw most real images of the class, and from the "
        "one that saw fewest (red: none)", fontsize=9)  # fmt: skip
    plots.save(drawing, path, 110, smoke)


def report(results: Results) -> Report:
    entries, out, smoke = results.finished, results.out, results.smoke
    text, records = table(results)
    configs = [e.cell.config for e in entries]
    private = [config.flat for config in configs if "generator.clip" in config.flat]
    notes = [
        f"Epsilon is the largest of the clients' pools at delta {configs[0].dp.delta:g}, by the privacy "
        "ledger's accounting of the noise in generators or sums. With labels: epsilon of the whole pool, as labels "
        "follow each client's class counts; none: the images or the class counts (generator.label_noise 0) have no "
        "guarantee. No epsilon covers the model updates that every run sends. So the guarantee of the whole run is: "
        "none.",
        *(
            f"Private generators: B = {g['generator.batch_size']}, draws per image: {g['generator.draws']}, clip "
            f"{g['generator.clip']:g}, rho = {g['generator.rho']:g}."
            for g in private[:1]
        ),
        grids.work_note(configs),
        f"Seeds: {results.options.seeds}; ± is the sample standard deviation.",
    ]
    above = f"\n## What a pool adds\n\n{_ABOVE}\n\n{gains(entries, out)}"
    return Report(
        text + tables.numbered(notes) + above, records, {"cells": records},
        {
            "private_fedssyn.png": lambda path: figure(entries, out, path, grids.title(configs), smoke),
            "private_fedssyn_images.png": lambda path: pictures(entries, path, smoke),
        },
    )  # fmt: skip
