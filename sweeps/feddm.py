"""FedDM: its table 2, figures 1 to 3, its studies of ipc and radius, REAL, and pictures of the synthetic images.

python sweeps/feddm.py                     # digits, minutes on a laptop
python sweeps/feddm.py --preset smoke      # the same code with smaller numbers
python sweeps/feddm.py --dataset mnist --data-dir DIR      # an hour: 2,000 images
python sweeps/feddm.py --preset paper --dataset cifar10 --data-dir DIR --partition.n_clients 50      # for GPUs
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons.accounting import communication
from fedcommons.config import cli, parts, presets
from fedcommons.config.flat import SHORT_NAMES, choose
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.reports import columns, series, tables
from fedcommons.reports.cells import Cell, until_target
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display

MB = 10**6
ALGORITHMS = "feddm,fedavg,fedprox,fednova,scaffold"
_EVERY = {"partition.name": "dirichlet_niid", "federation.weighting": "samples", "model.name": "convnet",
          "measure.every": 0, "data.augment": False}  # fmt: skip
_SMALL = {"model.width": 16, "federation.rounds": 8, "client.batch_size": 32, "client.epochs": 5, "client.lr": 1.0,
          "feddm.ipc": 3, "feddm.least": 10, "feddm.iterations": 20, "feddm.image_lr": 0.3, "feddm.server_epochs": 30,
          "feddm.server_batch": 64, "feddm.server_lr": 0.05, "target": 0.7}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "smoke": {**_EVERY, **_SMALL, "model.width": 4, "federation.rounds": 2, "client.epochs": 1, "feddm.iterations": 2,
              "feddm.server_epochs": 2, "target": 0.2, "data.limit": 600},
    "small": {**_EVERY, **_SMALL},
    "paper": {**_EVERY, "federation.rounds": 20, "client.batch_size": 256, "client.epochs": 10, "client.lr": 0.01,
              "data.validation": 0.0},
}  # fmt: skip
"""What the presets set on top of the package's. The rates and sizes of small were chosen on seed 100."""
_LARGE_IMAGES = {"data.limit": 2000, "client.lr": 0.1, "feddm.ipc": 5, "feddm.iterations": 30, "feddm.image_lr": 1.0,
                 "feddm.match_batch": 64, "target": 0.8}  # fmt: skip
"""What small has instead on images of 28x28 and more; chosen on MNIST, seed 100."""


@dataclass(frozen=True)
class Entry:
    """A row of a table: a method at an alpha, with one seed's run. A run may stand in several tables."""

    table: str
    method: str
    alpha: float
    cell: sweep.Cell


def arguments(argv: Sequence[str]):
    """Options of the sweep on top of every field of the experiment."""
    preset, dataset = grids.preset_and_dataset(argv)
    if preset not in FIELDS:
        raise UserError(f"--preset must be one of {', '.join(FIELDS)} for FedDM, whose code was not released.")
    fields = {**presets.preset(preset, dataset), **FIELDS[preset]}
    if preset == "small" and dataset in presets.LARGE_IMAGES:
        fields |= _LARGE_IMAGES
    if preset == "paper" and dataset == "cifar100":
        fields["feddm.ipc"] = 5
    title = (__doc__ or "").partition("\n")[0]
    result = cli.parser(title, argv, fields, {"algorithms": ALGORITHMS})
    for name, default, text in (
        ("preset", "small", f"{', '.join(FIELDS)}: sets the defaults of all fields"),
        ("seeds", "0,1,2", "seeds, separated by commas"),
        ("algorithms", ALGORITHMS, "algorithms, separated by commas"),
        ("alphas", "0.01,0.1,0.5,50", "Dirichlet concentrations, separated by commas"),
        ("ipcs", "1,3,5" if preset != "paper" else "3,5,10", "images per class to compare; empty for none"),
        ("radii", "3,5,10", "radii to compare; empty for none"),
        ("sigmas", "1,3,5", "noise levels of figure 3; empty for none"),
        ("noisy", "feddm", "algorithms of figure 3: feddm as printed, others by DP-SGD of the same sigma (slow)"),
        ("study-alpha", "0.1" if preset != "paper" else "0.5", "alpha of the studies"),
        ("out", f"runs/feddm-{preset}-{parts.label(dataset)}", "folder of the sweep"),
    ):
        result.add_argument(f"--{name}", type=str, default=default, help=text)
    result.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    cli.add_dry_run(result)
    result.short = {**SHORT_NAMES, "alpha": "alphas", "seed": "seeds"}
    options = cli.parse(result, argv)
    owners = {"seed": "seeds", "algorithm": "algorithms", "partition.alpha": "alphas"}
    cli.refuse_fields(options, owners)
    return options


