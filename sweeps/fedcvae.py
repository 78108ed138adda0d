"""FedCVAE: images from decoders that clients send once, against one-shot averaging, DENSE and FedAvg with rounds.

python sweeps/fedcvae.py --seeds 0,1,2      # digits, some minutes
python sweeps/fedcvae.py --preset smoke     # the same code with smaller numbers
python sweeps/fedcvae.py --preset paper --dataset mnist --data-dir DIR      # the paper's numbers; fmnist too
"""

from collections.abc import Sequence
from itertools import product

from fedcommons.cli import parse
from fedcommons.errors import UserError, quote, unknown
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Study
from papers.fedcvae import presets
from papers.fedcvae.report import report

TAKEN = {
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
    ), lists={"algorithms": presets.ALGORITHMS}, short={"alpha": "alphas", "seed": "seeds", "lr": "rates"})  # fmt: skip
    parser.hide(TAKEN)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, TAKEN)
    if (setting := options["sharing.setting"]) != "real":
        raise UserError(f"sharing.setting must be real (no sharing): these methods have no pool, got {quote(setting)}.")
    if "partition.alpha" not in options.fields:
        raise UserError(f"--alphas varies partition.alpha, which {options['partition.name']} does not have.")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return a trial per alpha (``at``), method, learning rate (None: FedCVAE, with the paper's rates) and seed."""
    base, result = grid.base(options), []
    alphas, rates = grid.values(options, "alphas", float), grid.values(options, "rates", float)
    seeds, methods = grid.values(options, "seeds", int), grid.values(options, "methods")
    for method in methods:
        if method not in presets.METHODS:
            raise unknown("method", method, presets.METHODS)
    grid.require_validation(options, "rates", several=True)
    sweep.require_few(len(alphas) * len(methods) * len(rates) * len(seeds))
    for alpha, method in product(alphas, methods):
        row = presets.row(method, options.preset, base, options.asked)
        fields = {**base, **row, "partition.alpha": alpha}
        for rate, seed in product([None] if row["algorithm"] == "fedcvae" else rates, seeds):
            varied = {"seed": seed} if rate is None else {"seed": seed, "client.lr": rate}
            labels = {"method": method, "at": alpha, "rate": rate}
            result.append(Entry(grid.cell(options, {**fields, **varied}), labels))
    return result


fedcvae = Study("fedcvae", arguments, entries, report)

if __name__ == "__main__":
    parse.main(fedcvae)
