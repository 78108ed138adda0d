"""FedDM: its table 2, figures 1 to 3, its studies of ipc and radius, REAL, and pictures of the synthetic images.

python sweeps/feddm.py                     # digits, 348 runs of seconds
python sweeps/feddm.py --preset smoke      # the same code with smaller numbers
python sweeps/feddm.py --dataset mnist --data-dir DIR      # hours: 2,000 images, rates of their own
python sweeps/feddm.py --preset paper --dataset cifar10 --data-dir DIR --partition.n_clients 50      # for GPUs
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons.config import cli, parts, presets
from fedcommons.config.flat import SHORT_NAMES, choose
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display

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
    "paper": {**_EVERY, "federation.rounds": 20, "client.batch_size": 256, "client.epochs": 10, "client.lr": 0.01},
}  # fmt: skip
"""What the presets set on top of the package's. The sizes of small were chosen on seed 100."""
_LARGE_IMAGES = {"data.limit": 2000, "client.lr": 0.1, "feddm.ipc": 5, "feddm.iterations": 30, "feddm.image_lr": 1.0,
                 "feddm.match_batch": 64, "target": 0.8}  # fmt: skip
"""What small has instead on images of 28x28 and more; chosen on MNIST, seed 100."""
RATES = {
    "smoke": ("", ""),
    "small": ("0.03,0.1,0.3,1", "0.3,1,2,4"),
    "paper": ("", "0.001,0.01,0.1"),  # the paper tries them for the others, and has 1 for the pixels
}
"""``--image-rates`` and ``--rates`` of the presets."""
_LARGE_IMAGES_RATES = ("0.3,1,3", "0.03,0.1,0.3")
OF_RATES = {"image_rates": "feddm.image_lr", "rates": "client.lr"}
"""The options that list rates to choose from, and the field of each."""


@dataclass(frozen=True)
class Entry:
    """A row of a table: a method at an alpha and a rate, with one seed's run. A run may stand in several tables.

    rate: of FedDM the pixels', of REAL none, of others the clients'.
    """

    table: str
    method: str
    alpha: float
    rate: float | None
    cell: sweep.Cell


