"""FedDM: table 2, figures 1 to 3, 11 and 14 to 17, and studies of the number of images per class and of the radius.

REAL is FedDM with real images instead of fitted images. The radius limits the weights at which images are fitted.

python sweeps/feddm.py                     # digits, some 200 runs of seconds
python sweeps/feddm.py --preset smoke      # the same code with smaller numbers
python sweeps/feddm.py --dataset mnist --data-dir DIR      # hours: 2,000 images, other learning rates
python sweeps/feddm.py --preset paper --dataset cifar10 --data-dir DIR --partition.n_clients 50      # for GPUs

A row with several learning rates has the one with the best validation accuracy on the seeds of --tuning-seeds.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Report, Results, Study

ALGORITHMS = "feddm,fedavg,fedprox,fednova,scaffold"
OF_RATES = {"image-rates": "feddm.image_lr", "rates": "client.lr"}
"""Options that list learning rates to choose from, and the field that each option sets."""


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
"""Config fields that each preset adds to the package's preset. The fields of small were chosen with seed 100."""
_LARGE_IMAGES = {"data.limit": 2000, "client.lr": 0.1, "feddm.ipc": 5, "feddm.iterations": 30, "feddm.image_lr": 1.0,
                 "feddm.match_batch": 64, "target": 0.8}  # fmt: skip
"""Config fields that preset small adds for images of 28x28 and more, chosen on MNIST with seed 100."""
_RATES = {
    "smoke": ("", ""),
    "small": ("0.03,0.1,0.3,1", "0.3,1,2,4"),
    "paper": ("", "0.001,0.01,0.1"),  # the paper's rates for other methods; its only rate for FedDM's pixels is 1
}
"""Preset -> ``--image-rates`` (for FedDM's pixels) and ``--rates`` (for clients of other methods), as texts."""
_LARGE_IMAGES_RATES = ("0.3,1,3", "0.03,0.1,0.3")


def fields(preset: str, dataset: str) -> Mapping[str, Any]:
    """Return the config fields (dotted names) of a preset of this experiment."""
    result = {**presets.preset(preset, dataset), **FIELDS[preset]}
    if _is_large(preset, dataset):
        result |= _LARGE_IMAGES
    if preset == "paper" and dataset == "cifar100":
        result["feddm.ipc"] = 5
    return result


def _is_large(preset: str, dataset: str) -> bool:
    return preset == "small" and dataset in presets.LARGE_IMAGES


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, FIELDS)
    image_rates, rates = _LARGE_IMAGES_RATES if _is_large(preset, dataset) else _RATES[preset]
    paper, tried = preset == "paper", "to choose from by validation accuracy; empty: only"
    parser = grid.study_parser(__doc__, argv, "feddm", FIELDS, fields(preset, dataset), (
        ("seeds", str, "0,1,2", "seeds, separated by commas"),
        ("algorithms", str, ALGORITHMS, "algorithms, separated by commas"),
        ("alphas", str, "0.01,0.1,0.5,50", "Dirichlet concentrations, separated by commas"),
        ("image-rates", str, image_rates, f"learning rates of FedDM's pixels {tried} feddm.image_lr"),
        ("rates", str, rates, f"learning rates of the others {tried} client.lr"),
        ("ipcs", str, "3,5,10" if paper else "1,3,5", "images per class to compare; empty for none"),
        ("radii", str, "3,5,10", "radii to compare; empty for none"),
        ("sigmas", str, "1,3,5", "noise levels of figure 3; empty for none"),
        ("noisy", str, "feddm", "algorithms of figure 3; all but feddm use DP-SGD with the same sigma (slow)"),
        learning_rates.OPTION,
        ("study-alpha", float, 0.5 if paper else 0.1, "alpha of the studies of ipc, radius and noise"),
    ), lists={"algorithms": ALGORITHMS}, short={"alpha": "alphas", "seed": "seeds"})  # fmt: skip
    options = parse.parse(parser, argv)
    if "feddm" not in parser.chosen["algorithm"] and (options.ipcs or options.radii or options.sigmas):
        raise UserError("--ipcs, --radii and --sigmas compare FedDM: add feddm to --algorithms or leave them empty.")
    owners = {"seed": "seeds", "algorithm": "algorithms", "partition.alpha": "alphas"}
    parse.refuse_fields(options, {**owners, **grid.rate_owners(options, argv, OF_RATES)})
    learning_rates.tuning_seeds(options, *OF_RATES)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each table, method, alpha (label ``at``) and seed, after entries that choose learning rates.

    The label ``field`` names the learning rate that is chosen (empty for REAL).
    """
    base, result, seeds = grid.base(options), list[Entry](), learning_rates.tuning_seeds(options, *OF_RATES)
    listed = {field: grid.listed(options, name, float) for name, field in OF_RATES.items()}

    def add(table: str, method: str, alpha: float, fields: Mapping[str, Any], line: str = "") -> None:
        values = {**base, "partition.alpha": alpha, **fields}
        field = "feddm.image_lr" if values["algorithm"] == "feddm" else "client.lr"
        if values["algorithm"] == "feddm" and values["feddm.iterations"] == 0:
            field = ""
        rates = (listed[field] or [values[field]]) if field else []
        labels = {"table": table, "method": method, "at": alpha, "line": f"{line or method}, alpha {alpha:g}"}
        result.extend(learning_rates.of_row(options, labels, values, field, rates[:1] if line else rates, seeds))

    alpha = options.study_alpha
    for alpha_of_row, algorithm in product(grid.values(options, "alphas", float), grid.values(options, "algorithms")):
        add("methods", algorithm, alpha_of_row, {"algorithm": algorithm})
        if algorithm == "feddm":
            add("methods", "REAL", alpha_of_row, {"algorithm": "feddm", "feddm.iterations": 0})
    for ipc in grid.listed(options, "ipcs", int):
        few = {"algorithm": "feddm", "feddm.ipc": ipc, "feddm.least": max(ipc, base["feddm.least"])}
        add("images per class", f"feddm, ipc {ipc}", alpha, few)
    for radius in grid.listed(options, "radii", float):
        add("radius", f"feddm, radius {radius:g}", alpha, {"algorithm": "feddm", "feddm.radius": radius})
    levels = grid.listed(options, "sigmas", float)
    for sigma, algorithm in product([0.0, *levels] if levels else [], grid.values(options, "noisy")):
        private: dict[str, Any] = {"dp.local": sigma > 0, "dp.noise_multiplier": sigma or 1.0}
        noisy = {"feddm.sigma": sigma} if algorithm == "feddm" else private
        add("noise level", f"{algorithm}, noise level {sigma:g}", alpha, {"algorithm": algorithm, **noisy})
    if levels and "feddm" in grid.values(
        options, "noisy"
    ):  # for the report's pictures of images after round 1, at the learning rate of noise level 0
        once = {"algorithm": "feddm", "federation.rounds": 1}
        add("round", "feddm, round 1", alpha, once, "feddm, noise level 0")
    sweep.require_few(len(result))
    return result


def render(results: Results) -> Report:
    from papers.feddm.tables import report

    return report(results)


feddm = Study("feddm", arguments, entries, render, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(feddm)
