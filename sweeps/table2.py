"""Table 2 of Fedssyn and its figures A.1 and A.2: Fedssyn against FedGEN, DENSE, FedDM and plain FedAvg.

python sweeps/table2.py                     # digits, some minutes per seed
python sweeps/table2.py --preset smoke      # the same code with smaller numbers
python sweeps/table2.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers, for GPUs
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

from fedcommons.cli import parse
from fedcommons.config import registry
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, unknown
from fedcommons.tune import grid, main
from papers.fedssyn import table2_presets as presets
from papers.fedssyn.published import fedssyn_table1
from papers.fedssyn.table2_report import Entry, report

OWNERS = {"seed": "seeds", "partition.alpha": "alphas", "algorithm": "methods", "sharing.setting": "methods"}
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""
OF_RATES = {"rates": "client.lr", "image_rates": "feddm.image_lr"}
"""Options that list learning rates to choose from, and the field that each option sets."""


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options of the sweep, and an option for each field of the experiment's configuration."""
    preset, dataset = grid.preset_and_dataset(argv)
    fields, rates = presets.fields(preset, dataset), presets.RATES[preset]
    title = (__doc__ or "").partition("\n")[0]
    lists = {"algorithms": presets.ALGORITHMS, "settings": "real,shuffled_synthetic"}
    result = parse.parser(title, argv, fields, lists)
    for name, default, text in (
        ("preset", "small", f"{', '.join(presets.FIELDS)}: sets the defaults of all fields"),
        ("seeds", "0", "seeds, separated by commas"),
        ("methods", ",".join(presets.METHODS), "methods, separated by commas"),
        ("alphas", "0.01,0.1", "Dirichlet concentrations, separated by commas"),
        ("rates", rates[0], "clients' learning rates to choose from by validation accuracy; empty: only client.lr"),
        (
            "image-rates",
            rates[1],
            "learning rates of FedDM's pixels to choose from by validation accuracy; empty: only feddm.image_lr",
        ),
        ("out", f"runs/table2-{preset}-{registry.label(dataset)}", "folder of the sweep"),
    ):
        result.add_argument(f"--{name}", type=str, default=default, help=text)
    result.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parse.add_shared(result)
    result.short = {**SHORT_NAMES, "alpha": "alphas", "seed": "seeds"}
    options, owners = parse.parse(result, argv), dict(OWNERS)
    for method in parse.split("--methods", options.methods):
        if method not in presets.METHODS:
            raise unknown("methods", method, presets.METHODS)
    for name, field in OF_RATES.items():
        option = name.replace("_", "-")
        if field in options.asked and name not in parse.named(argv):
            options[name] = ""  # the user set the field itself, so no list of learning rates is tried
        owners |= {field: option} if options[name] else {}
        if "," in options[name] and options.data.validation == 0:
            raise UserError(f"--{option} chooses by validation accuracy: data.validation must be above 0.")
    parse.refuse_fields(options, owners)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return a trial for each alpha, method, learning rate and seed."""
    base, result = grid.base(options), []
    targets = {}
    if options.preset == "paper" and options.target == Experiment().target:  # Table 1's targets by default
        targets = {key[:4]: target for key, (target, _) in fedssyn_table1().items()}
    federation = base["data.name"], base["partition.n_clients"], base["federation.participation"]
    for alpha, method in product(
        parse.split("--alphas", options.alphas, float), parse.split("--methods", options.methods)
    ):
        row = presets.METHODS[method]
        name = "image_rates" if row["algorithm"] == "feddm" else "rates"
        rates = parse.split(f"--{name.replace('_', '-')}", options[name], float) if options[name] else ()
        field = OF_RATES[name]
        values = {**base, **row, "partition.alpha": alpha, "target": targets.get((*federation, alpha), options.target)}
        for rate, seed in product(rates or [base[field]], parse.split("--seeds", options.seeds, int)):
            cell = grid.cell(options, {**values, field: rate, "seed": seed})
            result.append(Entry(method, alpha, rate, cell))
    return result


def table2(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    return main.run(options, "table2", grid.once(e.cell for e in rows), partial(report, rows, options))


if __name__ == "__main__":
    parse.main(table2)