def entries(options) -> list[Entry]:
    """All rows with their runs, table by table."""
    base = grids.base(options)
    found: list[Entry] = []

    def add(table: str, method: str, alpha: float, **fields: Any) -> None:
        for seed in cli.split("--seeds", options.seeds, int):
            values = {**base, "seed": seed, "partition.alpha": alpha, **fields}
            cell = sweep.cell(choose(values, options.fields), grids.VARIED)
            found.append(Entry(table, method, alpha, cell))

    alpha = float(options.study_alpha)
    algorithms = cli.split("--algorithms", options.algorithms)
    for at, algorithm in product(cli.split("--alphas", options.alphas, float), algorithms):
        add("methods", algorithm, at, algorithm=algorithm)
        if algorithm == "feddm":
            add("methods", "REAL", at, algorithm="feddm", **{"feddm.iterations": 0})
    for ipc in _numbers("--ipcs", options.ipcs, int):
        least = max(ipc, base["feddm.least"])
        add(
            "images per class",
            f"feddm, ipc {ipc}",
            alpha,
            algorithm="feddm",
            **{"feddm.ipc": ipc, "feddm.least": least},
        )
    for radius in _numbers("--radii", options.radii, float):
        add("radius", f"feddm, radius {radius:g}", alpha, algorithm="feddm", **{"feddm.radius": radius})
    levels = _numbers("--sigmas", options.sigmas, float)
    for sigma, algorithm in product([0.0, *levels] if levels else [], cli.split("--noisy", options.noisy)):
        private: dict[str, Any] = {"dp.local": sigma > 0, "dp.noise_multiplier": sigma or 1.0}
        fields = {"feddm.sigma": sigma} if algorithm == "feddm" else private
        add("noise level", f"{algorithm}, sigma {sigma:g}", alpha, algorithm=algorithm, **fields)
    if levels:  # its images are shown: they are those of the first round of a longer run
        add("round", "feddm, round 1", alpha, algorithm="feddm", **{"federation.rounds": 1})
    return found


def _numbers(option: str, text: str, kind: type) -> Sequence[Any]:
    return cli.split(option, text, kind) if text else ()


def rows(found: Sequence[Entry], out: Path, say: Callable[[str], None]) -> Any:
    """A frame, a row for each entry whose run is finished: its table, method and alpha, then the columns of a run.

    level: sigma of the noise, FedDM's own or that of DP-SGD.
    """
    import pandas as pd

    runs: Any = grids.finished(grids.once(e.cell for e in found), out, say)  # pandas' types are too wide for a checker
    if runs.empty:
        return runs
    own, private = (runs.get(name, pd.Series(index=runs.index, dtype=float)) for name in ("feddm.sigma", "sigma"))
    runs = runs.assign(cell=[Path(run).name for run in runs["run"]], level=private.fillna(own).fillna(0.0))
    there = [e for e in found if e.cell.name in set(runs["cell"])]
    stands = [{"table": e.table, "method": e.method, "at": e.alpha, "cell": e.cell.name} for e in there]
    return pd.DataFrame(stands).merge(runs, on="cell", how="left")


