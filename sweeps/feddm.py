"""FedDM: table 2, figures 1 to 3 and 14 to 17, and studies of the number of images per class and of the radius.

REAL is FedDM with real images instead of fitted images. The radius limits the weights at which images are fitted.

python sweeps/feddm.py                     # digits, 348 runs of seconds
python sweeps/feddm.py --preset smoke      # the same code with smaller numbers
python sweeps/feddm.py --dataset mnist --data-dir DIR      # hours: 2,000 images, other learning rates
python sweeps/feddm.py --preset paper --dataset cifar10 --data-dir DIR --partition.n_clients 50      # for GPUs
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import registry
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid, main, sweep
from papers.feddm import presets
from papers.feddm.report import Entry, report

ALGORITHMS = "feddm,fedavg,fedprox,fednova,scaffold"
OF_RATES = {"image_rates": "feddm.image_lr", "rates": "client.lr"}
"""Options that list learning rates to choose from, and the field that each option sets."""


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options of the sweep, and an option for each field of the experiment's configuration."""
    preset, dataset = grid.preset_and_dataset(argv)
    fields, (image_rates, rates) = presets.fields(preset, dataset), presets.rates(preset, dataset)
    title = (__doc__ or "").partition("\n")[0]
    result = parse.parser(title, argv, fields, {"algorithms": ALGORITHMS})
    for name, default, text in (
        ("preset", "small", f"{', '.join(presets.FIELDS)}: sets the defaults of all fields"),
        ("seeds", "0,1,2", "seeds, separated by commas"),
        ("algorithms", ALGORITHMS, "algorithms, separated by commas"),
        ("alphas", "0.01,0.1,0.5,50", "Dirichlet concentrations, separated by commas"),
        (
            "image-rates",
            image_rates,
            "learning rates of FedDM's pixels to choose from by validation accuracy; empty: only feddm.image_lr",
        ),
        ("rates", rates, "learning rates of the others to choose from by validation accuracy; empty: only client.lr"),
        ("ipcs", "1,3,5" if preset != "paper" else "3,5,10", "images per class to compare; empty for none"),
        ("radii", "3,5,10", "radii to compare; empty for none"),
        ("sigmas", "1,3,5", "noise levels of figure 3; empty for none"),
        ("noisy", "feddm", "algorithms of figure 3; all but feddm use DP-SGD with the same sigma (slow)"),
        ("study-alpha", "0.1" if preset != "paper" else "0.5", "alpha of the studies of ipc, radius and noise"),
        ("out", f"runs/feddm-{preset}-{registry.label(dataset)}", "folder of the sweep"),
    ):
        result.add_argument(f"--{name}", type=str, default=default, help=text)
    result.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parse.add_shared(result)
    result.short = {**SHORT_NAMES, "alpha": "alphas", "seed": "seeds"}
    options = parse.parse(result, argv)
    owners = {"seed": "seeds", "algorithm": "algorithms", "partition.alpha": "alphas"}
    if "feddm" not in result.chosen["algorithm"] and (options.ipcs or options.radii or options.sigmas):
        raise UserError("--ipcs, --radii and --sigmas compare FedDM: add feddm to --algorithms or leave them empty.")
    for name, field in OF_RATES.items():
        if field in options.asked and name not in parse.named(argv):
            options[name] = ""  # the user set the field itself, so no list of learning rates is tried
        owners |= {field: _option(name)} if options[name] else {}
        if len(_rates(options, name)) > 1 and options.data.validation == 0:
            raise UserError(f"--{_option(name)} chooses by validation accuracy: data.validation must be above 0.")
    parse.refuse_fields(options, owners)
    return options


def _option(name: str) -> str:
    return name.replace("_", "-")


def _rates(options: parse.Options, name: str) -> Sequence[float]:
    """Return the learning rates that an option lists."""
    return _numbers(f"--{_option(name)}", options[name], float)


def _alpha(options: parse.Options) -> float:
    """Return the Dirichlet concentration for the studies that vary the images per class, the radius or the noise level.

    Raises:
        UserError: ``--study-alpha`` is not one number.
    """
    alpha, *others = parse.split("--study-alpha", options.study_alpha, float)
    if others:
        raise UserError(f"--study-alpha takes one number, got {quote(options.study_alpha)}.")
    return alpha


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each table, method, alpha, learning rate and seed."""
    base = grid.base(options)
    result: list[Entry] = []
    listed = {field: _rates(options, name) for name, field in OF_RATES.items()}

    def add(table: str, method: str, alpha: float, **fields: Any) -> None:
        values = {**base, "partition.alpha": alpha, **fields}
        rate_field = "feddm.image_lr" if values["algorithm"] == "feddm" else "client.lr"
        real = values["algorithm"] == "feddm" and values["feddm.iterations"] == 0
        rates = [None] if real else listed[rate_field] or [values[rate_field]]
        for rate, seed in product(rates, parse.split("--seeds", options.seeds, int)):
            varied = {"seed": seed} if rate is None else {"seed": seed, rate_field: rate}
            sweep.require_few(len(result) + 1)
            result.append(Entry(table, method, alpha, rate, grid.cell(options, {**values, **varied})))

    alpha = _alpha(options)
    algorithms = parse.split("--algorithms", options.algorithms)
    for alpha_of_row, algorithm in product(parse.split("--alphas", options.alphas, float), algorithms):
        add("methods", algorithm, alpha_of_row, algorithm=algorithm)
        if algorithm == "feddm":
            add("methods", "REAL", alpha_of_row, algorithm="feddm", **{"feddm.iterations": 0})
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
    for sigma, algorithm in product([0.0, *levels] if levels else [], parse.split("--noisy", options.noisy)):
        private: dict[str, Any] = {"dp.local": sigma > 0, "dp.noise_multiplier": sigma or 1.0}
        fields = {"feddm.sigma": sigma} if algorithm == "feddm" else private
        add("noise level", f"{algorithm}, noise level {sigma:g}", alpha, algorithm=algorithm, **fields)
    if levels:  # a run for the report's pictures of images after round 1
        add("round", "feddm, round 1", alpha, algorithm="feddm", **{"federation.rounds": 1})
    return result


def _numbers(option: str, text: str, kind: type) -> Sequence[Any]:
    return parse.split(option, text, kind) if text else ()


def feddm(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    return main.run(options, "feddm", grid.once(e.cell for e in rows), partial(report, rows, options))


if __name__ == "__main__":
    parse.main(feddm)
