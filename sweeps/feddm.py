"""FedDM: table 2, figures 1 to 3 and 14 to 17, and studies of the number of images per class and of the radius.

REAL is FedDM with real images instead of fitted images. The radius limits the weights at which images are fitted.

python sweeps/feddm.py                     # digits, 348 runs of seconds
python sweeps/feddm.py --preset smoke      # the same code with smaller numbers
python sweeps/feddm.py --dataset mnist --data-dir DIR      # hours: 2,000 images, other learning rates
python sweeps/feddm.py --preset paper --dataset cifar10 --data-dir DIR --partition.n_clients 50      # for GPUs
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid
from fedcommons.tune.study import Entry, Report, Results, Row, Study, expand
from papers.feddm import presets

ALGORITHMS = "feddm,fedavg,fedprox,fednova,scaffold"
OF_RATES = {"image-rates": "feddm.image_lr", "rates": "client.lr"}
"""Options that list learning rates to choose from, and the field that each option sets."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, presets.FIELDS)
    image_rates, rates = presets.rates(preset, dataset)
    paper, tried = preset == "paper", "to choose from by validation accuracy; empty: only"
    parser = grid.study_parser(__doc__, argv, "feddm", presets.FIELDS, presets.fields(preset, dataset), (
        ("seeds", str, "0,1,2", "seeds, separated by commas"),
        ("algorithms", str, ALGORITHMS, "algorithms, separated by commas"),
        ("alphas", str, "0.01,0.1,0.5,50", "Dirichlet concentrations, separated by commas"),
        ("image-rates", str, image_rates, f"learning rates of FedDM's pixels {tried} feddm.image_lr"),
        ("rates", str, rates, f"learning rates of the others {tried} client.lr"),
        ("ipcs", str, "3,5,10" if paper else "1,3,5", "images per class to compare; empty for none"),
        ("radii", str, "3,5,10", "radii to compare; empty for none"),
        ("sigmas", str, "1,3,5", "noise levels of figure 3; empty for none"),
        ("noisy", str, "feddm", "algorithms of figure 3; all but feddm use DP-SGD with the same sigma (slow)"),
        ("study-alpha", str, "0.5" if paper else "0.1", "alpha of the studies of ipc, radius and noise"),
    ), lists={"algorithms": ALGORITHMS}, short={"alpha": "alphas", "seed": "seeds"})  # fmt: skip
    options = parse.parse(parser, argv)
    if "feddm" not in parser.chosen["algorithm"] and (options.ipcs or options.radii or options.sigmas):
        raise UserError("--ipcs, --radii and --sigmas compare FedDM: add feddm to --algorithms or leave them empty.")
    owners = {"seed": "seeds", "algorithm": "algorithms", "partition.alpha": "alphas"}
    parse.refuse_fields(options, {**owners, **grid.rate_owners(options, argv, OF_RATES)})
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each table, method, alpha (label ``at``), learning rate (None for REAL) and seed."""
    base, rows = grid.base(options), list[Row]()
    listed = {field: grid.listed(options, name, float) for name, field in OF_RATES.items()}

    def add(table: str, method: str, alpha: float, **fields: Any) -> None:
        values = {**base, "partition.alpha": alpha, **fields}
        rate_field = "feddm.image_lr" if values["algorithm"] == "feddm" else "client.lr"
        real = values["algorithm"] == "feddm" and values["feddm.iterations"] == 0
        rates = [None] if real else listed[rate_field] or [values[rate_field]]
        for rate in rates:
            varied = {} if rate is None else {rate_field: rate}
            rows.append(({"table": table, "method": method, "at": alpha, "rate": rate}, {**values, **varied}))

    alpha, *others = grid.values(options, "study-alpha", float)
    if others:
        raise UserError(f"--study-alpha takes one number, got {quote(options.study_alpha)}.")
    for alpha_of_row, algorithm in product(grid.values(options, "alphas", float), grid.values(options, "algorithms")):
        add("methods", algorithm, alpha_of_row, algorithm=algorithm)
        if algorithm == "feddm":
            add("methods", "REAL", alpha_of_row, algorithm="feddm", **{"feddm.iterations": 0})
    for ipc in grid.listed(options, "ipcs", int):
        few = {"feddm.ipc": ipc, "feddm.least": max(ipc, base["feddm.least"])}
        add("images per class", f"feddm, ipc {ipc}", alpha, algorithm="feddm", **few)
    for radius in grid.listed(options, "radii", float):
        add("radius", f"feddm, radius {radius:g}", alpha, algorithm="feddm", **{"feddm.radius": radius})
    levels = grid.listed(options, "sigmas", float)
    for sigma, algorithm in product([0.0, *levels] if levels else [], grid.values(options, "noisy")):
        private: dict[str, Any] = {"dp.local": sigma > 0, "dp.noise_multiplier": sigma or 1.0}
        fields = {"feddm.sigma": sigma} if algorithm == "feddm" else private
        add("noise level", f"{algorithm}, noise level {sigma:g}", alpha, algorithm=algorithm, **fields)
    if levels:  # a run for the report's pictures of images after round 1
        add("round", "feddm, round 1", alpha, algorithm="feddm", **{"federation.rounds": 1})
    return expand(options, rows)


def render(results: Results) -> Report:
    from papers.feddm.tables import report

    return report(results)


feddm = Study("feddm", arguments, entries, render)

if __name__ == "__main__":
    parse.main(feddm)
