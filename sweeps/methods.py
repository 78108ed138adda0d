"""Compare methods on the same clients: accuracy with intervals, rounds to a target, bytes, and all curves in a picture.

python sweeps/methods.py                                # five methods on digits, three seeds, minutes on a laptop
python sweeps/methods.py --preset smoke                        # the same code with smaller numbers
python sweeps/methods.py --algorithms fedavg,scaffold,my_lab.py:FedAvgM --alphas 0.01,0.1,1
python sweeps/methods.py --lrs 0.01,0.04,0.1                   # chooses a learning rate for each method
python sweeps/methods.py --preset paper --dataset cifar10 --data-dir DIR      # for GPUs

With --lrs each method tries every learning rate on the seeds of --tuning-seeds. While the best is at an edge of the
list, values beyond the edge are tried, at most three per end. The seeds of the table then use the learning rate with
the best validation accuracy. A learning rate at which a run diverges is excluded, also on a seed of the table; the
notes name it. Test data choose nothing.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets, registry
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Study
from papers.methods import report

METHODS = "fedavg,fedprox,scaffold,fednova,feddyn"
OPTIONS = {"algorithm": "algorithms", "partition.alpha": "alphas", "seed": "seeds"}


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, grid.PRESETS)
    fields = {**presets.preset(preset, dataset), "measure.every": 0, "sharing.setting": "real"}
    parser = grid.study_parser(__doc__, argv, "methods", grid.PRESETS, fields, (
        ("algorithms", str, METHODS, "methods, separated by commas; each is compared with the first"),
        ("alphas", str, "0.1", "Dirichlet concentrations, separated by commas"),
        ("seeds", str, "0,1,2", "seeds that the table reports, separated by commas"),
        ("lrs", str | None, None,
         "learning rates to choose from for each method and alpha, by validation accuracy; default: client.lr for all"),
        learning_rates.OPTION,
    ), lists=dict.fromkeys(("algorithms", "methods"), METHODS),
       short={"alpha": "alphas", "seed": "seeds", "methods": "algorithms"})  # fmt: skip
    parser.hide(OPTIONS)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, {**OPTIONS, **({} if options.lrs is None else {"client.lr": "lrs"})})
    if (setting := options["sharing.setting"]) != "real":
        raise UserError(
            "sharing.setting must be real (no sharing) here, as these methods are compared without a pool, got "
            f"{quote(setting)}: commons compares what is shared."
        )
    if "partition.alpha" not in options.fields and "alphas" in parse.named(argv):
        raise UserError(f"--alphas varies partition.alpha, which {options['partition.name']} does not have.")
    if options.lrs is not None:
        grid.require_validation(options, "lrs")
        learning_rates.tuning_seeds(options)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry per alpha (``at``), method and seed, after entries that choose learning rates."""
    from fedcommons.core.capabilities import capabilities_of  # torch takes seconds to import

    base, result = grid.base(options), []
    alphas = grid.values(options, "alphas", float) if "partition.alpha" in options.fields else (None,)
    methods, seeds = grid.values(options, "algorithms"), grid.values(options, "seeds", int)
    for method in methods:
        component: Any = registry.find("algorithm", method)
        if capabilities_of(component).needs_pool:
            raise UserError(
                f"--algorithms {method} cannot be compared here: its server trains on a pool of synthetic images, and "
                "methods are compared here without a pool. Use fedcommons commons instead."
            )
    names = _names(methods)
    rates = grid.listed(options, "lrs", float) or (options.client.lr,)
    sweep.require_few(len(alphas) * len(methods) * len(seeds))
    for alpha, method, seed in product(alphas, methods, seeds):
        varied = {"algorithm": method, "client.lr": rates[0], "seed": seed}
        cell = grid.cell(options, {**base, **varied, **({} if alpha is None else {"partition.alpha": alpha})})
        label = names[method]
        line = label if alpha is None else f"{label}, alpha {alpha:g}"
        result.append(Entry(cell, {"method": label, "at": alpha, "line": line}))
    tries = [(("client.lr", rate),) for rate in rates]
    return learning_rates.with_tuning(result, tries, learning_rates.tuning_seeds(options))


def _names(methods: Sequence[str]) -> dict[str, str]:
    """Return method -> shortest name in the table: its label, or with the file if two methods have the same label."""
    shorten = registry.label, lambda method: Path(method).name, str
    every = ({method: short(method) for method in methods} for short in shorten)
    return next(names for names in every if len({*names.values()}) == len(names))


methods = Study("methods", arguments, entries, report, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(methods)
