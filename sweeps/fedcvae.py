"""FedCVAE: images from decoders that clients send once, against one-shot averaging, DENSE and FedAvg with rounds.

python sweeps/fedcvae.py --seeds 0,1,2      # digits, some minutes
python sweeps/fedcvae.py --preset smoke     # the same code with smaller numbers
python sweeps/fedcvae.py --preset paper --dataset mnist --data-dir DIR      # the paper's numbers; fmnist too
"""

from collections.abc import Sequence
from itertools import product

from fedcommons.cli import parse
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Study
from papers.fedcvae import presets
from papers.fedcvae.report import report

OPTIONS = {
    "seed": "seeds", "algorithm": "methods", "fedcvae.variant": "methods", "partition.alpha": "alphas",
    "client.lr": "rates", "fedcvae.local_epochs": "client.epochs", "dense.client_epochs": "client.epochs",
}  # fmt: skip
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, presets.FIELDS, large="mnist")
    parser = grid.study_parser(__doc__, argv, "fedcvae", presets.FIELDS, presets.fields(preset, dataset), (
        ("methods", str, ",".join(presets.METHODS), "methods, separated by commas; all but fedavg have one round"),
        ("alphas", str, "0.05,0.01,0.001", "Dirichlet concentrations, separated by commas"),
        ("rates", str, presets.RATES[preset],
         "learning rates of clients that train the classifier, to choose from by validation accuracy"),
        learning_rates.OPTION,
    ), lists={"algorithms": presets.ALGORITHMS}, short={"alpha": "alphas", "seed": "seeds", "lr": "rates"})  # fmt: skip
    parser.hide(OPTIONS)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, OPTIONS)
    if (setting := options["sharing.setting"]) != "real":
        raise UserError(f"sharing.setting must be real (no sharing): these methods have no pool, got {quote(setting)}.")
    if "partition.alpha" not in options.fields:
        raise UserError(f"--alphas varies partition.alpha, which {options['partition.name']} does not have.")
    grid.require_validation(options, "rates", several=True)
    learning_rates.tuning_seeds(options, "rates")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry per alpha (``at``), method and seed, after entries that choose rates (not those of FedCVAE)."""
    rates, seeds, result = grid.values(options, "rates", float), learning_rates.tuning_seeds(options, "rates"), []
    methods = grid.values(options, "methods", str, " | ".join(presets.METHODS))
    for alpha, method in product(grid.values(options, "alphas", float), methods):
        row = presets.row(method, options.preset, grid.base(options), options.asked)
        field = "" if row["algorithm"] == "fedcvae" else "client.lr"
        labels = {"method": method, "at": alpha, "line": f"{method}, alpha {alpha:g}"}
        result += learning_rates.of_row(options, labels, {**row, "partition.alpha": alpha}, field, rates, seeds)
    sweep.require_few(len(result))
    return result


fedcvae = Study("fedcvae", arguments, entries, report, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(fedcvae)
