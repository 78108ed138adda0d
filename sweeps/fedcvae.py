"""FedCVAE: images from decoders that clients send once, against one-shot averaging, DENSE and FedAvg with rounds.

python sweeps/fedcvae.py --seeds 0,1,2      # digits, some minutes
python sweeps/fedcvae.py --preset smoke     # the same code with smaller numbers
python sweeps/fedcvae.py --preset paper --dataset mnist --data-dir DIR      # the paper's numbers; fmnist too
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

from fedcommons.cli import parse
from fedcommons.config import registry
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.errors import UserError, quote, unknown
from fedcommons.tune import grid, main, sweep
from papers.fedcvae import presets
from papers.fedcvae.report import Entry, report

TAKEN = {
    "seed": "seeds", "algorithm": "methods", "fedcvae.variant": "methods", "partition.alpha": "alphas",
    "client.lr": "rates", "fedcvae.local_epochs": "client.epochs", "dense.client_epochs": "client.epochs",
}  # fmt: skip
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options of the sweep, and an option for each field of the experiment's configuration."""
    preset = parse.early(argv, "preset", "small")
    dataset = parse.early(argv, "data.name", "mnist" if preset == "paper" else "digits")
    fields, title = presets.fields(preset, dataset), (__doc__ or "").partition("\n")[0]
    parser = parse.parser(title, argv, fields, {"algorithms": presets.ALGORITHMS})
    for name, default, text in (
        ("preset", "small", f"{', '.join(presets.FIELDS)}: sets the defaults of all fields"),
        ("seeds", "0", "seeds, separated by commas"),
        ("methods", ",".join(presets.METHODS), "methods, separated by commas; all but fedavg have one round"),
        ("alphas", "0.05,0.01,0.001", "Dirichlet concentrations, separated by commas"),
        (
            "rates",
            presets.RATES[preset],
            "learning rates of clients that train the classifier, to choose from by validation accuracy",
        ),
        ("out", f"runs/fedcvae-{preset}-{registry.label(dataset)}", "folder of the sweep"),
    ):
        parser.add_argument(f"--{name}", type=str, default=default, help=text)
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parse.add_shared(parser)
    parser.short = {**SHORT_NAMES, "alpha": "alphas", "seed": "seeds", "lr": "rates"}
    parser.hide(TAKEN)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, TAKEN)
    if (setting := options["sharing.setting"]) != "real":
        raise UserError(f"sharing.setting must be real (no sharing): these methods have no pool, got {quote(setting)}.")
    if "partition.alpha" not in options.fields:
        raise UserError(f"--alphas varies partition.alpha, which {options['partition.name']} does not have.")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return a trial for each alpha, method, learning rate and seed; FedCVAE uses the paper's learning rates."""
    base, result = grid.base(options), []
    alphas, rates = parse.split("--alphas", options.alphas, float), parse.split("--rates", options.rates, float)
    seeds, methods = parse.split("--seeds", options.seeds, int), parse.split("--methods", options.methods)
    for method in methods:
        if method not in presets.METHODS:
            raise unknown("method", method, presets.METHODS)
    if len(rates) > 1 and options.data.validation == 0:
        raise UserError("--rates chooses by validation accuracy: data.validation must be above 0.")
    sweep.require_few(len(alphas) * len(methods) * len(rates) * len(seeds))
    for alpha, method in product(alphas, methods):
        row = presets.row(method, options.preset, base, options.asked)
        fields = {**base, **row, "partition.alpha": alpha}
        for rate, seed in product([None] if row["algorithm"] == "fedcvae" else rates, seeds):
            varied = {"seed": seed} if rate is None else {"seed": seed, "client.lr": rate}
            result.append(Entry(method, alpha, rate, grid.cell(options, {**fields, **varied})))
    return result


def fedcvae(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    return main.run(options, "fedcvae", grid.once(e.cell for e in rows), partial(report, rows, options))


if __name__ == "__main__":
    parse.main(fedcvae)
