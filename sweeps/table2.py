"""Table 2 of Fedssyn and its figures A.1 and A.2: Fedssyn against FedGEN, DENSE, FedDM and plain FedAvg.

python sweeps/table2.py                     # digits, some minutes per seed
python sweeps/table2.py --preset smoke      # the same code with smaller numbers
python sweeps/table2.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers, for GPUs

A row with several learning rates has the one with the best validation accuracy on the seeds of --tuning-seeds.
"""

from collections.abc import Sequence
from itertools import product

from fedcommons.cli import parse
from fedcommons.config.experiment import Experiment
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Study
from papers.fedssyn import table2_presets as presets
from papers.fedssyn.published import fedssyn_table1
from papers.fedssyn.table2_report import report

OWNERS = {"seed": "seeds", "partition.alpha": "alphas", "algorithm": "methods", "sharing.setting": "methods"}
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""
OF_RATES = {"rates": "client.lr", "image-rates": "feddm.image_lr"}
"""Options that list learning rates to choose from, and the field that each option sets."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, presets.FIELDS)
    fields, rates = presets.fields(preset, dataset), presets.RATES[preset]
    lists = {"algorithms": presets.ALGORITHMS, "settings": "real,shuffled_synthetic"}
    parser = grid.study_parser(__doc__, argv, "table2", presets.FIELDS, fields, (
        ("methods", str, ",".join(presets.METHODS), "methods, separated by commas"),
        ("alphas", str, "0.01,0.1", "Dirichlet concentrations, separated by commas"),
        ("rates", str, rates[0],
         "clients' learning rates to choose from by validation accuracy; empty: only client.lr"),
        ("image-rates", str, rates[1],
         "learning rates of FedDM's pixels to choose from by validation accuracy; empty: only feddm.image_lr"),
        learning_rates.OPTION,
    ), lists=lists, short={"alpha": "alphas", "seed": "seeds"})  # fmt: skip
    options = parse.parse(parser, argv)
    grid.values(options, "methods", str, " | ".join(presets.METHODS))
    parse.refuse_fields(options, {**OWNERS, **grid.rate_owners(options, argv, OF_RATES)})
    learning_rates.tuning_seeds(options, *OF_RATES)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each alpha (label ``at``), method and seed, after entries that choose learning rates."""
    base, targets, result = grid.base(options), {}, list[Entry]()
    seeds = learning_rates.tuning_seeds(options, *OF_RATES)
    if options.preset == "paper" and options.target == Experiment().target:  # Table 1's targets by default
        targets = {key[:4]: target for key, (target, _) in fedssyn_table1().items()}
    federation = base["data.name"], base["partition.n_clients"], base["federation.participation"]
    for alpha, method in product(grid.values(options, "alphas", float), grid.values(options, "methods")):
        row = presets.METHODS[method]
        name = "image-rates" if row["algorithm"] == "feddm" else "rates"
        field, target = OF_RATES[name], targets.get((*federation, alpha), options.target)
        rates = grid.listed(options, name, float) or [base[field]]
        fields = {**row, "partition.alpha": alpha, "target": target}
        labels = {"method": method, "at": alpha, "line": f"{method}, alpha {alpha:g}"}
        result += learning_rates.of_row(options, labels, fields, field, rates, seeds)
    sweep.require_few(len(result))
    return result


table2 = Study("table2", arguments, entries, report, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(table2)