def markdown(frame: Any, options) -> str:
    """The tables; a run that missed the target counts with all its rounds, and its cell has ``>``."""
    head = ("alpha", "method", "seeds", "last accuracy, %", "best, %", "rounds to target", "MB up a round",
            "MB down a round", "MB to target")  # fmt: skip
    parts = []
    for table, of_table in frame[frame["table"] != "round"].groupby("table", sort=False):  # that one is for a picture
        lines = []
        for (alpha, method), runs in of_table.groupby(["at", "method"], sort=False):
            of, (total, missed) = Cell({}, runs), communication.sent(until_target(runs), MB, MB)
            each = [f"{(runs[name] / runs['rounds']).mean() / MB:.3f}" for name in ("bytes_up", "bytes_down")]
            accuracies = [tables.percent(of, name) for name in ("last_accuracy", "best_accuracy")]
            known = [columns.text(alpha), method, len(runs), *accuracies, tables.rounds(runs)]
            lines.append([*known, *each, f"{'>' * missed}{total:.2f}"])
        title = "Methods" if table == "methods" else f"By {table}"
        parts.append(f"## {title}\n\n{tables.markdown(head, lines)}")
    notes = (
        f"Rounds: the first whose server model has {100 * options.target:g} % test accuracy; >R: not within R rounds.",
        "MB: 10^6 bytes over all clients; until the target a seed that missed it counts with all its rounds, and the "
        "mean has >.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
        *tables.rejected_notes(frame.drop_duplicates("run")),
    )
    return grids.stamped("\n".join(parts) + tables.numbered(notes), options)


def courses(frame: Any, path: Path, smoke: bool) -> None:
    """Figure 2: accuracy over rounds, over all MB and over MB sent up; a column for each alpha, means over seeds."""
    from fedcommons.reports import plots
    from fedcommons.reports.frames import load_rounds

    main = frame.loc[frame["table"] == "methods", ["run", "method", "at"]]
    if main.empty:
        return
    rounds: Any = load_rounds(*main["run"].unique()).merge(main, on="run")
    rounds["up"] = rounds.groupby("run")["comm/up_bytes"].cumsum().fillna(0) / MB
    rounds["total"] = rounds["comm/total_bytes"].fillna(0) / MB
    alphas, methods = main["at"].unique(), main["method"].unique()
    axes_of = (("round", "rounds"), ("total", "MB up and down"), ("up", "MB up"))
    figure, grid = plots.panels(3, len(alphas), (2.6 * len(alphas) + 1, 7.5), sharey=True)
    for (i, (column, words)), (j, alpha) in product(enumerate(axes_of), enumerate(alphas)):
        axes = grid[i][j]
        for method, colour in zip(methods, series.COLOURS, strict=False):
            mine = rounds[(rounds["method"] == method) & (rounds["at"] == alpha)]
            course = mine.groupby("round")[list({column, "test/accuracy"} - {"round"})].mean().reset_index()
            axes.plot(course[column], 100 * course["test/accuracy"], color=colour, label=method)
        axes.set(xlabel=words, title=f"alpha {alpha:g}" if i == 0 else None)
        if j == 0:
            axes.set_ylabel("test accuracy, %")
    grid[0][-1].legend(fontsize=7)
    plots.save(figure, path, 110, smoke)


def noise(frame: Any, path: Path, smoke: bool) -> None:
    """Figure 3: accuracy of the last round over the level of the noise, means over seeds."""
    of_level = frame.loc[frame["table"] == "noise level", :].groupby(["algorithm", "level"], sort=False)
    points = [series.point(Cell({}, runs), "level", "last_accuracy", name) for (name, _), runs in of_level]
    panel = series.Panel("feddm: as printed, not certified; others: DP-SGD", r"$\sigma$", [p for p in points if p])
    if panel.points:
        series.draw(path, [panel], "last_accuracy", "algorithm", series.title(frame), smoke)