def arguments(argv: Sequence[str]):
    """Options of the sweep on top of every field of the experiment."""
    preset, dataset = grids.preset_and_dataset(argv)
    if preset not in FIELDS:
        raise UserError(f"--preset must be one of {', '.join(FIELDS)} for FedDM, whose code was not released.")
    fields = {**presets.preset(preset, dataset), **FIELDS[preset]}
    if large := preset == "small" and dataset in presets.LARGE_IMAGES:
        fields |= _LARGE_IMAGES
    if preset == "paper" and dataset == "cifar100":
        fields["feddm.ipc"] = 5
    image_rates, rates = _LARGE_IMAGES_RATES if large else RATES[preset]
    title = (__doc__ or "").partition("\n")[0]
    result = cli.parser(title, argv, fields, {"algorithms": ALGORITHMS})
    for name, default, text in (
        ("preset", "small", f"{', '.join(FIELDS)}: sets the defaults of all fields"),
        ("seeds", "0,1,2", "seeds, separated by commas"),
        ("algorithms", ALGORITHMS, "algorithms, separated by commas"),
        ("alphas", "0.01,0.1,0.5,50", "Dirichlet concentrations, separated by commas"),
        (
            "image-rates",
            image_rates,
            "rates of FedDM's pixels to choose from by validation; empty: feddm.image_lr alone",
        ),
        ("rates", rates, "rates of the others to choose from by validation; empty: client.lr alone"),
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
    if "feddm" not in result.chosen["algorithm"] and (options.ipcs or options.radii or options.sigmas):
        raise UserError("--ipcs, --radii and --sigmas compare FedDM: add feddm to --algorithms or leave them empty.")
    for name, field in OF_RATES.items():
        if field in options.asked and name not in cli.named(argv):
            options[name] = ""  # the one that was asked for
        owners |= {field: _option(name)} if options[name] else {}
        if len(_rates(options, name)) > 1 and options.data.validation == 0:
            raise UserError(f"--{_option(name)} chooses by validation accuracy: data.validation must be above 0.")
    cli.refuse_fields(options, owners)
    return options


def _option(name: str) -> str:
    return name.replace("_", "-")


def _rates(options, name: str) -> Sequence[float]:
    """The rates that an option lists.

    Raises:
        UserError: one of them is not a positive number.
    """
    found = _numbers(f"--{_option(name)}", options[name], float)
    if wrong := [rate for rate in found if rate <= 0]:
        raise UserError(f"--{_option(name)} takes positive numbers separated by commas, got {wrong[0]:g}.")
    return found


def entries(options) -> list[Entry]:
    """All rows with their runs, table by table."""
    base = grids.base(options)
    found: list[Entry] = []
    listed = {field: _rates(options, name) for name, field in OF_RATES.items()}

    def add(table: str, method: str, alpha: float, **fields: Any) -> None:
        values = {**base, "partition.alpha": alpha, **fields}
        own = "feddm.image_lr" if values["algorithm"] == "feddm" else "client.lr"
        real = values["algorithm"] == "feddm" and values["feddm.iterations"] == 0
        rates = [None] if real else listed[own] or [values[own]]
        for rate, seed in product(rates, cli.split("--seeds", options.seeds, int)):
            at = {"seed": seed} if rate is None else {"seed": seed, own: rate}
            cell = sweep.cell(choose({**values, **at}, options.fields), grids.VARIED)
            found.append(Entry(table, method, alpha, rate, cell))

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
    stands = [{"table": e.table, "method": e.method, "at": e.alpha, "rate": e.rate, "cell": e.cell.name} for e in there]
    return pd.DataFrame(stands).astype({"rate": float}).merge(runs, on="cell", how="left")


def notes(frame: Any, options) -> list[str]:
    """What a reader must know to read the numbers."""
    said = [
        f"Rounds: the first whose server model has {100 * options.target:g} % test accuracy; >R: not within R rounds.",
        "MB: 10^6 bytes over all clients; until the target a seed that missed it counts with all its rounds, and the "
        "mean has >.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation; intervals: Student's, for the mean over seeds.",
        "Rate: of feddm the pixels' (feddm.image_lr), of the others client.lr; REAL has none. Where several were "
        "tried, that of each row has the highest validation accuracy after the last round, the mean over seeds, ties "
        "to the smaller; test data had no part in it.",
    ]
    if (server := options.get("feddm.server_lr")) is not None:
        said.append(f"The server of FedDM and REAL is the same: feddm.server_lr {server:g}, not chosen by row.")
    return [*said, *tables.rejected_notes(frame.drop_duplicates("run"))]


def report(found: Sequence[Entry], out: Path, options, display: Display) -> None:
    """Write tables, curves and pictures from the run folders, and show the tables."""
    from papers.feddm import tables as feddm_tables

    frame = rows(found, out, display.say)
    if frame.empty:
        return
    frame, smoke = feddm_tables.with_choice(frame), grids.is_smoke(options)
    text = grids.stamped(feddm_tables.markdown(frame, notes(frame, options)), options)
    stands = [
        {"table": e.table, "method": e.method, "alpha": e.alpha, "rate": e.rate, "run_dir": e.cell.name} for e in found
    ]
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "entries": stands})
    write_text(out / "feddm.md", text)
    names = ("table", "method", "at", "level", "rate", "chosen", *tables.RUN)
    write_text(out / "feddm.csv", tables.to_csv(tables.records(frame, names)))
    feddm_tables.courses(frame, out / "feddm.png", smoke)
    feddm_tables.noise(frame, out / "feddm_noise.png", smoke)
    feddm_tables.pictures(frame, out / "feddm_images.png", smoke)
    feddm_tables.figure1(out / "feddm_figure1.png", smoke)
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