def pictures(frame: Any, path: Path, smoke: bool) -> None:
    """Figures 14 to 17: the first image of each class, of round 1, and of the last round at each noise level."""
    from fedcommons.federation import checkpoint
    from fedcommons.reports import plots
    from fedcommons.tensors import data

    shown = frame[frame["table"].isin(("round", "noise level")) & (frame["algorithm"] == "feddm")]
    sets = {}
    for run, method in shown.drop_duplicates("method")[["run", "method"]].to_numpy():  # of the first seed
        standing = checkpoint.load_latest(Path(run) / "checkpoints")
        if standing and "images" in standing.state:
            sets[method] = data(standing.state["images"]), data(standing.state["labels"])
    if not sets:
        return
    labels = sorted({label for _, y in sets.values() for label in y.tolist()})[:20]
    figure, grid = plots.panels(len(sets), len(labels), (0.8 * len(labels) + 1, len(sets) + 0.4))
    for row, (method, (x, y)) in zip(grid, sets.items(), strict=True):
        for axes, label in zip(row, labels, strict=True):
            axes.set(xticks=[], yticks=[])
            if (y == label).any():
                image = x[y == label][0].movedim(0, -1).numpy()
                low, high = image.min(), image.max()
                axes.imshow(((image - low) / (high - low)).squeeze(), cmap="gray")
        row[0].set_ylabel(method.removeprefix("feddm, "), fontsize=8)
    plots.save(figure, path, 110, smoke)


def figure1(path: Path, smoke: bool) -> None:
    """The loss of one weight, its surrogate of 20 matched points, and its tangent; three seeds."""
    import numpy as np

    from fedcommons.reports import plots
    from fedcommons.studies import surrogate

    w = np.linspace(-2, 10, 200)
    figure, (row,) = plots.panels(1, 3, (9, 2.8), sharey=True)
    for seed, axes in enumerate(row):
        real = surrogate.draw(seed)
        matched = surrogate.match(real, surrogate.first(real, seed), seed)
        for points, name in ((real, "100 real points"), (matched, "20 matched points")):
            axes.plot(w, surrogate.loss(w, points), label=name)
        axes.plot(w, surrogate.tangent(w, real), ":", color="0.4", label="tangent at 0")
        axes.set(xlabel="w", title=f"seed {seed}", ylim=(0, 2))
    row[0].set_ylabel("loss")
    row[0].legend(fontsize=7)
    plots.save(figure, path, 110, smoke)


def report(found: Sequence[Entry], out: Path, options, display: Display) -> None:
    """Write tables, curves and pictures from the run folders, and show the tables."""
    frame = rows(found, out, display.say)
    if frame.empty:
        return
    text, smoke = markdown(frame, options), grids.is_smoke(options)
    stands = [{"table": e.table, "method": e.method, "alpha": e.alpha, "run_dir": e.cell.name} for e in found]
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "entries": stands})
    write_text(out / "feddm.md", text)
    names = ("table", "method", "at", "level", *tables.RUN)
    write_text(out / "feddm.csv", tables.to_csv(tables.records(frame, names)))
    courses(frame, out / "feddm.png", smoke)
    noise(frame, out / "feddm_noise.png", smoke)
    pictures(frame, out / "feddm_images.png", smoke)
    figure1(out / "feddm_figure1.png", smoke)
    display.say("\n" + text)


def feddm(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    found = entries(options)
    out, cells = Path(options.out), grids.once(e.cell for e in found)
    with Display() as display:
        if options.dry_run:
            grids.dry_run(cells, out, display, options.on_cores)
            return 0
        left = sweep.todo(cells, out, display)
        with sweep.open_sweep(out, options.resume):
            outcome = sweep.run_cells(left, out, display)
            report(found, out, options, display)
            return grids.conclude(outcome, started, out, "feddm", display)


if __name__ == "__main__":
    cli.main(feddm)
